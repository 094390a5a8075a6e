"""A sampler's order is that of one process on any number of ranks, and a resumed training sees its very next sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.job_texts import epochs_job
from helpers.launcher import Launcher
from helpers.trained import agree, ready, train_in_parts, train_job, write_job_with_helper

from dslc.dsl.diagnostics import Report
from dslc.jobs.check_job import check_one
from dslc.runs.resume import check_resume

JOB = epochs_job(
    """
  network = [linear(8), relu(), linear(4)]
  loss    = cross_entropy()
""",
    """
  source     = synthetic(samples = 60, shape = [6], classes = 4)
  batch      = 8
  validation = 12/60
  sampler    = SAMPLER
""",
    epochs=3,
)
RAGGED = epochs_job(
    """
  network = python("own_samples:Pooled")
  loss    = python("own_samples:pooled_loss")
""",
    """
  source  = python("own_samples:Ragged")
  collate = python("own_samples:padded")
  batch   = 8
  sampler = by_length(python("own_samples:length"), window = 3)
""",
    devices="devices { cpus = 1 }\nparallelism { microbatches = 2 }",
)


def job_with(folder: Path, text: str, sampler: str = "") -> Path:
    np.save(folder / "weights.npy", np.arange(60) % 7)
    return write_job_with_helper("own_samples.py", folder, text.replace("SAMPLER", sampler))


@pytest.mark.core
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
    parts = (7, ("devices.cpus=2",)), (steps, ("devices.cpus=4",))
    found = train_in_parts(launcher, tmp_path / "run", job, *parts)
    np.testing.assert_allclose(found.losses(), one.losses(), rtol=0, atol=1e-5)


def test_an_order_by_length_is_that_of_one_process_with_less_padding(launcher: Launcher, tmp_path: Path) -> None:
    job = job_with(tmp_path, RAGGED)
    one = train_job(launcher, job)
    agree(one, train_job(launcher, job, "devices.cpus=2"))
    unsorted = train_job(launcher, job, "data.sampler=none")

    def padding(trained: object) -> float:
        return sum(line["padding"] for line in trained.lines if line["split"] == "train")  # type: ignore[attr-defined]

    assert padding(one) < 0.5 * padding(unsorted)


@pytest.mark.core
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
