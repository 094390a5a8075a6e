"""Sharded trainings on real processes are the training of one, however it is sharded."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import trained
from helpers.gang import gang
from helpers.launcher import Launcher
from helpers.made_programs import conv_model, gpt_model, images, optimizer_step, places, program, python, tokens
from helpers.trained import Trained, agree
from torch import nn

from dslc.compiler.ir import program as p
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.step.assemble import TrainingComponents, assemble
from dslc.runtime.step.stepper import stepper

CPU = torch.device("cpu")
KEPT = p.LossStep(kind="cross_entropy", counts="kept", ignore=-100)
SGD = optimizer_step("SGD", lr=0.05, momentum=0.9)
ADAMW = optimizer_step("AdamW", lr=0.01, weight_decay=0.1, no_decay=("*.bias", "*norm*"))


def sharded(units: tuple[str, ...], zero: int, replicas: int = 1) -> p.GradientStep:
    """Returns the gradient step as the compiler makes it."""
    return p.GradientStep(kind="fsdp", units=units, replicas=replicas, reshard=zero == 3, accumulate=zero <= 1)


def train(launcher: Launcher, folder: Path, ranks: int, data: p.DataStep, **changed: Any) -> Trained:
    folder.mkdir()
    return trained.train(launcher, folder, program(ranks, data, **changed), places(ranks))


# (ranks, zero, replicas, micro-batches)
LAID_OUT = [(2, 3, 1, 4), (4, 3, 1, 1), (2, 2, 1, 4), (4, 2, 2, 4), (4, 3, 2, 1), (4, 1, 2, 4), (1, 0, 1, 2)]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("ranks", "zero", "replicas", "microbatches"), LAID_OUT)
def test_a_tied_gpt_with_ignored_tokens(
    launcher: Launcher, tmp_path: Path, ranks: int, zero: int, replicas: int, microbatches: int
) -> None:
    """33 rows over 4 ranks are cut unevenly, and the last batch of an epoch is short. Evaluation of 3 samples leaves a
    rank of 4 without any.
    """
    data = tokens(tmp_path, train=42, batch=18, last=True, ignored=0.4, validation=3)
    adam = zero % 2
    changed: dict[str, Any] = {
        "model": gpt_model(vocab=33),
        "loss": KEPT,
        "clip": 0.3,
        "steps": 9,
        "evaluate_every": 4,
        "optimizer": ADAMW if adam else SGD,
    }
    one = train(launcher, tmp_path / "one", 1, data, **changed)
    engine = sharded(("2",), zero, replicas)
    many = train(launcher, tmp_path / "many", ranks, data, **changed, microbatches=microbatches, gradients=engine)
    agree(one, many, weights=0.05 * 0.01 * 9 if adam else 1e-5)
    free = train(launcher, tmp_path / "free", 1, data, **changed | {"clip": None})
    assert not np.allclose(one.losses(), free.losses(), atol=1e-4), "clipping makes a difference here"


@pytest.mark.parametrize(("ranks", "zero", "replicas"), [(4, 3, 1), (2, 2, 1)])
def test_a_conv_net_with_batch_norm(launcher: Launcher, tmp_path: Path, ranks: int, zero: int, replicas: int) -> None:
    """Three channels over 4 ranks: the last holds no row of some parameters. Ranks have 3, 2, 2 and 2 batches of the
    validation split.
    """
    data = images(tmp_path, batch=6, validation=17)
    changed: dict[str, Any] = {"model": conv_model(3), "steps": 8}
    one = train(launcher, tmp_path / "one", 1, data, **changed)
    many = train(launcher, tmp_path / "many", ranks, data, **changed, gradients=sharded(("4", "9"), zero, replicas))
    agree(one, many)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 4e-3)])
def test_a_copy_in_sixteen_bits(launcher: Launcher, tmp_path: Path, dtype: Any, tolerance: float) -> None:
    data = images(tmp_path)
    exact = train(launcher, tmp_path / "exact", 1, data, clip=1.0)
    low: dict[str, Any] = {"clip": 1.0, "precision": p.PrecisionStep(dtype=dtype, level="O2", scaled=dtype[0] == "f")}
    one = train(launcher, tmp_path / "one", 1, data, **low, gradients=sharded(("4",), 0))
    two = train(launcher, tmp_path / "two", 2, data, **low, gradients=sharded(("4",), 0, replicas=2))
    cut = train(launcher, tmp_path / "cut", 2, data, **low, gradients=sharded(("4",), 3))
    agree(exact, one, losses=tolerance, weights=tolerance)
    agree(one, two, losses=tolerance, weights=tolerance)
    agree(two, cut, losses=1e-6, weights=1e-6)
    assert one.losses() != exact.losses()


# ------------------------------------------------------------------------------------------- within a rank's process


def made(rank: int, folder: str, ranks: int, **changed: Any) -> tuple[TrainingComponents, Any]:
    """The parts of a training of random tokens, and its first step's batch."""
    job = program(ranks, tokens(Path(folder)), **{"model": gpt_model(vocab=33), **changed})
    parts = assemble(job, CPU)
    random = torch.Generator().manual_seed(rank)
    batch = torch.randint(0, 33, (4, 8), generator=random)
    return parts, (stepper(job, places(ranks)[rank], parts), StepBatch([(batch, batch)], 4 * ranks, 0))


def kept_rows(rank: int, folder: str) -> list[Any]:
    model = gpt_model(vocab=33)
    parts, _ = made(rank, folder, 4, model=model, gradients=sharded(("2",), 3))
    whole = build_model(model, "cpu")
    found = []
    found_parameters: Any = parts.plain.named_parameters()
    for name, parameter in found_parameters:
        local, expected = parameter.to_local(), whole.get_parameter(name)
        size = -(-len(expected) // 4)
        assert torch.equal(local, expected[rank * size : (rank + 1) * size])
        assert local.untyped_storage().nbytes() == local.nbytes, "the rest is not kept beside it"
        found.append([name, len(local)])
    assert parts.plain.get_parameter("3.weight") is parts.plain.get_parameter("0.weight")
    return found


def test_a_rank_keeps_its_rows_alone(tmp_path: Path) -> None:
    ranks = gang(4, kept_rows, str(tmp_path))
    assert [dict(found)["0.weight"] for found in ranks] == [9, 9, 9, 6]


def one_infinity(rank: int, folder: str, clip: float | None, kind: str) -> list[Any]:
    """Runs a step with an infinite number in the gradient of rank 1 only, and one without."""
    low = p.PrecisionStep(dtype="float16", scaled=True)
    optimizer = optimizer_step(kind, lr=0.01)
    changed: dict[str, Any] = {"precision": low, "clip": clip, "optimizer": optimizer}
    parts, (step, batch) = made(rank, folder, 2, gradients=sharded(("2",), 3), **changed)
    weight: Any = parts.plain.get_parameter("2.mlp.bias")
    found: list[Any] = [weight.full_tensor().tolist()]

    def spoil(parameter: Any) -> None:
        if rank == 1:
            parameter.grad.to_local()[3] = float("inf")

    hook = weight.register_post_accumulate_grad_hook(spoil)
    for _ in range(2):
        step(batch)
        hook.remove()
        found += [weight.full_tensor().tolist(), parts.scaler.get_scale()]
    return found


@pytest.mark.parametrize(("clip", "kind"), [(None, "AdamW"), (1.0, "SGD")])
def test_an_infinity_in_one_ranks_rows_is_seen_by_all(tmp_path: Path, clip: float | None, kind: str) -> None:
    ranks = gang(2, one_infinity, str(tmp_path), clip, kind)
    assert ranks[0] == ranks[1]
    before, skipped, halved, after, scale = ranks[0]
    assert skipped == before and after != before
    assert (halved, scale) == (32768, 32768)


def norms(rank: int, folder: str, kind: Any, clip: float | None) -> list[Any]:
    engine = sharded(("2",), 2) if kind == "fsdp" else p.GradientStep(kind=kind)
    parts, (step, batch) = made(rank, folder, 2, gradients=engine, clip=clip, mode=p.ObserveMode())
    norm = step(batch).norm
    changed: Any = parts.plain.get_parameter("2.mlp.weight")
    whole = changed.full_tensor() if kind == "fsdp" else changed
    return [norm.item(), whole.detach().numpy().copy()]


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_norm_is_that_of_the_whole_gradient(tmp_path: Path, clip: float | None) -> None:
    model = build_model(gpt_model(vocab=33), "cpu")
    inputs = torch.cat([torch.randint(0, 33, (4, 8), generator=torch.Generator().manual_seed(r)) for r in range(2)])
    torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten(), reduction="sum").div(8).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9).item()
    assert expected > 0.1
    changed = model.get_parameter("2.mlp.weight")
    assert changed.grad is not None
    updated = changed - 0.05 * changed.grad
    for kind in ("ddp", "zero1", "fsdp"):
        for norm, weight in gang(2, norms, str(tmp_path), kind, clip):
            assert norm == pytest.approx(expected, rel=1e-5)
            np.testing.assert_allclose(weight, updated.detach(), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------- users' own models

MINE = """
import os, torch
from torch import nn

class Net(nn.Module):
    '''A table that no state dict has, a buffer that one has, tied weights, a parameter in reversed order.'''

    def __init__(self, plain=True, misses=False):
        super().__init__()
        if plain:
            torch.manual_seed(int(os.environ.get("RANK", 0)))
        self.body = nn.Sequential(nn.Linear(64, 48), Scaled(48), nn.Linear(48, 48), nn.ReLU())
        self.head, self.again = nn.Linear(48, 10, bias=False), nn.Linear(48, 10, bias=False)
        self.again.weight = self.head.weight
        if misses:
            self.lost = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        y = self.body(x.flatten(1))
        return self.head(y) + self.again(y)

class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.seen = nn.Buffer(torch.empty(1))
        self.table = nn.Buffer(torch.empty(width), persistent=False)
        self.gain = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.uniform_(self.gain, 0.5, 1.5)
        with torch.no_grad():
            self.seen.fill_(2.0)
            self.table.copy_(torch.linspace(1, 2, len(self.table)))

    def forward(self, x):
        return x * self.gain * self.table + self.seen

class Reads(Net):
    '''Cannot be built on the meta device.'''

    def __init__(self):
        super().__init__(plain=False)
        float(self.head.weight.sum())

class Beside(Net):
    '''Keeps a tensor that is neither a parameter nor a buffer.'''

    def __init__(self):
        super().__init__(plain=False)
        self.shift = torch.linspace(0, 1, 10)

    def forward(self, x):
        return super().forward(x) + self.shift

class Differs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(64, 10 + int(os.environ["RANK"]))

class Number(Net):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

def loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none")
"""


def mine(folder: Path, function: str, **arguments: Any) -> p.ModelStep:
    (folder / "mine.py").write_text(MINE)
    return p.ModelStep(python=python(f"mine:{function}", folder, **arguments), seed=3)


@pytest.mark.parametrize("function", ["Net", "Reads", "Beside"])
def test_a_users_own_model_is_handed_out(launcher: Launcher, tmp_path: Path, function: str) -> None:
    """Each rank would make other numbers (or could not make it without): all begin with those of rank 0."""
    data = images(tmp_path)
    changed: dict[str, Any] = {"model": mine(tmp_path, function), "sync_batch_norm": False}
    one = train(launcher, tmp_path / "one", 1, data, **changed)
    two = train(launcher, tmp_path / "two", 2, data, **changed, gradients=sharded(("body.0", "body.2"), 3))
    agree(one, two)
    assert "again.weight" not in two.weights and "body.1.table" not in two.weights and two.weights["body.1.seen"] == 2


def test_a_users_own_model_is_reset_module_by_module(launcher: Launcher, tmp_path: Path) -> None:
    """The same on one process and on any number, though no process has built it whole."""
    data = images(tmp_path)
    model = dataclasses.replace(mine(tmp_path, "Net"), reset=True)
    changed: dict[str, Any] = {"model": model, "sync_batch_norm": False}
    one = train(launcher, tmp_path / "one", 1, data, **changed)
    two = train(launcher, tmp_path / "two", 2, data, **changed)
    four = train(launcher, tmp_path / "four", 4, data, **changed, gradients=sharded(("body.0", "body.2"), 3))
    agree(one, two)
    agree(one, four)
    assert not np.array_equal(one.weights["body.0.weight"][:48, :48], one.weights["body.2.weight"])


@pytest.mark.parametrize(
    ("function", "reset", "said"),
    [
        ("Net", True, r"made.plt:3:13: the module `Net` \(Net\) has no `reset_parameters`"),
        ("Differs", False, r"made.plt:3:13: `one.weight` is float32 of shape \(11, 64\) on rank 1 and .*\(10, 64\) on"),
        ("Number", False, r"made.plt:3:13: `gain` is a single number"),
    ],
)
def test_what_cannot_be_sharded_is_named(
    launcher: Launcher, tmp_path: Path, function: str, reset: bool, said: str
) -> None:
    model = dataclasses.replace(mine(tmp_path, function, **({"misses": True} if reset else {})), reset=reset)
    job = program(2, images(tmp_path), model=model, sync_batch_norm=False, gradients=sharded((), 3))
    outcome, _ = launcher.launch(job, places(2), tmp_path / "run")
    assert outcome.failure is not None
    assert re.search(said, outcome.failure.message), outcome.failure.message


def test_frozen_parameters_stay(launcher: Launcher, tmp_path: Path) -> None:
    model = dataclasses.replace(gpt_model(vocab=33), frozen=("2.attention.*", "1.*"))
    data = tokens(tmp_path)
    one = train(launcher, tmp_path / "one", 1, data, model=model)
    begun = build_model(model, "cpu").state_dict()
    for kind in ("fsdp", "zero1", "ddp"):
        engine = sharded(("2",), 3) if kind == "fsdp" else p.GradientStep(kind=kind)
        two = train(launcher, tmp_path / kind, 2, data, model=model, gradients=engine)
        agree(one, two)
        for name in ("2.attention.qkv.weight", "1.weight"):
            np.testing.assert_array_equal(two.weights[name], begun[name])
