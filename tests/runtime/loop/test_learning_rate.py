"""The learning rate: each form against its formula, and against torch where torch has it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslc.compiler.ir.program import LearningRateStep
from dslc.runtime.loop.learning_rate import factor, set_learning_rate


def test_warm_up_reaches_the_full_rate_in_its_last_step() -> None:
    step = LearningRateStep(kind="linear", steps=10, warmup=4, floor=0.1)
    found = [factor(step, s) for s in range(11)]
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert found[5:] == pytest.approx([0.85, 0.7, 0.55, 0.4, 0.25, 0.1])


def test_a_half_cosine() -> None:
    step = LearningRateStep(kind="cosine", steps=8, warmup=0, floor=0.2)
    assert [factor(step, s) for s in (0, 4, 8, 100)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert factor(step, 2) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)


def test_steps_and_powers() -> None:
    step = LearningRateStep(kind="step", steps=100, every=3, factor=0.5)
    assert [factor(step, s) for s in range(7)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]
    power = LearningRateStep(kind="exponential", steps=100, warmup=2, every=4, factor=0.5)
    assert [factor(power, s) for s in (0, 1, 2, 4, 6)] == pytest.approx([0.5, 1.0, 1.0, 0.5**0.5, 0.5])
    assert {factor(LearningRateStep(steps=9), s) for s in range(12)} == {1.0}


@given(
    st.sampled_from(["constant", "cosine", "linear", "step", "exponential"]),
    st.integers(1, 60),
    st.integers(0, 60),
    st.floats(0, 1),
    st.integers(0, 200),
)
def test_a_factor_is_a_share_and_never_rises_after_warm_up(
    kind: str, steps: int, warmup: int, floor: float, s: int
) -> None:
    step = LearningRateStep(kind=kind, steps=steps, warmup=min(warmup, steps), floor=floor, every=5, factor=0.7)  # type: ignore[arg-type]
    now, then = factor(step, s), factor(step, s + 1)
    assert 0 <= now <= 1
    if s >= step.warmup:
        assert then <= now + 1e-12
    elif s + 1 < step.warmup:
        assert then > now


def test_rates_are_those_of_torchs_own_schedules() -> None:
    step = LearningRateStep(kind="cosine", steps=12)
    parameter = torch.nn.Parameter(torch.zeros(1))
    ours, torchs = torch.optim.SGD([parameter], lr=0.3), torch.optim.SGD([parameter], lr=0.3)
    ours.param_groups[0]["initial_lr"] = 0.3
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(torchs, T_max=12)
    for s in range(12):
        assert set_learning_rate(ours, step, s) == pytest.approx(torchs.param_groups[0]["lr"])
        assert ours.param_groups[0]["lr"] == set_learning_rate(ours, step, s), "and set in place, not added up"
        torchs.step()
        schedule.step()
