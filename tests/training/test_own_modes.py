"""A network that comes in evaluation mode, as every `from_pretrained` gives it, is trained in training mode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, beside_own_networks, exchanges_as_planned, ready, train_job

from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.prepare_run import prepare

JOB = job_text(
    model={"network": 'python("own_networks:noisy")'},
    data={"source": "digits()", "batch": 32, "validation": "0.2"},
    devices={"cpus": 1},
    train={"steps": 4},
    evaluate={"every": "2 steps"},
)
EVAL = "model.network.mode=eval"
TWO = ("devices.cpus=2",)
SHARDED = (*TWO, "parallelism.zero=3")
STAGES = (*TWO, "parallelism.pipeline=2", "parallelism.microbatches=2")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beside_own_networks(tmp_path_factory.mktemp("modes"), JOB)


def statistics(run: Trained) -> list[float]:
    """The running means of the batch norm, which are 0 where no batch has passed through it in training mode."""
    (name,) = [name for name in run.weights if name.endswith("running_mean")]
    return list(run.weights[name])


@pytest.mark.parametrize("plan", [(), SHARDED, STAGES], ids=["one", "sharded", "stages"])
def test_one_that_comes_in_evaluation_mode_trains_as_one_in_training_mode(
    job: Path, launcher: Launcher, plan: tuple[str, ...]
) -> None:
    plain, arrived = train_job(launcher, job, *plan), train_job(launcher, job, EVAL, *plan)
    agree(plain, arrived, losses=0, weights=0)
    assert np.abs(statistics(arrived)).max() > 0
    still = train_job(launcher, job, "model.network.p=0.0", *plan)
    assert still.losses() != arrived.losses(), "dropout drops"


def test_a_batch_norm_that_its_network_keeps_in_evaluation_mode_stays_in_it(job: Path, launcher: Launcher) -> None:
    """A module freezes its norm in its own `train`, or by `eval` in its forward pass, as is common in fine-tuning."""
    for mode in ("override", "forward"):
        kept = train_job(launcher, job, f"model.network.mode={mode}")
        assert set(statistics(kept)) == {0.0}, mode
        assert kept.losses()[-1] < kept.losses()[0]


def test_what_ranks_exchange_of_a_batch_norm_that_is_kept_still_is_as_planned(
    job: Path, launcher: Launcher, tmp_path: Path
) -> None:
    exchanges_as_planned(launcher, tmp_path, job, "model.network.mode=override", *TWO)


@pytest.mark.parametrize("generator", ["counter", "torch"])
def test_its_noise_is_warned_of_where_ranks_draw_for_themselves(job: Path, generator: str) -> None:
    report = Report()
    assert prepare(load(str(job), [EVAL, *TWO, f"train.dropout_generator={generator}"]), report) is not None
    assert ("W0608" in [each.code for each in report.found]) == (generator == "torch")
    assert ready(job, EVAL, *TWO).program.sync_batch_norm
