"""A training on a mixture is that of one process on any number of ranks, and goes on with the very next sample."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from helpers.launcher import Launcher
from helpers.paths import HELPERS
from helpers.trained import agree, ready, train, train_job

TEXTS = """
model {
  network = gpt(layers = 1, width = 8, heads = 2, context = 8, vocab = 256)
  loss    = cross_entropy()
}
data {
  source     = mixture([text("a.txt"), text("b.txt")], weights = [0.7, 0.3])
  batch      = 8
  validation = 20%
}
devices { cpus = 1 }
train {
  epochs    = 2
  optimizer = sgd(lr = 0.1)
}
log {
  every       = 1 step
  tensorboard = false
}
"""
OWN = """
model {
  network = python("own_samples:Pooled")
  loss    = python("own_samples:pooled_loss")
}
data {
  source  = mixture([python("own_samples:Ragged"), python("own_samples:Ragged", more = 3)], samples = 60)
  collate = python("own_samples:padded")
  batch   = 12
}
devices { cpus = 1 }
train {
  epochs    = 2
  optimizer = sgd(lr = 0.1)
}
log {
  every       = 1 step
  tensorboard = false
}
"""


def test_a_mixture_of_texts_goes_on_on_two_ranks(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat and a hat. " * 20)
    (tmp_path / "b.txt").write_text("two dogs, no cats. " * 20)
    job = tmp_path / "job.plt"
    job.write_text(TEXTS)
    one = train_job(launcher, job)
    assert len(one.losses()) == 12 and len(one.losses("validation")) == 1  # 34 and 15 of 38 sequences of b
    for steps, ranks in ((8, 1), (12, 2)):
        made = ready(job, "checkpoint.every=100 steps", "checkpoint.resume=auto", f"devices.cpus={ranks}")
        found = train(launcher, tmp_path / "run", made.program, made.places, steps=steps)
    np.testing.assert_allclose(found.losses(), one.losses(), rtol=0, atol=1e-5)


def test_samples_of_several_data_sets_are_put_together_in_one_batch(launcher: Launcher, tmp_path: Path) -> None:
    shutil.copy(HELPERS / "own_samples.py", tmp_path)
    job = tmp_path / "job.plt"
    job.write_text(OWN)
    one = train_job(launcher, job)
    assert len(one.losses()) == 10
    agree(one, train_job(launcher, job, "devices.cpus=2"))
