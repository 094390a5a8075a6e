"""Data ranks with unequal shares of a batch train as one process does, with the kept last batch, dropout, batch norm,
sharding and micro-batches.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, exchanges_as_planned, ready, train, train_job, write_job_with_helper

from dslc.jobs.prepare_run import report_on, write_run_directory
from dslc.runtime.step.rank_speeds import read_shares

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
STRUCTURED = """
model {
  network = python("own_samples:Pooled")
  loss    = python("own_samples:pooled_loss")
}
data {
  source  = python("own_samples:Ragged")
  collate = python("own_samples:padded")
  batch   = 8
  sampler = by_length()
}
devices { cpus = 1 }
parallelism { microbatches = 2 }
train { epochs = 1, optimizer = sgd(lr = 0.1) }
log { every = 1 step }
"""


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
@pytest.mark.parametrize(("text", "batch", "uneven"), [(STRUCTURED, 8, [6, 2]), (JOB, 24, [21, 3])])
def test_measured_shares_are_kept_for_the_next_start(
    launcher: Launcher, tmp_path: Path, text: str, batch: int, uneven: list[int]
) -> None:
    """Whatever the speeds are here, the curve is one process's; the shares in a run directory are taken again."""
    job = write_job_with_helper("own_samples.py", tmp_path, text)
    one = train_job(launcher, job)
    made = ready(job, "devices.cpus=2", "parallelism.data_shares=measured")
    folder = tmp_path / "run"
    write_run_directory(made, str(folder))
    agree(one, train(launcher, folder, made.program, made.places))
    content = json.loads((folder / "shares.json").read_text())
    assert len(content["shares"]) == 2 and sum(content["shares"]) == batch and min(content["shares"]) > 0
    again = tmp_path / "again"
    write_run_directory(made, str(again))
    (again / "shares.json").write_text(json.dumps(content | {"shares": uneven}))
    found = train(launcher, again, made.program, made.places)
    agree(one, found)
    assert json.loads((again / "shares.json").read_text())["shares"] == uneven
    assert "by the measured speed" not in found.shown
    assert report_on(made, str(again), len(one.losses()))["shares"] == uneven


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"batch": 24, "shares": [21, 3], "machines": ["node1 cpu", "node2 cpu"]}', ""),
        ('{"batch": 24, "shares": [21, 3], "machines": ["node1 cpu", "node3 cpu"]}', "is of other machines"),
        ('{"batch": 24, "shares": [21, 3]}', "cannot be read (KeyError('machines'))"),
        ('{"batch": 24, "shares": [21, 4], "machines": ["node1 cpu", "node2 cpu"]}', "does not suit the job"),
        ('{"batch": 24, "shares": [24, 0], "machines": ["node1 cpu", "node2 cpu"]}', "does not suit the job"),
        ('{"batch": 24, "sha', "cannot be read"),
        ("[24]", "cannot be read"),
    ],
)
def test_shares_are_measured_anew_unless_they_suit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    (tmp_path / "made.plt").write_text(JOB)
    job = ready(tmp_path / "made.plt", "devices.cpus=2", "parallelism.data_shares=measured").program
    (tmp_path / "shares.json").write_text(content)
    assert read_shares(job, ["node1 cpu", "node2 cpu"], str(tmp_path)) == ([] if said else [21, 3])
    assert said in capsys.readouterr().out


TOKENS = """
model { network = gpt(layers = 2, width = 16, heads = 2, context = 8, vocab = 64), loss = cross_entropy() }
data { source = synthetic(samples = 200, vocab = 64, context = 8), batch = 12, validation = 20% }
devices { cpus = 4 }
train { steps = 4, optimizer = sgd(lr = 0.1) }
evaluate { metrics = [loss, accuracy] }
log { every = 1 step }
"""


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline"])
def test_ranks_of_another_axis_have_one_share(launcher: Launcher, tmp_path: Path, axis: str) -> None:
    """What each of them sends in a step is in proportion to it."""
    settings = (f"parallelism.{axis}=2", "parallelism.data_shares=[2, 1]", "parallelism.microbatches=2")
    job, folder = tmp_path / "made.plt", tmp_path / "profiled"
    job.write_text(TOKENS)
    folder.mkdir()
    one = train_job(launcher, job, "devices.cpus=1")
    assert one.losses("validation")
    agree(one, train_job(launcher, job, *settings))
    exchanges_as_planned(launcher, folder, job, *settings)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline"])
def test_ranks_of_another_axis_measure_one_share(launcher: Launcher, tmp_path: Path, axis: str) -> None:
    job = tmp_path / "made.plt"
    job.write_text(TOKENS)
    settings = (f"parallelism.{axis}=2", "parallelism.data_shares=measured", "parallelism.microbatches=2")
    found = train_job(launcher, job, *settings, folder=tmp_path)
    shares = json.loads((tmp_path / "shares.json").read_text())["shares"]
    assert len(shares) == 2 and sum(shares) == 12 and min(shares) > 0
    agree(train_job(launcher, job, "devices.cpus=1"), found)
