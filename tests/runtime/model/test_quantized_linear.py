"""Frozen weights in 4 or 8 bits: torchao's numbers, bit for bit, in one tensor of bytes, and products with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dslc.compiler.ir.program import AdapterStep, ModelStep, TransformersStep
from dslc.compiler.ir.tensors import Quantization, QuantizedWeight
from dslc.runtime.model.adapters import add
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.model.quantized_linear import (
    QuantizationError,
    QuantizedLinear,
    dense_layers_without_memory,
    dequantize,
    give_memory,
    quantizable,
    quantize,
    quantize_layers,
)
from dslc.runtime.model.transformers_model import build_transformers

KINDS: tuple[Quantization, ...] = ("nf4", "int8")


def form_of(weight: Tensor, kind: Quantization, **options: bool) -> QuantizedWeight:
    return QuantizedWeight(name="x.weight", kind=kind, shape=tuple(weight.shape), **options)


def of_torchao(weight: Tensor, form: QuantizedWeight) -> tuple[list[Tensor], Tensor]:
    """Returns the tensors that torchao keeps, and the weight that it makes of them."""
    if form.kind == "nf4":
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor

        nf4: Any = NF4Tensor.from_tensor(weight, 64, form.scalers_by_factor)
        return [getattr(nf4, name) for name in nf4.__tensor_flatten__()[0]], nf4.get_original_weight()
    from torchao.quantization import Int8Tensor, PerRow

    int8: Any = Int8Tensor.from_hp(weight, PerRow())
    return [int8.qdata, int8.scale], int8.dequantize()


@pytest.mark.parametrize("shape", [(1, 64), (3, 64), (48, 32), (256, 256), (320, 192)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_has_the_numbers_and_the_bytes_of_torchao(kind: Quantization, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.1
    form = form_of(weight, kind)
    if kind == "nf4" and weight.numel() == 64:  # one block, whose scaler is the mean of all
        with pytest.raises(QuantizationError, match="int8 takes it"):
            quantize(weight, form)
        return
    data, (parts, made) = quantize(weight, form), of_torchao(weight, form)
    assert data.dtype == torch.int8 and data.numel() == form.bytes == sum(part.nbytes for part in parts)
    assert torch.equal(dequantize(data, form), made)
    error = (made - weight).abs().max() / weight.abs().max()
    assert error < (0.2 if kind == "nf4" else 0.005)


def test_a_transposed_weight_is_quantized_by_outputs() -> None:
    weight = torch.randn(64, 48)
    form = form_of(weight, "int8", transposed=True)
    assert (form.rows, form.columns) == (48, 64)
    data = quantize(weight, form)
    assert torch.equal(data, quantize(weight.t().contiguous(), form_of(weight.t(), "int8")))
    assert dequantize(data, form).shape == weight.shape


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_multiplies_as_one_with_the_dequantized_weight(kind: Quantization, low: bool) -> None:
    layer = nn.Linear(64, 48)
    form = form_of(layer.weight, kind)
    quantized = QuantizedLinear(layer, form)
    quantized.weight.data.copy_(quantize(layer.weight, form))
    layer.weight.data.copy_(dequantize(quantized.weight, form))
    results = []
    for module in (layer, quantized):
        input = torch.randn(5, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            output = module(input)
        output.float().square().sum().backward()
        assert input.grad is not None
        results.append((output.detach().float(), input.grad))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02 if low else 1e-6, atol=0.05 if low else 1e-5)
    assert quantized.weight.grad is None


def test_heads_trained_layers_and_tied_weights_keep_their_precision() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
            self.tied, self.head = nn.Linear(64, 64), nn.Linear(64, 8)
            self.tied.weight = self.third.weight
            self.requires_grad_(False)
            self.second.requires_grad_(True)

    network = Network()
    forms = quantizable(network, "nf4")
    assert [form.name for form in forms] == ["first.weight"]
    quantize_layers(network, forms, initial=True)
    assert isinstance(network.first, QuantizedLinear) and not bool(network.first(torch.ones(64)).isnan().any())
    with pytest.raises(QuantizationError, match="no dense layer but the head"):
        quantizable(nn.Sequential(nn.Linear(8, 8)), "int8")
    odd = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3)).requires_grad_(False)
    with pytest.raises(QuantizationError, match="3 x 5 numbers, which are no multiple of 64"):
        quantizable(odd, "nf4")
    with pytest.raises(QuantizationError, match="not finite"):
        quantize(torch.full((64, 64), torch.nan), form_of(torch.empty(64, 64), "int8"))


def test_a_layer_that_is_to_be_quantized_never_has_a_weight_in_memory() -> None:
    form = QuantizedWeight(name="0.base_layer.weight", kind="int8", shape=(64, 64))
    heads = []
    for _ in range(2):
        with dense_layers_without_memory():
            inner, head = nn.Linear(64, 64), nn.Linear(64, 8)
        assert inner.weight.is_meta and head.weight.is_meta
        give_memory(nn.Sequential(inner, head), [form], seed=3)
        assert inner.weight.untyped_storage().nbytes() == 4
        heads.append(head.weight.detach())
    assert torch.equal(*heads) and bool(heads[0].ne(0).any())
    assert not nn.Linear(8, 8).weight.is_meta


def test_layers_that_stay_dense_begin_as_the_library_has_it_on_each_plan() -> None:
    """Whole or in parts, a head has the library's spread of numbers, as without quantization."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    network = TransformersStep(
        name="bert", kind="sequence_classification", labels=64, arguments={**sizes, "vocab_size": 40}
    )
    adapter = AdapterStep(rank=4, targets=("*query",), save=("classifier",), alpha=8.0)
    with torch.device("meta"):
        forms = quantizable(add(build_transformers(network), adapter, 0), "int8")
    whole, in_parts = (
        build_model(
            ModelStep(transformers=network, adapter=adapter, seed=3, quantized=forms, reset=reset), "cpu"
        ).state_dict()
        for reset in (False, True)
    )
    assert whole.keys() == in_parts.keys()
    for name in ("classifier.weight", "classifier.bias", "bert.encoder.layer.0.output.dense.weight"):
        assert torch.equal(whole[name], in_parts[name]), name
    assert abs(whole["classifier.weight"].std() - 0.02) < 0.001 and not whole["classifier.bias"].any()


def test_transposed_layers_take_no_memory_before_they_are_quantized() -> None:
    """The dense layers of GPT-2 are made without memory; one that trains then has the library's numbers."""
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 40, "n_positions": 12}
    network = TransformersStep(name="gpt2", arguments=sizes)
    with dense_layers_without_memory():
        made = build_transformers(network)
    forms = quantizable(made.requires_grad_(False), "int8")
    assert len(forms) == 4 and all(made.get_parameter(form.name).is_meta for form in forms)
    adapter = AdapterStep(rank=4, targets=("*c_attn",), save=("transformer.h.0.mlp.c_fc",), alpha=8.0)
    with torch.device("meta"):
        forms = quantizable(add(build_transformers(network), adapter, 0), "int8")
    whole, in_parts = (
        build_model(ModelStep(transformers=network, adapter=adapter, quantized=forms, reset=reset), "cpu")
        for reset in (False, True)
    )
    assert not any(tensor.is_meta for tensor in whole.state_dict().values()) and len(forms) == 3
    layer: Any = whole.get_submodule("transformer.h.0.mlp.c_fc")
    assert torch.equal(layer.weight, in_parts.get_parameter("transformer.h.0.mlp.c_fc.weight"))
    assert abs(layer.weight.std() - 0.02) < 0.001 and not layer.bias.any()
    assert whole(torch.zeros(1, 5, dtype=torch.int64)).isfinite().all()
