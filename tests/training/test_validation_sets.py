"""Several validation sets, each evaluated by its name, and goals that look at one of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, train_in_parts, train_job, write_job_with_helper

from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.check_job import check_one
from dslc.jobs.prepare_run import prepare
from dslc.main import main

JOB = job_text(
    model={"network": "[linear(8), tanh(), linear(3)]"},
    data={"source": 'python("own_streams:sets")', "batch": 4},
    train={"steps": 8, "optimizer": "sgd(lr = 0.3)", "early_stopping": 'lowest("far.loss", patience = 30)'},
    evaluate={"every": "2 steps", "metrics": "[loss, accuracy]"},
    checkpoint={"best": 'highest("clean.accuracy")', "keep": 1},
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job_with_helper("own_streams.py", tmp_path_factory.mktemp("sets"), JOB)


@pytest.fixture(scope="module")
def one(job: Path, launcher: Launcher) -> Trained:
    return train_job(launcher, job)


@pytest.mark.core
@pytest.mark.parametrize("plan", [("devices.cpus=2", "parallelism.zero=1"), ("devices.cpus=4", "parallelism.zero=3")])
def test_each_is_exact_on_any_number_of_ranks(
    job: Path, launcher: Launcher, one: Trained, plan: tuple[str, ...]
) -> None:
    agree(one, train_job(launcher, job, *plan))
    assert {line["split"] for line in one.lines} == {"train", "validation/clean", "validation/far"}
    assert one.losses("validation/clean") != one.losses("validation/far")
    assert len(one.losses("validation/far")) == 4


def test_goals_look_at_one_of_them(one: Trained) -> None:
    found = {line["step"]: line["accuracy"] for line in one.lines if line["split"] == "validation/clean"}
    best = next(step for step, accuracy in found.items() if accuracy == max(found.values()))
    assert int(os.readlink(one.folder / "checkpoints" / "best").rpartition("-")[2]) == best


def test_it_resumes(job: Path, launcher: Launcher, one: Trained, tmp_path: Path) -> None:
    found = train_in_parts(launcher, tmp_path / "run", job, (4, ()), (8, ()))
    np.testing.assert_array_equal(found.losses("validation/far"), one.losses("validation/far"))


def test_a_goal_says_which_set(job: Path) -> None:
    report = Report()
    assert prepare(load(str(job), ["checkpoint.best=lowest(loss)"]), report) is None
    (said,) = report.errors
    assert said.code == "E0317" and "clean.loss" in said.help


@pytest.mark.parametrize(("goal", "good"), [("far.loss", True), ("far.accuracy", True), ("far.recall", False)])
def test_a_set_may_have_any_name_before_the_source_is_known(job: Path, goal: str, good: bool) -> None:
    errors = check_one(str(job), [f'checkpoint.best=highest("{goal}")'])[0].errors
    assert [error.code for error in errors] == ["E0317"] * (not good)


def test_dslc_evaluate_names_them(job: Path, one: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--checkpoint", str(one.folder / "weights.safetensors"), "--set", "devices.cpus=2"]
    assert main(["evaluate", str(job), *at, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["samples"] == 27
    for name in ("clean", "far"):
        assert told[f"{name}.loss"] == pytest.approx(one.losses(f"validation/{name}")[-1], abs=1e-5)
