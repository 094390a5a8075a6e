"""A sampler's order is that of one process on any number of ranks, and a resumed training sees its very next sample."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.launcher import Launcher
from helpers.paths import HELPERS
from helpers.trained import agree, ready, train, train_job

from dslc.dsl.diagnostics import Report
from dslc.front import check_one
from dslc.resume import check_resume

JOB = """
model {
  network = [linear(8), relu(), linear(4)]
  loss    = cross_entropy()
}
data {
  source     = synthetic(samples = 60, shape = [6], classes = 4)
  batch      = 8
  validation = 12/60
  sampler    = SAMPLER
}
devices { cpus = 1 }
train {
  epochs    = 3
  optimizer = sgd(lr = 0.1)
}
log {
  every       = 1 step
  tensorboard = false
}
"""
RAGGED = """
model {
  network = python("own_samples:Pooled")
  loss    = python("own_samples:pooled_loss")
}
data {
  source  = python("own_samples:Ragged")
  collate = python("own_samples:padded")
  batch   = 8
  sampler = by_length(python("own_samples:length"), window = 3)
}
devices { cpus = 1 }
parallelism { microbatches = 2 }
train {
  epochs    = 2
  optimizer = sgd(lr = 0.1)
}
log {
  every       = 1 step
  tensorboard = false
}
"""


def job_with(folder: Path, text: str, sampler: str = "") -> Path:
    shutil.copy(HELPERS / "own_samples.py", folder)
    np.save(folder / "weights.npy", np.arange(60) % 7)
    job = folder / "job.plt"
    job.write_text(text.replace("SAMPLER", sampler))
    return job


@pytest.mark.parametrize(
    ("sampler", "steps"),
    [
        ('weighted("weights.npy", samples = 40, replacement = false)', 15),
        ("balanced(samples = 100)", 36),
    ],
)
def test_a_drawn_order_is_that_of_one_process_and_goes_on_exactly(
    launcher: Launcher, tmp_path: Path, sampler: str, steps: int
) -> None:
    job = job_with(tmp_path, JOB, sampler)
    one = train_job(launcher, job)
    assert len(one.losses()) == steps
    kept = ("checkpoint.every=100 steps", "checkpoint.resume=auto")
    for until, ranks in ((7, 2), (steps, 4)):
        made = ready(job, *kept, f"devices.cpus={ranks}")
        found = train(launcher, tmp_path / "run", made.program, made.places, steps=until)
    np.testing.assert_allclose(found.losses(), one.losses(), rtol=0, atol=1e-5)


def test_an_order_by_length_is_that_of_one_process_with_less_padding(launcher: Launcher, tmp_path: Path) -> None:
    job = job_with(tmp_path, RAGGED)
    one = train_job(launcher, job)
    agree(one, train_job(launcher, job, "devices.cpus=2"))
    unsorted = train_job(launcher, job, "data.sampler=none")

    def padding(trained: object) -> float:
        return sum(line["padding"] for line in trained.lines if line["split"] == "train")  # type: ignore[attr-defined]

    assert padding(one) < 0.5 * padding(unsorted)


def test_a_checkpoint_of_another_order_does_not_fit(launcher: Launcher, tmp_path: Path) -> None:
    job = job_with(tmp_path, JOB, 'weighted(python("own_samples:weights", samples = 60))')
    kept = f"checkpoint.dir={tmp_path / 'kept'}"
    train_job(launcher, job, kept, "checkpoint.every=6 steps", "train.epochs=1")
    resumes = (kept, "checkpoint.resume=auto", "data.sampler=balanced()")
    made = ready(job, *resumes)
    (tmp_path / "other").mkdir()
    outcome, _ = launcher.launch(made.program, made.places, tmp_path / "other")
    assert "its order of samples is `weighted(samples = 48" in str(outcome.failure)
    resumed = Report()
    _, analysis = check_one(str(job), ["data.sampler=balanced()"])
    assert analysis is not None
    check_resume(analysis, str(tmp_path / "kept"), resumed)
    assert [d.code for d in resumed.errors] == ["E0905"]
    other = f'data.sampler=weighted("{tmp_path}/weights.npy")'
    made = ready(job, kept, "checkpoint.resume=auto", other)
    outcome, _ = launcher.launch(made.program, made.places, tmp_path / "other")
    assert "its samples had other weights" in str(outcome.failure)
