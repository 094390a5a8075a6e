"""Recomputation changes only which tensors are kept."""

from __future__ import annotations

import copy
import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import trained
from helpers.launcher import Launcher
from helpers.made_programs import conv_model, gpt_model, images, places, program, tokens
from helpers.trained import Trained, agree
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dslc.compiler.ir import program as p
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.model import LayerNode, build
from dslc.dsl.diagnostics import Report
from dslc.dsl.language import layers as s
from dslc.dsl.language.blocks import ModelSpec
from dslc.dsl.language.calls import CrossEntropy
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.technique import recompute

KINDS = ("full", "selective")


def twice(model: nn.Module, input: torch.Tensor, autocast: bool = False) -> None:
    """Two micro-batches, one after the other."""
    for part in input.chunk(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(part)
        output.float().square().mean().backward()


def equal(one: nn.Module, other: nn.Module) -> None:
    """Asserts equal gradients and buffers, to the bit."""
    gradients = [{name: value.grad for name, value in each.named_parameters()} for each in (one, other)]
    buffers = [dict(each.named_buffers()) for each in (one, other)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    torch.testing.assert_close(buffers[1], buffers[0], rtol=0, atol=0)


def recomputing(model: nn.Module, kind: Any, *modules: str) -> nn.Module:
    made = copy.deepcopy(model)
    recompute.apply(p.RecomputeStep(kind=kind, modules=modules), made)
    return made


# ------------------------------------------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("autocast", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_to_the_bit(kind: str, autocast: bool) -> None:
    model = build_model(gpt_model(), "cpu")
    again = recomputing(model, kind, "2")
    input = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
    twice(model, input, autocast)
    twice(again, input, autocast)
    equal(model, again)
    with torch.no_grad():
        assert torch.equal(model(input), again(input))


class Shared(nn.Module):
    """Calls one block three times, and another that shares a weight with it."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = (nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.other[0].weight = self.block[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + self.block(x)
        return self.other(x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_several_use_is_cast_for_each(kind: str) -> None:
    torch.manual_seed(0)
    model = Shared()
    again = recomputing(model, kind, "block", "other")
    input = torch.randn(8, 6)
    twice(model, input, autocast=True)
    twice(again, input, autocast=True)
    # A copy that autocast keeps adds its gradients up in 16 bits.
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(again.get_parameter(name).grad, parameter.grad, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("norm", (".BatchNorm2d", "BatchNorm2d"))
@pytest.mark.parametrize("kind", KINDS)
def test_batch_statistics_are_updated_once(kind: str, norm: str) -> None:
    model = build_model(conv_model(), "cpu")
    if norm == "BatchNorm2d":
        model.get_submodule("1").__class__ = model.get_submodule("5").__class__ = nn.BatchNorm2d
    model = nn.Sequential(model)  # one block with a norm within, and another norm outside
    again = recomputing(model, kind, "0")
    input = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)) + 2
    twice(model, input)
    twice(again, input)
    equal(model, again)
    assert again.get_buffer("0.1.num_batches_tracked") == 2
    model.eval()
    again.eval()
    twice(model, input)
    twice(again, input)
    equal(model, again)


class Counting(nn.Module):
    """Writes one buffer in place, and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(len(x))
        self.last = x.detach().mean(0)
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_that_a_module_writes_is_written_once(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counting())
    again = recomputing(model, kind, "1")
    input = torch.randn(6, 4)
    model(input).sum().backward()
    again(input).sum().backward()
    equal(model, again)
    assert again.get_buffer("1.seen") == 6


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_draws_the_same_numbers_again(kind: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)))
    again = recomputing(model, kind, "1")
    input = torch.randn(16, 8)
    for each in (model, again):
        torch.manual_seed(7)
        twice(each, input)
    equal(model, again)


def test_what_may_draw_random_numbers() -> None:
    assert not recompute.draws_numbers(build_model(gpt_model(), "cpu"))
    assert not recompute.draws_numbers(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    assert recompute.draws_numbers(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    assert recompute.draws_numbers(nn.LSTM(2, 2, 2, dropout=0.1))
    assert recompute.draws_numbers(Counting())


# ------------------------------------------------------------------------------------------------ what is kept


class Alive(TorchDispatchMode):
    """Counts the storages made by operations that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes(self, *besides: torch.Tensor) -> int:
        gc.collect()
        without = {tensor.untyped_storage()._cdata for tensor in besides}
        return sum(size for key, (ref, size) in self._made.items() if key not in without and not ref.expired())


def block(network: Any, source: SourceFacts) -> tuple[LayerNode, nn.Module]:
    """Returns the middle block of a network, as the account has it and as a module."""
    report = Report()
    graph = report.collect(build(ModelSpec(network=network, loss=CrossEntropy()), source, None))
    assert graph is not None, report.errors
    blocks = [layer for layer in graph.layers if layer.recomputable]
    node = blocks[len(blocks) // 2]
    made = build_model(p.ModelStep(root=graph.root, inits=graph.inits, ties=graph.ties), "cpu")
    return node, made.get_submodule(node.name)


TEXT = SourceFacts(
    input=TensorFact(shape=(64,), dtype="int64"), target=TensorFact(shape=(64,), dtype="int64"), vocab=64
)
PICTURES = SourceFacts(
    input=TensorFact(shape=(3, 16, 16), dtype="float32"), target=TensorFact(shape=(), dtype="int64"), classes=10
)
NETWORKS = {
    "gpt": (s.GPT(layers=3, width=64, heads=4, context=64, vocab=64), TEXT),
    "resnet": (s.ResNet(depth=18), PICTURES),
    "residual": (
        (
            s.Conv2d(channels=8, kernel=3, padding=1),
            s.Residual(layers=(s.Conv2d(channels=8, kernel=3, padding=1), s.BatchNorm(), s.ReLU())),
            s.Flatten(),
            s.Linear(features=10),
        ),
        PICTURES,
    ),
}


@pytest.mark.parametrize("autocast", (False, pytest.param(True, marks=pytest.mark.slow)))
@pytest.mark.parametrize("name", NETWORKS)
def test_a_block_keeps_what_the_account_says(name: str, autocast: bool) -> None:
    node, module = block(*NETWORKS[name])
    samples = 4
    for kind in KINDS:
        made = nn.Sequential(copy.deepcopy(module))
        recompute.apply(p.RecomputeStep(kind=kind, modules=("0",)), made)  # type: ignore[arg-type]
        # As it comes from a block before: in 16 bits only where a block ends in a product.
        low = autocast and node.autocast.selective < node.float32.selective / 2 + 1
        input = torch.randn(samples, *node.input.shape, dtype=torch.bfloat16 if low else torch.float32)
        input.requires_grad_()
        with Alive() as alive, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = made(input)
        kept = alive.bytes(output, *made.parameters()) + input.nbytes
        expected = node.input.bytes if kind == "full" else node.float32.selective + node.float32.shared
        if autocast and kind == "selective":
            expected = node.autocast.selective + node.autocast.shared
        elif low:
            expected //= 2
        assert kept == pytest.approx(expected * samples, rel=0.03), (kind, kept / samples, expected)
        output.float().sum().backward()  # the kept tensors are enough


# --------------------------------------------------------------------------------------------- over real processes


def train(launcher: Launcher, folder: Path, ranks: int, data: p.DataStep, **changed: Any) -> Trained:
    return trained.train(launcher, folder, program(ranks, data, **changed), places(ranks))


@pytest.mark.parametrize("kind", KINDS)
def test_synchronised_batch_norm_in_micro_batches_on_two_ranks(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    data = images(tmp_path)
    step = p.RecomputeStep(kind=kind, modules=("1", "4", "5"))  # type: ignore[arg-type]
    plain = train(launcher, tmp_path / "plain", 2, data, microbatches=2)
    agree(plain, train(launcher, tmp_path / "again", 2, data, microbatches=2, recompute=step))


def test_a_transformer_in_16_bits_on_two_ranks(launcher: Launcher, tmp_path: Path) -> None:
    data = tokens(tmp_path)
    common: dict[str, Any] = {"model": gpt_model(), "precision": p.PrecisionStep(dtype="bfloat16"), "clip": 0.5}
    plain = train(launcher, tmp_path / "plain", 2, data, **common)
    for kind in KINDS:
        step = p.RecomputeStep(kind=kind, modules=("2",))  # type: ignore[arg-type]
        agree(plain, train(launcher, tmp_path / kind, 2, data, recompute=step, **common))


@pytest.mark.parametrize(("kind", "reshard"), (("full", True), ("selective", False)))
def test_within_what_gathers_parameters_on_two_ranks(
    launcher: Launcher, tmp_path: Path, kind: Any, reshard: bool
) -> None:
    data = tokens(tmp_path)
    common: dict[str, Any] = {"model": gpt_model(), "clip": 0.5}
    plain = train(launcher, tmp_path / "plain", 1, data, **common)
    step = p.RecomputeStep(kind=kind, modules=("2",))
    sharded = p.GradientStep(kind="fsdp", units=("2",), reshard=reshard)
    changed = {"recompute": step, "gradients": sharded, "microbatches": 2}
    agree(plain, train(launcher, tmp_path / "again", 2, data, **common, **changed))


class Counts(nn.Module):
    """Counts its forward passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("passes").add_(1)
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize("norm", [False, True])
def test_a_backward_pass_in_halves_recomputes_twice_and_moves_buffers_once(norm: bool) -> None:
    """As the schedules that split backward passes do: the gradient of the input first, that of the weights later."""
    model = nn.Sequential(nn.Sequential(Counts(), nn.BatchNorm1d(4) if norm else nn.Identity()))
    recompute.apply(p.RecomputeStep(kind="full", modules=("0",)), model)
    x = torch.randn(6, 4, requires_grad=True)
    loss = model(x).square().sum()
    (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
    of_weights = torch.autograd.grad(loss, list(model.parameters()))
    assert of_input.shape == x.shape and all(bool(each.isfinite().all()) for each in of_weights)
    assert model.get_buffer("0.0.passes").item() == 1


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("draw", [random.randrange, np.random.randint])
def test_a_block_that_host_randomness_leads_takes_the_same_path_again(kind: Any, draw: Any) -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.parts[draw(2)](x))

    def gradients(step: p.RecomputeStep) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Either() for _ in range(6)))
        recompute.apply(step, model)
        random.seed(3)
        np.random.seed(3)
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        return [random.random(), np.random.rand(), *(parameter.grad for parameter in model.parameters())]

    plain = gradients(p.RecomputeStep())
    recomputed = gradients(p.RecomputeStep(kind=kind, modules=tuple("012345")))
    for one, other in zip(plain, recomputed, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_a_compiled_module_of_ones_own_recomputes(kind: Any) -> None:
    """It may draw random numbers of the host, whose contexts the compiler does not take."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return x + self.layer(x).tanh()

    model, inputs = nn.Sequential(Block()), torch.randn(3, 4)
    model(inputs).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    recompute.apply(p.RecomputeStep(kind=kind, modules=("0",)), model)
    compiled: Any = torch.compile(model, backend="aot_eager")
    compiled(inputs).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
