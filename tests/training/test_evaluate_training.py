"""Evaluations before the first step, and of the training split: exact on any ranks, and without a trace in the
training.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import made_data
from helpers.launcher import Launcher
from helpers.paths import HELPERS
from helpers.trained import train_job

JOB = """
model {
  network = [flatten(), linear(8), tanh(), dropout(0.1), linear(10)]
  loss    = cross_entropy()
}
data {
  source     = synthetic(samples = 100, shape = [6], classes = 10)
  batch      = 10
  validation = 10%
}
train {
  epochs    = 2
  optimizer = adam(lr = 1e-2)
}
evaluate {
  every    = 1 epoch
  metrics  = [loss, accuracy]
}
log {
  every       = 1 step
  tensorboard = false
}
"""
ALSO = ("evaluate.start=true", "evaluate.training=true")
PLANS = {
    "zero = 3": ("devices.cpus=2", "parallelism.zero=3"),
    "pipeline": ("devices.cpus=2", "parallelism.pipeline=2", "parallelism.microbatches=2"),
    "local_sgd": ("devices.cpus=2", "parallelism.gradients=local_sgd(period = 4)"),
}


@pytest.mark.parametrize("plan", PLANS)
def test_more_evaluations_are_exact_and_leave_the_training_alone(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    job = tmp_path / "job.plt"
    job.write_text(JOB.replace(", dropout(0.1)", ""))
    more, plain = (train_job(launcher, job, *PLANS[plan], *settings) for settings in (ALSO, ()))
    assert more.losses() == plain.losses(), "bit by bit"
    assert more.losses("validation")[1:] == plain.losses("validation")
    assert [line["step"] for line in more.lines if line["split"] == "training"] == [0, 9, 18]
    alone = train_job(launcher, job, *ALSO, "train.epochs=1")
    for split in ("training", "validation"):
        assert more.losses(split)[0] == pytest.approx(alone.losses(split)[0], rel=1e-6)
        assert more.records[split, 0]["accuracy"] == pytest.approx(alone.records[split, 0]["accuracy"], abs=1e-12)


def test_the_training_split_is_each_sample_once_and_not_augmented(launcher: Launcher, tmp_path: Path) -> None:
    """With a rate next to 0 the mean of the steps' losses over an epoch is the loss of the split."""
    job = tmp_path / "job.plt"
    job.write_text(JOB.replace("dropout(0.1), ", ""))
    trained = train_job(launcher, job, *ALSO, "train.optimizer=sgd(lr = 1e-30)", "data.validation=0", "devices.cpus=2")
    assert trained.losses("training") == pytest.approx([np.mean(trained.losses()[:10])] * 3, rel=1e-6)
    made_data.pictures(tmp_path / "all", 12)
    losses = []
    for augment in ("", ", augment = [random_horizontal_flip(p = 1.0)]"):
        source = f'images("all", size = 8{augment})'
        job.write_text(JOB.replace("synthetic(samples = 100, shape = [6], classes = 10)", source))
        trained = train_job(launcher, job, *ALSO, "data.batch=4")
        losses.append((trained.losses("training")[0], trained.losses()[0]))
    assert losses[0][0] == losses[1][0] and losses[0][1] != losses[1][1]


def test_a_start_that_is_evaluated_stays_once_in_the_records_of_a_resume(launcher: Launcher, tmp_path: Path) -> None:
    job, folder = tmp_path / "job.plt", tmp_path / "run"
    job.write_text(JOB)
    folder.mkdir()
    kept = (*ALSO, "checkpoint.every=1 epoch", "checkpoint.resume=auto")
    for epochs in ("1", "2"):
        trained = train_job(launcher, job, *kept, f"train.epochs={epochs}", folder=folder)
    assert [line["step"] for line in trained.lines if line["split"] == "training"] == [0, 9, 18]
    shutil.rmtree(folder / "checkpoints")
    again = train_job(launcher, job, *kept, "train.epochs=1", folder=folder)
    assert [line["step"] for line in again.lines if line["split"] == "training"] == [0, 9]


def test_structures_and_sets_for_validation_beside_the_training_split(launcher: Launcher, tmp_path: Path) -> None:
    shutil.copy(HELPERS / "own_samples.py", tmp_path)
    job = tmp_path / "job.plt"
    job.write_text(JOB.replace("metrics  = [loss, accuracy]", ""))
    own = ['model.network=python("own_samples:Pooled")', 'model.loss=python("own_samples:pooled_loss")',
           'data.source=python("own_samples:Ragged")', 'data.collate=python("own_samples:padded")']  # fmt: skip
    two, one = (train_job(launcher, job, *own, *ALSO, "data.batch=8", f"devices.cpus={ranks}") for ranks in (2, 1))
    assert two.losses("training") == pytest.approx(one.losses("training"), rel=1e-5)


@pytest.mark.parametrize("samples", [5, 9])
def test_ranks_may_evaluate_unequal_numbers_of_batches(launcher: Launcher, tmp_path: Path, samples: int) -> None:
    """A batch norm that is synchronised exchanges nothing in an evaluation, so that no rank waits for another."""
    job = tmp_path / "job.plt"
    text = JOB.replace("dropout(0.1)", "batch_norm()").replace("epochs    = 2", "steps = 2")
    job.write_text(text + "launch { timeout = 20 s }\n")
    settings = ("data.batch=2", f"data.validation={samples}/100", "evaluate.every=none")
    two, one = (train_job(launcher, job, *settings, f"devices.cpus={ranks}") for ranks in (2, 1))
    assert two.losses("validation") == pytest.approx(one.losses("validation"), rel=2e-2)
