"""Over shared memory a job trains as over gloo and exchanges what was planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import agree, exchanges_as_planned, train_job

PLANS = {
    "data": ("devices.cpus=2",),
    "zero 3": ("devices.cpus=2", "parallelism.zero=3"),
    "pipeline": ("devices.cpus=2", "parallelism.pipeline=2", "parallelism.microbatches=4"),
    "tensor": ("devices.cpus=2", "parallelism.tensor=2"),
    "context": ("devices.cpus=2", "parallelism.context=2"),
    "two axes": ("devices.cpus=4", "parallelism.tensor=2", "parallelism.zero=2"),
    "experts": ("devices.cpus=2", "parallelism.expert=2"),
}
SHARED = "devices.backend=shared_memory"


def _slow(*plans: str) -> list[Any]:
    return [pytest.param(plan, marks=pytest.mark.slow) for plan in plans]


def _job(folder: Path, plan: str) -> Path:
    experts = ", experts = moe(4, 2, 8)" * (plan == "experts")
    path = folder / "job.plt"
    path.write_text(
        job_text(
            model={
                "network": f"llama(layers = 2, width = 16, heads = 2, hidden = 32, context = 16, vocab = 256{experts})",
                "loss": "cross_entropy()",
            },
            data={"source": "stdlib()", "batch": 16},
            devices={"cpus": 2},
            train={"steps": 6},
            log={"every": "1 step"},
        )
    )
    return path


@pytest.mark.cases(4)
@pytest.mark.parametrize("plan", ["zero 3", "pipeline", *_slow("data", "tensor", "context", "two axes", "experts")])
def test_a_job_trains_as_over_gloo(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    job = _job(tmp_path, plan)
    agree(train_job(launcher, job, *PLANS[plan]), train_job(launcher, job, *PLANS[plan], SHARED), 1e-6, 1e-6)


@pytest.mark.parametrize("plan", ["zero 3", *_slow("pipeline", "tensor")])
def test_a_step_exchanges_what_was_planned(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    exchanges_as_planned(launcher, tmp_path / "run", _job(tmp_path, plan), *PLANS[plan], SHARED)
