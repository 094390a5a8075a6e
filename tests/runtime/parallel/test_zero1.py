"""Sharding the optimizer's state changes only where it is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gang import gang
from helpers.launcher import Launcher
from helpers.made_programs import conv_model, gpt_model, images, places, program, tokens
from helpers.trained import agree
from test_fsdp import ADAMW, CPU, KEPT, train

from dslc.compiler.ir import program as p
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.loop.learning_rate import set_learning_rate
from dslc.runtime.step.assemble import assemble
from dslc.runtime.step.stepper import stepper

ZERO1 = p.GradientStep(kind="zero1")


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 1)])
def test_a_tied_gpt_with_groups_a_schedule_and_clipping(
    launcher: Launcher, tmp_path: Path, ranks: int, microbatches: int
) -> None:
    data = tokens(tmp_path, train=42, batch=18, last=True, ignored=0.4)
    changed: dict[str, Any] = {
        "model": gpt_model(vocab=33),
        "loss": KEPT,
        "clip": 0.3,
        "steps": 9,
        "optimizer": ADAMW,
        "learning_rate": p.LearningRateStep(kind="cosine", steps=9, warmup=2),
    }
    one = train(launcher, tmp_path / "one", 1, data, **changed)
    many = train(launcher, tmp_path / "many", ranks, data, **changed, microbatches=microbatches, gradients=ZERO1)
    agree(one, many, weights=0.05 * 0.01 * 9)


def test_a_conv_net_with_momentum(launcher: Launcher, tmp_path: Path) -> None:
    data = images(tmp_path, batch=15, last=True)
    one = train(launcher, tmp_path / "one", 1, data, model=conv_model(3))
    four = train(launcher, tmp_path / "four", 4, data, model=conv_model(3), gradients=ZERO1)
    agree(one, four)


def test_parameters_that_do_not_lie_in_order(launcher: Launcher, tmp_path: Path) -> None:
    """torch puts them in order, and updates them as their gradients lie: those have to be in order too."""
    data, model = images(tmp_path), replace(conv_model(3), channels_last=True)
    one = train(launcher, tmp_path / "one", 1, data, model=model)
    two = train(launcher, tmp_path / "two", 2, data, model=model, gradients=ZERO1)
    agree(one, two)


def test_losses_scaled_for_float16_skip_the_same_steps(launcher: Launcher, tmp_path: Path) -> None:
    """Under both engines numbers in float16 are as large as in one process."""
    low: dict[str, Any] = {"clip": 1.0, "precision": p.PrecisionStep(dtype="float16", scaled=True)}
    data = images(tmp_path)
    one = train(launcher, tmp_path / "one", 1, data, **low)
    for kind in ("ddp", "zero1"):
        two = train(launcher, tmp_path / kind, 2, data, **low, gradients=p.GradientStep(kind=kind))
        agree(one, two, losses=5e-3, weights=5e-3)


def held(rank: int, folder: str) -> list[Any]:
    """The numbers of state that a rank holds after a step, the groups' rates, and all parameters."""
    job = program(2, tokens(Path(folder)), model=gpt_model(vocab=33), optimizer=ADAMW, gradients=ZERO1)
    parts = assemble(job, CPU)
    inner: Any = parts.optimizer.optim  # type: ignore[attr-defined]
    batch = torch.randint(0, 33, (4, 8), generator=torch.Generator().manual_seed(rank))
    work = stepper(job, places(2)[rank], parts)
    rate = set_learning_rate(parts.optimizer, 0.5)
    work(StepBatch([(batch, batch)], 8, 0))
    state = sum(tensor.numel() for slot in inner.state.values() for tensor in slot.values())
    used = [(group["lr"], group["weight_decay"], bool(group.get("fused"))) for group in inner.param_groups]
    weights = torch.cat([parameter.detach().flatten() for parameter in parts.plain.parameters()])
    return [state, rate, used, weights.numpy().copy()]


def test_each_rank_holds_its_share_of_the_state(tmp_path: Path) -> None:
    first, second = gang(2, held, str(tmp_path))
    parameters = len(first[3])
    assert first[0] + second[0] == pytest.approx(2 * parameters, abs=100), "and the number of steps of each"
    assert max(first[0], second[0]) < 1.3 * parameters
    np.testing.assert_array_equal(first[3], second[3])
    for state in (first, second):
        assert state[1] == 0.005
        assert state[2] == [(0.005, 0.1, True), (0.005, 0.0, True)]
