"""A target that is not a class ends a training with the sample's number, the target and the number of classes."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import beside_own_networks, ready

JOB = job_text(
    model={"network": 'python("own_networks:network", inputs = 64, outputs = 10)'},
    data={"source": 'python("own_networks:labelled", wrong = 13)', "batch": 8, "shuffle": "false"},
    devices={"cpus": 2},
    train={"steps": 4},
    log={"every": None},
)
OWN = 'model.loss=python("own_networks:class_loss")'
RANDOM = ("data.shuffle=true", "data.validation=0.2")
STAGES = ("parallelism.pipeline=2", "parallelism.microbatches=2")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beside_own_networks(tmp_path_factory.mktemp("classes"), JOB)


@pytest.mark.core
@pytest.mark.parametrize(
    "plan",
    [(), ("data.source.whole=true",), ("data.workers=1",), (OWN,), (OWN, *RANDOM), (OWN, *STAGES)],
    ids=["one by one", "whole", "by a worker", "own loss", "own loss, shuffled", "own loss in stages"],
)
def test_the_sample_the_target_and_the_classes_are_named(
    job: Path, launcher: Launcher, tmp_path: Path, plan: tuple[str, ...]
) -> None:
    made = ready(job, *plan)
    outcome, _ = launcher.launch(made.program, made.places, tmp_path / "run")
    assert outcome.failure is not None
    message = outcome.failure.message
    assert ("`dataset[13]`" in message or "sample 13 of `own_networks:" in message) and "has the target 10" in message
    assert "the network gives 10 numbers" in message and "0 to 9" in message
