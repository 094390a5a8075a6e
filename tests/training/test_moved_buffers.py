"""A buffer that follows from the samples of a rank is that of the first rank on all of them, under any `zero`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import agree, exchanges_as_planned, ready, train_job, write_job_with_helper

JOB = job_text(
    model={"network": 'python("own_forward_passes:Moving", how = "most")'},
    data={"source": "synthetic(samples = 48, shape = [6], classes = 3)", "batch": 12, "validation": "25%"},
    devices={"cpus": 2},
    train={"steps": 5, "optimizer": "sgd(lr = 0.3)"},
    evaluate={"every": "2 steps"},
)
NORM = "model.network.norm=true"  # batch norm, whose statistics are synchronised, beside it
MEAN = "model.network.how=mean"
CALLS = "model.network.how=calls"
REPLICAS = ("devices.cpus=4", "parallelism.zero=3", "parallelism.replicas=2", NORM)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job_with_helper("own_forward_passes.py", tmp_path_factory.mktemp("moved"), JOB)


@pytest.mark.parametrize(
    "settings", [(NORM,), *(pytest.param(each, marks=pytest.mark.long) for each in ((), (MEAN,), (NORM, MEAN)))]
)
def test_it_is_the_same_under_each_zero(job: Path, launcher: Launcher, settings: tuple[str, ...]) -> None:
    plain = train_job(launcher, job, *settings)
    agree(plain, train_job(launcher, job, "parallelism.zero=3", *settings))
    assert np.abs(plain.weights["moved"]).max() > 0


@pytest.mark.core
@pytest.mark.parametrize(
    "settings",
    [
        ("parallelism.zero=3", NORM),
        *(pytest.param(each, marks=pytest.mark.long) for each in ((NORM,), (), ("parallelism.zero=2",), REPLICAS)),
    ],
)
def test_its_exchanges_are_planned(job: Path, launcher: Launcher, tmp_path: Path, settings: tuple[str, ...]) -> None:
    exchanges_as_planned(launcher, tmp_path, job, *settings)


def test_a_count_of_calls_needs_no_exchange(job: Path) -> None:
    assert ready(job, NORM).program.moves_buffers and not ready(job, NORM, CALLS).program.moves_buffers


@pytest.mark.long
def test_a_count_of_calls_trains_as_one_process(job: Path, launcher: Launcher) -> None:
    one = train_job(launcher, job, CALLS, NORM, "devices.cpus=1")
    for zero in range(4):
        agree(one, train_job(launcher, job, CALLS, NORM, f"parallelism.zero={zero}"))
