"""Goals: which evaluation is the best, and when a training ends because none gets better."""

from __future__ import annotations

import math
from functools import reduce
from pathlib import Path

import pytest
import torch
from helpers.made_programs import images, program
from hypothesis import given
from hypothesis import strategies as st

from dslc.compiler.ir.program import CheckpointStep, GoalStep
from dslc.runtime.checkpoint.files import BEST, STOPPING, Progress
from dslc.runtime.loop.best_metric import GoalError, Goals, initial_progress, update_progress

NAN = math.nan
CPU = torch.device("cpu")


def goal(highest: bool = False, patience: int = 2, by: float = 0.0) -> GoalStep:
    return GoalStep(metric="loss", highest=highest, patience=patience, by=by, line="made.plt:3:4")


def heard(step: GoalStep, values: list[float], first: int = 1, begun: Progress | None = None) -> Progress:
    """Returns the progress after evaluations after the steps `first`, `first` + 1, …"""
    return reduce(
        lambda progress, each: update_progress(step, progress, *each),
        enumerate(values, first),
        begun or initial_progress("loss", step.highest, None),
    )


@pytest.mark.parametrize(
    ("step", "values", "best", "of", "since"),
    [
        (goal(), [3.0, 2.0, 1.0], 1.0, 3, 0),
        (goal(highest=True), [3.0, 2.0, 1.0], 3.0, 1, 2),
        (goal(), [2.0, 2.0, 2.0], 2.0, 1, 2),  # of equal ones the first
        (goal(by=0.5), [2.0, 1.5, 1.4], 1.4, 3, 0),  # each is compared with the best, not with the one before
        (goal(by=0.5), [2.0, 1.8, 1.6], 2.0, 1, 2),
        (goal(highest=True, by=0.5), [1.0, 1.5, 1.75], 1.75, 3, 0),
        (goal(), [NAN, 2.0, NAN], 2.0, 2, 1),
        (goal(), [NAN, math.inf], None, 0, 2),
        (goal(highest=True), [1.0, math.inf, 2.0], 2.0, 3, 0),
        (goal(), [1.0, -math.inf], 1.0, 1, 1),
    ],
)
def test_the_best_value_its_step_and_the_evaluations_since(
    step: GoalStep, values: list[float], best: float | None, of: int, since: int
) -> None:
    found = heard(step, values)
    assert (found.best, found.step, found.since) == (best, of, since)


@given(
    st.booleans(),
    st.floats(0, 2),
    st.lists(st.floats(-4, 4) | st.just(NAN), max_size=12),
    st.integers(0, 12),
)
def test_progress_is_that_of_an_unbroken_training(highest: bool, by: float, values: list[float], cut: int) -> None:
    step = goal(highest, by=by)
    whole = heard(step, values)
    begun = heard(step, values[:cut])
    assert heard(step, values[cut:], len(values[:cut]) + 1, initial_progress("loss", step.highest, begun)) == whole
    if by == 0:
        finite = [value for value in values if math.isfinite(value)]
        best = (max if highest else min)(finite, default=None)
        assert whole.best == best
        assert best is None or whole.step == values.index(best) + 1


def test_another_goal_begins_anew() -> None:
    begun = heard(goal(), [1.0, 2.0])
    assert initial_progress("loss", False, begun) == begun
    assert initial_progress("loss", True, begun) == Progress(metric="loss", highest=True)


def goals(tmp_path: Path, **kept: Progress) -> Goals:
    data = images(tmp_path)
    best = GoalStep(metric="accuracy", highest=True)
    made = program(1, data, early_stopping=goal(by=0.1), checkpoint=CheckpointStep(best=best))
    return Goals(made, CPU, kept)


def test_why_a_training_ends(tmp_path: Path) -> None:
    made = goals(tmp_path)
    for step, (loss, accuracy) in enumerate([(1.0, 0.5), (0.95, 0.6), (0.9, 0.6)], 1):
        assert not made.reason
        made.hear(step, {"loss": loss, "accuracy": accuracy, "rows": [[1.0]]})
        assert made.is_best(step) == (step < 3)
    assert made.reason == "loss has not fallen below 1, of step 1, by more than 0.1 in 2 evaluations"
    again = goals(tmp_path, **made.progress)
    assert again.reason == made.reason and again.progress == made.progress
    assert set(made.progress) == {BEST, STOPPING}
    lost = goals(tmp_path)
    for step in (1, 2):
        lost.hear(step, {"loss": NAN, "accuracy": 0.0})
    assert lost.reason == "loss has not been finite in 2 evaluations"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"loss": 1.0, "rows": [1.0], "f1": 0.5}, "the evaluation has no number `accuracy`; it has loss, f1"),
        ({"loss": 1.0, "accuracy": [1.0, 0.0]}, "`accuracy` of the evaluation is a list of numbers"),
    ],
)
def test_a_number_that_is_not_there(tmp_path: Path, found: dict[str, object], said: str) -> None:
    with pytest.raises(GoalError, match=said):
        goals(tmp_path).hear(1, found)
