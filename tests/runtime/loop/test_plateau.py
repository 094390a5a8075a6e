"""A learning rate that follows the evaluations: torch's own, also over a resume."""

from __future__ import annotations

import json
import math

import pytest
import torch
from helpers.made_programs import images, optimizer_step, program
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from dslc.compiler.ir.codec import from_json, to_json
from dslc.compiler.ir.program import LearningRateStep, PlateauStep
from dslc.runtime.checkpoint.files import Progress
from dslc.runtime.loop.best_metric import Plateau, initial_progress, plateau_of

RATE = 0.3


def made(highest: bool, mode: str, patience: int = 1, cooldown: int = 1) -> PlateauStep:
    return PlateauStep(
        metric="loss",
        better="highest" if highest else "lowest",
        patience=patience,
        threshold=0.1,
        threshold_mode=mode,  # type: ignore[arg-type]
        cooldown=cooldown,
    )


@given(
    st.booleans(),
    st.sampled_from(["rel", "abs"]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.2]),
    st.lists(st.floats(-2, 2) | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=16),
    st.integers(0, 16),
)
def test_rates_are_torchs_step_by_step(
    highest: bool, mode: str, patience: int, cooldown: int, floor: float, values: list[float], cut: int
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=RATE)
    torchs = lr_scheduler.ReduceLROnPlateau(
        optimizer,
        mode="max" if highest else "min",
        factor=0.5,
        patience=patience,
        threshold=0.1,
        threshold_mode=mode,  # type: ignore[arg-type]
        cooldown=cooldown,
        min_lr=floor * RATE,
    )
    schedule = LearningRateStep(kind="plateau", steps=99, factor=0.5, floor=floor)
    step = made(highest, mode, patience, cooldown)
    ours = Plateau(schedule, step, RATE, initial_progress("loss", highest, None))
    for n, value in enumerate(values, 1):
        if n == cut:  # as a checkpoint keeps it
            kept = from_json(Progress, json.loads(json.dumps(to_json(ours.progress))))
            ours = Plateau(schedule, step, RATE, initial_progress("loss", highest, kept))
        torchs.step(value)
        ours.hear(n, value)
        assert RATE * ours.progress.factor == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


def test_another_metric_begins_anew(tmp_path_factory: pytest.TempPathFactory) -> None:
    data = images(tmp_path_factory.mktemp("data"))
    rate = LearningRateStep(kind="plateau", steps=9, factor=0.5, plateau=made(highest=True, mode="abs"))
    job = program(1, data, learning_rate=rate, optimizer=optimizer_step("SGD", lr=0.1))
    fallen = Progress(metric="loss", highest=True, factor=0.25)
    for kept, factor in ((fallen, 0.25), (Progress(metric="loss", highest=False, factor=0.25), 1.0), (None, 1.0)):
        found = plateau_of(job, kept)
        assert found is not None and found.progress.factor == factor
    assert plateau_of(program(1, data), fallen) is None
