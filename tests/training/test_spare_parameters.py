"""Parameters that no step uses: they train as in one process, in which they stay as they are, on every plan.

They have no gradient, so that nothing decays them, no norm counts them, and no optimizer keeps state for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, beside_own_networks, exchanges_as_planned, ready, staged, train, train_job

from dslc.compiler.ir.program import CheckpointStep

JOB = job_text(
    model={"network": 'python("own_networks:Spares")'},
    data={"source": "digits()", "batch": 16},
    devices={"cpus": 1},
    train={"steps": 8, "optimizer": "sgd(lr = 0.1, momentum = 0.9, weight_decay = 0.1)", "clip": "0.5"},
    log=None,
)
PLANS = {
    "data x pipeline": staged("1f1b", 2, 2, 2),
    "data x pipeline, zero 3": staged("interleaved_1f1b", 2, 2, 2, "parallelism.zero=3"),
    "data x pipeline, split backward": staged("zbv", 2, 2, 4, "parallelism.zero=1"),
    "pipeline": staged("zero_bubble", 2, 1, 4),
    "data": ("devices.cpus=2",),
    "zero 1": ("devices.cpus=2", "parallelism.zero=1"),
    "zero 2": ("devices.cpus=2", "parallelism.zero=2", "parallelism.microbatches=2"),
    "zero 3": ("devices.cpus=2", "parallelism.zero=3", "memory.recompute=full"),
    "replicas": ("devices.cpus=4", "parallelism.zero=3", "parallelism.replicas=2", "parallelism.microbatches=2"),
}
FEW = ("data x pipeline", "zero 2")
CHOSEN = [plan if plan in FEW else pytest.param(plan, marks=pytest.mark.long) for plan in PLANS]
Run = Callable[..., Trained]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beside_own_networks(tmp_path_factory.mktemp("spares"), JOB)


@pytest.fixture(scope="module")
def trained(job: Path, launcher: Launcher) -> Run:
    return cache(lambda *settings: train_job(launcher, job, *settings))


@pytest.mark.parametrize("plan", CHOSEN)
def test_they_stay_as_they_are(plan: str, trained: Run) -> None:
    one, found = trained(), trained(*PLANS[plan])
    agree(one, found)
    np.testing.assert_array_equal(found.weights["spare"], np.full((7, 3), 0.5, np.float32))
    np.testing.assert_array_equal(found.weights["blocks.3.spare"], np.ones((3, 5), np.float32))


@pytest.mark.core
@pytest.mark.parametrize("plan", CHOSEN)
def test_a_step_exchanges_what_was_planned(plan: str, tmp_path: Path, job: Path, launcher: Launcher) -> None:
    exchanges_as_planned(launcher, tmp_path, job, *PLANS[plan])


def test_a_checkpoint_goes_from_any_plan_to_any_other(
    tmp_path: Path, job: Path, launcher: Launcher, trained: Run
) -> None:
    adam = "train.optimizer=adamw(lr = 1e-2)"
    for part, plan in enumerate(("data x pipeline", "zero 1", "data x pipeline, zero 3", "replicas")):
        made = ready(job, *PLANS[plan], adam)
        folder = str(tmp_path / "checkpoints")
        checkpoint = CheckpointStep(every=2, folder=folder, resume="auto" if part else "none")
        steps = 2 * part + 2
        done = train(launcher, tmp_path / str(part), made.program, made.places, checkpoint=checkpoint, steps=steps)
    (last,) = [line for line in done.lines if line["step"] == 8 and line["split"] == "train"]
    expected = trained(adam)
    assert last["loss"] == pytest.approx(expected.losses()[-1], abs=1e-5)
    for name, value in expected.weights.items():
        np.testing.assert_allclose(done.weights[name], value, rtol=0, atol=0.05 * 1e-2 * 8, err_msg=name)
