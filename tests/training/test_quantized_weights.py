"""Adapters over frozen weights in 4 or 8 bits: as a hand-written loop with torchao, on every plan as on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.job_texts import SENTENCES, job_text
from helpers.launcher import Launcher
from helpers.measured_memory import measure
from helpers.tiny_llama import TINY_LLAMA, save_llama
from helpers.trained import Trained, agree, exchanges_as_planned, train_job
from safetensors.torch import load_file

from dslc.compiler.ir.tensors import QuantizedWeight
from dslc.main import main
from dslc.runtime.model.quantized_linear import dequantize
from dslc.runtime.model.tensor_names import seed_of

ADAPTED = ("q_proj", "o_proj", "gate_proj")
RANK, ALPHA, RATE, STEPS, BATCH = 4, 8.0, 1e-2, 4, 8
TWO, FOUR = "devices.cpus=2", "devices.cpus=4"
PLANS = {
    "zero 0": (TWO,),
    "zero 1": (TWO, "parallelism.zero=1"),
    "zero 2": (TWO, "parallelism.zero=2", "parallelism.microbatches=2"),
    "zero 3": (TWO, "parallelism.zero=3"),
    "pipeline": (TWO, "parallelism.pipeline=2", "parallelism.microbatches=2"),
    "context": (TWO, "parallelism.context=2"),
    "all": (FOUR, "parallelism.pipeline=2", "parallelism.microbatches=2", "parallelism.zero=2"),
}
QUICK = ("zero 3",)


def quantized_job(kind: str, batch: int = BATCH) -> str:
    targets = ", ".join(f'"{name}"' for name in ADAPTED)
    return job_text(
        model={
            "network": 'transformers("saved")',
            "weights": f'pretrained("saved", quantize = {kind})',
            "adapter": f"lora({RANK}, [{targets}], alpha = {ALPHA:g})",
        },
        data={"source": 'python("sentences:Sentences")', "batch": batch, "shuffle": "false"},
        train={"steps": STEPS, "optimizer": f"adamw(lr = {RATE})"},
        checkpoint={"every": "2 steps"},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    save_llama(folder / "saved")
    (folder / "sentences.py").write_text(SENTENCES)
    for kind in ("nf4", "int8"):
        (folder / f"{kind}.plt").write_text(quantized_job(kind))
    return folder


@pytest.fixture(scope="module")
def one_rank(folder: Path, launcher: Launcher) -> Trained:
    return train_job(launcher, folder / "nf4.plt")


class LoraLinear(torch.nn.Module):
    """A dense layer of torchao's quantized weight, with the two matrices of LoRA beside some."""

    def __init__(self, layer: torch.nn.Linear, kind: str, name: str) -> None:
        from torchao.quantization import Int8Tensor, PerRow
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor

        super().__init__()
        blocks = layer.weight.numel() // 64
        weight: Any = (
            NF4Tensor.from_tensor(layer.weight.detach(), 64, min(256, blocks & -blocks))
            if kind == "nf4"
            else Int8Tensor.from_hp(layer.weight.detach(), PerRow()).dequantize()
        )
        self.frozen = weight
        self.down = self.up = None
        if name.endswith(ADAPTED):
            generator = torch.Generator().manual_seed(seed_of(0, f"{name}.lora_A.weight"))
            bound = layer.in_features**-0.5
            first = torch.empty(RANK, layer.in_features).uniform_(-bound, bound, generator=generator)
            self.down = torch.nn.Parameter(first)
            self.up = torch.nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = torch.nn.functional.linear(input, self.frozen)
        if self.down is None or self.up is None:
            return output
        change = torch.nn.functional.linear(torch.nn.functional.linear(input, self.down), self.up)
        return output + change * (ALPHA / RANK)


def train_by_hand(folder: Path, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the losses of a plain loop with torchao and LoRA, and the matrices of its adapters."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "saved").requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, LoraLinear(layer, kind, name))
    matrices: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(matrices.values(), lr=RATE)
    if kind == "int8":
        optimizer = torch.optim.SGD(matrices.values(), lr=1.0)
    space: dict[str, Any] = {}
    exec(SENTENCES, space)
    samples = space["Sentences"]()
    losses: list[float] = []
    for step in range(STEPS):
        pairs = [samples[(step * BATCH + n) % len(samples)] for n in range(BATCH)]
        tokens, targets = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        loss = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, matrices


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_job_trains_as_a_loop_with_torchao(folder: Path, launcher: Launcher, one_rank: Trained, kind: str) -> None:
    """A step of SGD at a rate of 1 is the gradient; Adam divides it by its size, so that small ones differ more."""
    by_sgd = "train.optimizer=sgd(lr = 1.0)"
    trained = one_rank if kind == "nf4" else train_job(launcher, folder / "int8.plt", by_sgd)
    losses, matrices = train_by_hand(folder, kind)
    np.testing.assert_allclose(trained.losses(), losses, rtol=0, atol=1e-6)
    assert len(matrices) == 2 * 2 * len(ADAPTED)
    for name, matrix in matrices.items():
        own = name.replace(".down", ".lora_A.default.weight").replace(".up", ".lora_B.default.weight")
        limit = 1e-5 if kind == "nf4" else 1e-6
        np.testing.assert_allclose(trained.weights[own], matrix.detach().numpy(), rtol=0, atol=limit, err_msg=name)
    packed = [name for name, values in trained.weights.items() if values.dtype == np.int8]
    assert len(packed) == 2 * 7 and trained.weights["lm_head.weight"].dtype == np.float32


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=pytest.mark.slow if plan in QUICK else pytest.mark.long) for plan in PLANS]
)
def test_each_plan_as_one_rank(folder: Path, launcher: Launcher, one_rank: Trained, plan: str) -> None:
    other = train_job(launcher, folder / "nf4.plt", *PLANS[plan])
    agree(one_rank, other, weights=0.05 * RATE * STEPS)
    np.testing.assert_allclose(one_rank.losses(), other.losses(), rtol=0, atol=1e-5)
    for name, values in one_rank.weights.items():
        if values.dtype == np.int8:
            np.testing.assert_array_equal(values, other.weights[name], err_msg=name)


@pytest.mark.slow
def test_it_resumes_on_other_ranks_and_is_exported(
    folder: Path, launcher: Launcher, one_rank: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """The merged weights are the dequantized ones with the adapters' change."""
    middle = f'checkpoint.resume="{one_rank.folder}/checkpoints/step-00000002"'
    resumed = train_job(launcher, folder / "nf4.plt", middle, *PLANS["zero 3"])
    np.testing.assert_allclose(resumed.losses(), one_rank.losses()[2:], rtol=0, atol=1e-5)
    newest = str(one_rank.folder / "checkpoints" / "step-00000004")
    command = ["export", str(folder / "nf4.plt"), "--checkpoint", newest, "-o"]
    for output in (["merged"], ["adapter", "--adapter"]):
        assert main([*command, str(folder / output[0]), *output[1:]]) == 0, capsys.readouterr().err
    merged, weights = load_file(folder / "merged" / "model.safetensors"), one_rank.weights
    assert merged.keys() == load_file(folder / "saved" / "model.safetensors").keys()
    for name, inner in (("q_proj", ".base_layer"), ("k_proj", "")):
        layer = f"model.layers.1.self_attn.{name}"
        form = QuantizedWeight(name=layer, kind="nf4", shape=tuple(merged[f"{layer}.weight"].shape))
        expected = dequantize(torch.from_numpy(weights[f"{layer}{inner}.weight"]), form)
        if inner:
            down, up = (torch.from_numpy(weights[f"{layer}.lora_{part}.default.weight"]) for part in "AB")
            expected = expected + up @ down * (ALPHA / RANK)
        assert torch.equal(merged[f"{layer}.weight"], expected), name
    assert len(load_file(folder / "adapter" / "adapter_model.safetensors")) == 2 * 2 * len(ADAPTED)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero 3", pytest.param("zero 2", marks=pytest.mark.long)])
def test_a_step_gathers_the_bytes_that_were_planned(
    folder: Path, launcher: Launcher, tmp_path: Path, plan: str
) -> None:
    exchanges_as_planned(launcher, tmp_path / "recorded", folder / "nf4.plt", *PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("nf4", ""),
        pytest.param("int8", "", marks=pytest.mark.long),
        ("nf4", "devices { cpus = 2 }\nparallelism { zero = 3 }\n"),
    ],
    ids=["nf4", "int8", "shards"],
)
def test_the_account_is_exact_at_rest_and_close_where_weights_are_dequantized(
    folder: Path, kind: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("hidden_size", 256), ("intermediate_size", 512)):
        monkeypatch.setitem(TINY_LLAMA, name, size)
    if not (folder / "wide").exists():
        save_llama(folder / "wide")
    text = quantized_job(kind, batch=2).replace('"saved"', f'"{folder}/wide"')
    memory = measure(text.replace('"sentences:', f'"{folder}/sentences:') + plan)
    for name in ("parameters", "gradients", "optimizer", "buffers"):
        assert memory.at_rest[name] == getattr(memory.predicted, name), name
    assert "pass of model.layers" in memory.predicted.when and "_FrozenProduct" in memory.when
    assert abs(memory.error) <= 0.02, (memory.error, memory.predicted, memory.at_peak, memory.when)
