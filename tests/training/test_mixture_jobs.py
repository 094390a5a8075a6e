"""A training on a mixture is that of one process on any number of ranks, and goes on with the very next sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.job_texts import epochs_job
from helpers.launcher import Launcher
from helpers.trained import agree, train_in_parts, train_job, write_job_with_helper

TEXTS = epochs_job(
    """
  network = gpt(layers = 1, width = 8, heads = 2, context = 8, vocab = 256)
  loss    = cross_entropy()
""",
    """
  source     = mixture([text("a.txt"), text("b.txt")], weights = [0.7, 0.3])
  batch      = 8
  validation = 20%
""",
)
OWN = epochs_job(
    """
  network = python("own_samples:Pooled")
  loss    = python("own_samples:pooled_loss")
""",
    """
  source  = mixture([python("own_samples:Ragged"), python("own_samples:Ragged", more = 3)], samples = 60)
  collate = python("own_samples:padded")
  batch   = 12
""",
)


@pytest.mark.core
def test_a_mixture_of_texts_goes_on_on_two_ranks(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat and a hat. " * 20)
    (tmp_path / "b.txt").write_text("two dogs, no cats. " * 20)
    job = tmp_path / "job.plt"
    job.write_text(TEXTS)
    one = train_job(launcher, job)
    assert len(one.losses()) == 12 and len(one.losses("validation")) == 1  # 34 and 15 of 38 sequences of b
    found = train_in_parts(launcher, tmp_path / "run", job, (8, ()), (12, ("devices.cpus=2",)))
    np.testing.assert_allclose(found.losses(), one.losses(), rtol=0, atol=1e-5)


def test_samples_of_several_data_sets_are_put_together_in_one_batch(launcher: Launcher, tmp_path: Path) -> None:
    job = write_job_with_helper("own_samples.py", tmp_path, OWN)
    one = train_job(launcher, job)
    assert len(one.losses()) == 10
    agree(one, train_job(launcher, job, "devices.cpus=2"))
