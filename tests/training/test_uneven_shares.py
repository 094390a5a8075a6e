"""Data ranks with unequal shares of a batch train as one process does, with the kept last batch, dropout, batch norm,
sharding and micro-batches.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, exchanges_as_planned, ready, train_job

from dslc.runtime.data.samples import Splits
from dslc.runtime.step.rank_speeds import with_measured_shares

JOB = """
param norm = batch_norm()
model {
  network = [conv2d(4, padding = 1), norm, relu(), flatten(), dropout(0.1), linear(10)]
  loss    = cross_entropy()
}
data {
  source     = synthetic(samples = 100, shape = [1, 6, 6], classes = 10)
  batch      = 24
  validation = 20%
  last_batch = keep
}
devices { cpus = 1 }
train { epochs = 2, optimizer = sgd(lr = 0.1), clip = 1.0 }
evaluate { metrics = [loss, accuracy] }
log { every = 1 step }
"""
WITHOUT_NORM = "norm=relu()"


@cache
def in_one_process(launcher: Launcher, folder: Path, *settings: str) -> Trained:
    (folder / "made.plt").write_text(JOB)
    return train_job(launcher, folder / "made.plt", *settings)


@pytest.mark.core
@pytest.mark.parametrize(
    ("same", "settings", "shares"),
    [
        ((), ("devices.cpus=3", "parallelism.data_shares=[3, 1, 2]"), (12, 4, 8)),
        (
            (WITHOUT_NORM,),
            ("devices.cpus=2", "parallelism.data_shares=[3, 1]", "parallelism.zero=3", "parallelism.microbatches=2"),
            (18, 6),
        ),
        ((WITHOUT_NORM,), ("devices.cpus=2", "parallelism.data_shares=[2, 5]", "parallelism.zero=1"), (7, 17)),
    ],
)
def test_unequal_shares_train_as_one_process(
    launcher: Launcher,
    tmp_path_factory: pytest.TempPathFactory,
    same: tuple[str, ...],
    settings: tuple[str, ...],
    shares: tuple[int, ...],
) -> None:
    folder = tmp_path_factory.getbasetemp()
    one = in_one_process(launcher, folder, *same)
    assert ready(folder / "made.plt", *same, *settings).program.data.shares == shares
    assert len(one.losses()) == 8 and one.losses("validation")
    agree(one, train_job(launcher, folder / "made.plt", *same, *settings))


@pytest.mark.core
def test_measured_shares_are_kept_for_the_next_start(launcher: Launcher, tmp_path: Path) -> None:
    """Whatever the speeds are here, the curve is one process's; the shares in a run directory are taken again."""
    one = in_one_process(launcher, tmp_path)
    settings = ("devices.cpus=2", "parallelism.data_shares=measured")
    job, folder, again = tmp_path / "made.plt", tmp_path / "run", tmp_path / "again"
    folder.mkdir()
    agree(one, train_job(launcher, job, *settings, folder=folder))
    shares = json.loads((folder / "shares.json").read_text())["shares"]
    assert len(shares) == 2 and sum(shares) == 24 and min(shares) > 0
    again.mkdir()
    (again / "shares.json").write_text('{"shares": [21, 3]}')
    found = train_job(launcher, job, *settings, folder=again)
    agree(one, found)
    made, no_samples = ready(job, *settings), cast(Splits, None)
    resumed = with_measured_shares(made.program, made.places[0], no_samples, torch.device("cpu"), str(again))
    assert resumed.data.shares == (21, 3) and made.program.data.shares == (12, 12)
    assert (again / "shares.json").read_text() == '{"shares": [21, 3]}' and "by the measured speed" not in found.shown


TOKENS = """
model { network = gpt(layers = 2, width = 16, heads = 2, context = 8, vocab = 64), loss = cross_entropy() }
data { source = synthetic(samples = 200, vocab = 64, context = 8), batch = 12 }
devices { cpus = 4 }
train { steps = 4, optimizer = sgd(lr = 0.1) }
log { every = 1 step }
"""


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_ranks_of_another_axis_have_one_share(launcher: Launcher, tmp_path: Path, axis: str) -> None:
    """What each of them sends in a step is in proportion to it."""
    settings = (f"parallelism.{axis}=2", "parallelism.data_shares=[2, 1]", "parallelism.microbatches=2")
    job, folder = tmp_path / "made.plt", tmp_path / "profiled"
    job.write_text(TOKENS)
    folder.mkdir()
    agree(train_job(launcher, job, "devices.cpus=1"), train_job(launcher, job, *settings))
    exchanges_as_planned(launcher, folder, job, *settings)
