"""What a loss counts is what is kept over the global batch, however unevenly the ranks' samples are masked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.launcher import Launcher
from helpers.paths import HELPERS
from helpers.trained import agree, train_job

JOB = """
model {
  network = python("own_samples:Tagger")
  loss    = LOSS
}
data {
  source     = python("own_samples:Tagged")
  collate    = python("own_samples:together")
  batch      = 8
  validation = 25%
}
devices { cpus = 1 }
train {
  steps     = 6
  optimizer = sgd(lr = 0.5)
}
evaluate {
  every   = 3 steps
  metrics = METRICS
}
log {
  every       = 1 step
  tensorboard = false
}
"""
LOSSES = {
    "of the library": ("cross_entropy()", "[loss, accuracy, perplexity]"),
    "a sum and a count by a mask of the batch": ('python("own_samples:masked")', "[loss]"),
}


@pytest.mark.parametrize(("loss", "metrics"), LOSSES.values(), ids=LOSSES)
def test_uneven_masks_count_as_in_one_process(launcher: Launcher, tmp_path: Path, loss: str, metrics: str) -> None:
    shutil.copy(HELPERS / "own_samples.py", tmp_path)
    job = tmp_path / "job.plt"
    job.write_text(JOB.replace("LOSS", loss).replace("METRICS", metrics))
    one = train_job(launcher, job)
    assert len(one.losses()) == 6 and len(one.losses("validation")) == 2
    agree(one, train_job(launcher, job, "devices.cpus=2"))
    agree(one, train_job(launcher, job, "devices.cpus=2", "parallelism.microbatches=2", "parallelism.zero=2"))
