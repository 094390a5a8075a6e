"""The learning rate: each form against its formula, and against torch where torch has it."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from dslc.compiler.ir.program import LearningRateStep, PythonFunction
from dslc.runtime.loop.learning_rate import factor, schedule, set_learning_rate
from dslc.runtime.process.job_line import line_of
from dslc.runtime.process.vision_library import let_torchvision_load


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


STEPS = 12


@pytest.mark.parametrize(
    ("values", "made"),
    [
        ({"kind": "cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS)),
        ({"kind": "multistep", "milestones": (3, 7, 7)}, lambda o: lr_scheduler.MultiStepLR(o, [3, 7, 7], 0.5)),
        (
            {"kind": "restarts", "every": 2, "growth": 2, "floor": 0.1},
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2, 0.03),
        ),
        (
            {"kind": "one_cycle", "rise": 3, "start": 0.04, "floor": 4e-6},
            lambda o: lr_scheduler.OneCycleLR(o, 0.3, STEPS, pct_start=3 / STEPS, cycle_momentum=False),
        ),
    ],
)
def test_rates_are_those_of_torchs_own_schedules(values: dict[str, Any], made: Any) -> None:
    of_step = schedule(LearningRateStep(steps=STEPS, factor=0.5, **values))
    parameter = torch.nn.Parameter(torch.zeros(1))
    ours, torchs = torch.optim.SGD([parameter], lr=0.3), torch.optim.SGD([parameter], lr=0.3)
    ours.param_groups[0]["initial_lr"] = 0.3
    torchs_own = made(torchs)
    for s in range(STEPS):
        assert set_learning_rate(ours, of_step(s)) == pytest.approx(torchs.param_groups[0]["lr"])
        assert ours.param_groups[0]["lr"] == set_learning_rate(ours, of_step(s)), "and set in place, not added up"
        torchs.step()
        torchs_own.step()


def test_a_rate_that_stays_and_falls_at_the_end() -> None:
    shapes: dict[Any, list[float]] = {"linear": [0.75, 0.5], "cosine": [0.8535534, 0.5], "sqrt": [0.5, 0.2928932]}
    for shape, expected in shapes.items():
        step = LearningRateStep(kind="stable", steps=10, warmup=2, decay=4, shape=shape)
        assert [factor(step, s) for s in (0, 1, 2, 5, 6)] == [0.5, 1, 1, 1, 1]
        assert [factor(step, s) for s in (7, 8)] == pytest.approx(expected)
        assert [factor(step, s) for s in (10, 99)] == pytest.approx([0, 0])
    assert factor(LearningRateStep(kind="stable", steps=10, decay=4, floor=0.2), 8) == pytest.approx(0.6)


def test_one_cycle_of_one_step_begins_at_the_full_rate() -> None:
    step = LearningRateStep(kind="one_cycle", steps=1, rise=1, start=0.0)
    assert factor(step, 0) == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return -1.0", "the schedule gives -1.0 for step 3"),
        ("return float('nan')", "the schedule gives nan for step 3"),
        ("return 'much'", "the schedule gives 'much' for step 3"),
        ("return None", "the schedule gives None for step 3, and should give a number of at least 0"),
    ],
)
def test_what_is_no_factor_is_refused_with_the_line_of_the_job(tmp_path: Path, body: str, said: str) -> None:
    (tmp_path / "of_rates.py").write_text(f"def f(step, steps):\n    {body}\n")
    named = PythonFunction(function="of_rates:f", folder=str(tmp_path), line="job.plt:4:1")
    of_step = schedule(LearningRateStep(kind="python", steps=9, python=named))
    try:
        with pytest.raises(ValueError, match=said) as caught:
            of_step(3)
    finally:
        sys.modules.pop("of_rates")
    assert line_of(caught.value) == "job.plt:4:1"


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_a_warm_up_from_zero_is_that_of_transformers(name: str) -> None:
    let_torchvision_load()
    from transformers import optimization

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    length = {} if name == "constant" else {"num_training_steps": STEPS}
    made = getattr(optimization, f"get_{name}_schedule_with_warmup")(optimizer, num_warmup_steps=4, **length)
    step = LearningRateStep(kind=name, steps=STEPS, warmup=4, begin=0.0)  # type: ignore[arg-type]
    for s in range(STEPS):
        assert factor(step, s) == pytest.approx(made.get_last_lr()[0], abs=1e-9), s
        optimizer.step()
        made.step()


@pytest.mark.parametrize("warmup", [1, 4])
def test_restarts_and_decays_from_zero_begin_after_the_warm_up(warmup: int) -> None:
    let_torchvision_load()
    from transformers import optimization

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.zeros(1)], lr=1.0)

    rise = lr_scheduler.LambdaLR(made := optimizer(), lambda s: s / warmup)
    restarts = lr_scheduler.SequentialLR(made, [rise, lr_scheduler.CosineAnnealingWarmRestarts(made, 3)], [warmup])
    stable = optimization.get_wsd_schedule(
        optimizer(), num_warmup_steps=warmup, num_decay_steps=3, num_training_steps=STEPS, decay_type="linear"
    )
    of_restarts = LearningRateStep(kind="restarts", steps=STEPS, warmup=warmup, begin=0.0, every=3)
    of_stable = LearningRateStep(kind="stable", steps=STEPS, warmup=warmup, begin=0.0, decay=3)
    pairs: list[tuple[LearningRateStep, Any]] = [(of_restarts, restarts), (of_stable, stable)]
    for step, theirs in pairs:
        for s in range(STEPS):
            assert factor(step, s) == pytest.approx(theirs.get_last_lr()[0], abs=1e-9), (step.kind, s)
            theirs.optimizer.step()
            theirs.step()


def test_a_warm_up_from_a_factor_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    made = lr_scheduler.LinearLR(optimizer, start_factor=0.3, total_iters=5)
    step = LearningRateStep(steps=STEPS, warmup=5, begin=0.3)
    for s in range(STEPS):
        assert factor(step, s) == pytest.approx(made.get_last_lr()[0]), s
        optimizer.step()
        made.step()
