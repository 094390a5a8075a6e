"""Frozen weights of dense layers in 4 or 8 bits, by torchao's numbers (QLoRA: Dettmers et al. 2023, arXiv:2305.14314).

Model: a quantized weight is one parameter of bytes (`QuantizedWeight`): the tensors that torchao's `NF4Tensor` or
`Int8Tensor` consists of, one after another. So ranks send, shard and save it like any other parameter. A layer makes
the weight in the dtype of its product, multiplies, and frees it; the backward pass does so again. The bytes are
integers, so that `fully_shard` rounds none of them. They are int8, because layers of T5 cast their input to the dtype
of a weight, but never to int8.

Contract: `quantize` gives torchao's codes, scalers and factors, bit for bit, and `dequantize` what torchao's
`get_original_weight` and `dequantize` give. Quantized are the dense layers whose weight is frozen, but the head, as by
bitsandbytes: the output embedding of a `transformers` network, or else the last dense layer.

Limits: a weight of nf4 has a multiple of 64 numbers; torchao pads no block. A layer that stays dense and that the file
lacks begins as its own `reset_parameters` has it, without a parent's changes (transformers_model.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import embedding, linear

from dslc.compiler.ir.parameter_names import BASE, base_name, is_of_adapter
from dslc.compiler.ir.tensors import NF4_BLOCK, Quantization, QuantizedWeight
from dslc.compiler.trace.private_torch import FakeTensor, own_parameters
from dslc.runtime.model.errors import ModelError
from dslc.runtime.model.tensor_names import seed_of
from dslc.runtime.process.vision_library import let_torchvision_load

_TABLE = 16  # values that the codes of nf4 stand for


class QuantizationError(ModelError):
    """A weight cannot be quantized."""


def quantize(weight: Tensor, form: QuantizedWeight) -> Tensor:
    """Returns the bytes of a weight that has the shape of `form`. Raises QuantizationError and ImportError."""
    values = weight.detach().to(torch.float32)
    values = (values.t() if form.transposed else values).contiguous()
    if not bool(values.isfinite().all()):
        raise QuantizationError(f"`{base_name(form.name)}` has numbers that are not finite")
    if form.kind == "int8":
        from torchao.quantization import Int8Tensor, PerRow

        int8: Any = Int8Tensor.from_hp(values, PerRow())
        return _as_bytes(int8.scale, int8.qdata)
    from torchao.quantization import NF4Tensor

    nf4: Any = NF4Tensor.from_tensor(values, NF4_BLOCK, form.scalers_by_factor)
    if not bool(nf4.quantization_factor.isfinite().all()):
        raise QuantizationError(
            f"`{base_name(form.name)}` has blocks of equal largest numbers, for which torchao's nf4 divides by zero; "
            "int8 takes it"
        )
    return _as_bytes(nf4.nf4, nf4.scaler_mean, nf4.quantization_factor, nf4.quantized_scalers, nf4.quantized_data)


def _as_bytes(*parts: Tensor) -> Tensor:
    rows = (part.new_empty(part.numel()).copy_(part.reshape(-1)) for part in parts)  # of stride 1, also if one number
    return torch.cat([row.view(torch.int8) for row in rows])


def dequantize(data: Tensor, form: QuantizedWeight) -> Tensor:
    """Returns the weight in float32, in the shape of files."""
    weight: Tensor = _dequantize(data, form.kind, form.rows, form.columns, torch.float32)
    return weight.t().contiguous() if form.transposed else weight


# One operation, so that tracing and torch.compile see one, with a result and no other tensors.
@torch.library.custom_op("dslc::dequantize", mutates_args=())
def _dequantize(data: Tensor, kind: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    values = _from_int8(data, rows, columns) if kind == "int8" else _from_nf4(data, rows, columns)
    return values.to(dtype)


@_dequantize.register_fake
def _(data: Tensor, kind: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.empty((rows, columns), dtype=dtype, device=data.device)


def _from_int8(data: Tensor, rows: int, columns: int) -> Tensor:
    scales = data[: 4 * rows].view(torch.float32)
    # In place: a CPU would cast all codes for a product of two dtypes.
    return data[4 * rows :].view(rows, columns).to(torch.float32).mul_(scales.unsqueeze(1))


def _from_nf4(data: Tensor, rows: int, columns: int) -> Tensor:
    numbers = rows * columns
    form = QuantizedWeight(name="", kind="nf4", shape=(rows, columns))
    blocks, by_factor = numbers // NF4_BLOCK, form.scalers_by_factor
    sizes = (4 * _TABLE, 4, 4 * (blocks // by_factor), blocks, numbers // 2)
    table, mean, factors, scalers, codes = data.split(sizes)
    values = table.view(torch.float32)
    # The first number of a pair has the high bits of the byte.
    pairs = torch.stack([values.repeat_interleave(_TABLE), values.repeat(_TABLE)], dim=1)
    weight = embedding(codes.view(torch.uint8).to(torch.int32), pairs).view(blocks, NF4_BLOCK)
    scales = scalers.view(-1, by_factor) / factors.view(torch.float32).unsqueeze(1) + mean.view(torch.float32)
    return weight.mul_(scales.view(blocks, 1)).view(rows, columns)


class _FrozenProductContext(FunctionCtx):
    saved_tensors: tuple[Tensor]  # the bytes of the weight
    form: tuple[str, int, int]


class _FrozenProduct(torch.autograd.Function):
    """The product with a frozen weight, which exists only while each pass multiplies."""

    @staticmethod
    def forward(ctx: _FrozenProductContext, input: Tensor, data: Tensor, kind: str, rows: int, columns: int) -> Tensor:
        ctx.save_for_backward(data)
        ctx.form = kind, rows, columns
        kind_of_device = input.device.type
        low = torch.is_autocast_enabled(kind_of_device)
        dtype = torch.get_autocast_dtype(kind_of_device) if low else input.dtype
        return linear(input.to(dtype), _dequantize(data, kind, rows, columns, dtype))

    @staticmethod
    def backward(ctx: _FrozenProductContext, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (data,), (gradient,) = ctx.saved_tensors, gradients
        return gradient @ _dequantize(data, *ctx.form, gradient.dtype), None, None, None, None


class QuantizedLinear(nn.Module):
    """A dense layer with a frozen weight in 4 or 8 bits; its bias stays in the parameters' precision."""

    def __init__(self, layer: nn.Module, form: QuantizedWeight) -> None:
        super().__init__()
        self.in_features, self.out_features = form.columns, form.rows
        old: Any = layer.weight
        self.form = form
        data = torch.zeros(form.bytes, dtype=torch.int8, device=old.device)
        self.weight = nn.Parameter(data, requires_grad=False)
        self.bias: nn.Parameter | None = layer.bias  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _FrozenProduct.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.form.kind, self.out_features, self.in_features
        )
        return output if self.bias is None else output + self.bias

    def reset_parameters(self) -> None:
        """Makes numbers that the file of weights replaces."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.form.kind}"


def quantizable(module: nn.Module, kind: Quantization) -> tuple[QuantizedWeight, ...]:
    """Returns the weights of a module that `kind` quantizes. Raises QuantizationError if there are none, or if one does
    not fit.
    """
    weights = tuple(_weights(module, kind))
    if not weights:
        raise QuantizationError("no dense layer but the head has a frozen weight")
    for form in weights:
        if kind == "nf4" and prod(form.shape) % NF4_BLOCK:
            shape = " x ".join(map(str, form.shape))
            raise QuantizationError(
                f"`{base_name(form.name)}` has {shape} numbers, which are no multiple of {NF4_BLOCK}"
            )
    return weights


def _weights(module: nn.Module, kind: Quantization) -> Iterator[QuantizedWeight]:
    dense = {name: part for name, part in module.named_modules() if _is_dense(name, part)}
    head = _head(module, list(dense.values()))
    uses = Counter(id(tensor) for part in module.modules() for tensor in own_parameters(part).values())
    for name, part in dense.items():
        weight: Any = part.weight
        if part is not head and not weight.requires_grad and uses[id(weight)] == 1:
            transposed = not isinstance(part, nn.Linear)
            yield QuantizedWeight(name=f"{name}.weight", kind=kind, shape=tuple(weight.shape), transposed=transposed)


def _is_dense(name: str, part: nn.Module) -> bool:
    """True for an `nn.Linear` or a `Conv1D` of transformers that is no part of an adapter."""
    kind = type(part)
    if is_of_adapter(f"{name}.weight") or kind.__name__ == "NonDynamicallyQuantizableLinear":
        return False
    dense = isinstance(part, nn.Linear) and kind.forward is nn.Linear.forward
    return dense or (kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils")


def _head(module: nn.Module, dense: list[nn.Module]) -> nn.Module | None:
    embeddings = getattr(module, "get_output_embeddings", None)
    head: nn.Module | None = embeddings() if callable(embeddings) else None
    if head is not None:
        return getattr(head, BASE, head)  # within its adapter
    return dense[-1] if dense else None


@contextmanager
def dense_layers_without_memory() -> Iterator[None]:
    """Makes dense layers on the meta device, so that a large model's layers never all have memory; `give_memory` ends
    that.
    """
    let_torchvision_load()  # which transformers imports
    from transformers.pytorch_utils import Conv1D

    make = nn.Linear.__init__
    make_transposed: Any = Conv1D.__init__

    def make_on_meta(self: nn.Linear, *args: Any, **options: Any) -> None:
        make(self, *args, **{"device": "meta"} | {name: value for name, value in options.items() if value is not None})

    def make_transposed_on_meta(self: object, *args: object, **options: object) -> None:
        with torch.device("meta"):
            make_transposed(self, *args, **options)

    nn.Linear.__init__, Conv1D.__init__ = make_on_meta, make_transposed_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.__init__, Conv1D.__init__ = make, make_transposed  # type: ignore[method-assign]


def give_memory(module: nn.Module, weights: Iterable[QuantizedWeight], seed: int) -> None:
    """Gives layers without memory initial numbers, each under a seed of its name. A layer that is to be quantized gets
    a weight of zeros that takes no memory.
    """
    quantized = {base_name(form.name).rpartition(".")[0] for form in weights}
    for name, part in module.named_modules():
        if not (isinstance(part, nn.Linear) or _is_dense(name, part)):
            continue
        layer: Any = part
        if not layer.weight.is_meta:
            continue
        if name in quantized:
            layer.weight = nn.Parameter(torch.zeros(()).expand(layer.weight.shape), requires_grad=False)
            if layer.bias is not None:
                layer.bias = nn.Parameter(torch.zeros(layer.bias.shape))
            continue
        layer.to_empty(device="cpu")
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed_of(seed, name))
            layer.reset_parameters()


def quantize_layers(module: nn.Module, weights: Iterable[QuantizedWeight], *, initial: bool = False) -> nn.Module:
    """Puts quantized layers into the places of the layers of `weights`; returns the module. Their weights are zeros,
    which a file replaces, or if `initial` the layers' weights.
    """
    for form in weights:
        path = form.name.rpartition(".")[0]
        parent, _, name = path.rpartition(".")
        layer: Any = module.get_submodule(path)
        quantized = QuantizedLinear(layer, form)
        if initial and not layer.weight.is_meta and not isinstance(layer.weight, FakeTensor):
            quantized.weight.data.copy_(quantize(layer.weight, form))
        setattr(module.get_submodule(parent), name, quantized)
    return module


def quantized_weights(module: nn.Module) -> tuple[QuantizedWeight, ...]:
    return tuple(part.form for part in module.modules() if isinstance(part, QuantizedLinear))
