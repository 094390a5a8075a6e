"""Steps of a user's own: whatever is sharded, they train as in one process, and resume where they stopped."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import own_steps
from helpers.launcher import Launcher
from helpers.paths import HELPERS
from helpers.trained import Trained, agree, ready, train_job
from safetensors.torch import save_file

from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.prepare_run import prepare

JOB = """
model {
  network = python("own_steps:Pair")
  loss    = own()
}
data {
  source = python("own_steps:Points")
  batch  = 8
}
train {
  steps     = 5
  step      = python("own_steps:step")
  optimizer = sgd(lr = 0.05, momentum = 0.9)
  clip      = 0.5
}
log {
  every = 1 step
}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    shutil.copy(HELPERS / "own_steps.py", tmp_path)
    path = tmp_path / "job.plt"
    path.write_text(JOB)
    return path


@pytest.fixture
def one(launcher: Launcher, job: Path) -> Trained:
    return train_job(launcher, job)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_each_sharding_trains_and_resumes_as_one_process(
    launcher: Launcher, job: Path, one: Trained, zero: int
) -> None:
    """Batch norm, a parameter outside of the parts, one that some ranks use in a step, and one that none uses."""
    ranks = 4 if zero in (1, 3) else 2
    saving = train_job(
        launcher, job, f"devices.cpus={ranks}", f"parallelism.zero={zero}", "checkpoint.every=3 steps", "train.ema=0.5"
    )
    np.testing.assert_allclose(saving.losses(), one.losses(), rtol=1e-5, atol=1e-5)
    other = (f"parallelism.zero={(3, 2, 0, 1)[zero]}", "devices.cpus=2", "train.ema=0.5")
    resumed = train_job(launcher, job, *other, f'checkpoint.resume="{saving.folder}/checkpoints/step-00000003"')
    np.testing.assert_allclose(resumed.losses(), one.losses()[3:], rtol=1e-5, atol=1e-5)
    for name, value in saving.weights.items():
        np.testing.assert_allclose(resumed.weights[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.core
@pytest.mark.parametrize(("ranks", "zero"), [(2, 1), (4, 3)])
def test_each_replica_clips_by_the_whole_norm(launcher: Launcher, job: Path, ranks: int, zero: int) -> None:
    """The scale is whole on each rank, and all else in rows of one rank or of two."""
    clip = "train.clip=0.05"
    found = train_job(
        launcher, job, clip, f"devices.cpus={ranks}", f"parallelism.zero={zero}", "parallelism.replicas=2"
    )
    agree(train_job(launcher, job, clip), found)


@pytest.mark.parametrize(("precision", "zero"), [("bf16", 2), ("bf16(level = O2)", 3), ("fp16", 1)])
def test_low_precision_is_that_of_one_process(launcher: Launcher, job: Path, precision: str, zero: int) -> None:
    set = (f"train.precision={precision}", 'model.network=python("own_steps:Pair", norm = false)')
    found = train_job(launcher, job, *set, "devices.cpus=2", f"parallelism.zero={zero}")
    if precision == "fp16":  # rounding decides which steps are skipped
        assert np.isfinite(found.losses()).all() and found.losses()[-1] < found.losses()[0]
    else:
        agree(train_job(launcher, job, *set), found, losses=3e-2, weights=None)


@pytest.mark.core
def test_one_process_unscales_rows_beside_what_is_whole(launcher: Launcher, job: Path) -> None:
    set = ("train.precision=fp16(level = O2)", 'model.network=python("own_steps:Pair", norm = false)')
    found = train_job(launcher, job, *set)
    assert np.isfinite(found.losses()).all() and found.losses()[-1] < found.losses()[0]


def test_groups_are_optimizers_of_two_rates(launcher: Launcher, job: Path) -> None:
    rates = 'train.groups=[group("heads.*", lr = 0.2, weight_decay = 0.1), group("scale", lr = 0.0)]'
    found = train_job(
        launcher, job, rates, "train.clip=none", "data.shuffle=false", "devices.cpus=2", "parallelism.zero=3"
    )
    torch.manual_seed(0)
    model, samples = own_steps.Pair(), own_steps.Points()
    heads = torch.optim.SGD(model.heads.parameters(), 0.2, momentum=0.9, weight_decay=0.1)
    body = torch.optim.SGD(model.body.parameters(), 0.05, momentum=0.9)
    losses = []
    for step in range(4):
        batch = [torch.stack(each) for each in zip(*(samples[8 * step + n] for n in range(8)), strict=True)]
        for every in ([heads], [heads, body]):
            scores = model.heads[0](model.body(batch[0]), batch[1] == 0) * model.scale
            loss = (scores - batch[0][:, :3].sum(1)).square().mean()
            if every == [heads]:
                losses.append(loss.item())
            model.zero_grad()
            loss.backward()
            for optimizer in every:
                optimizer.step()
    np.testing.assert_allclose(found.losses()[:4], losses, rtol=1e-5, atol=1e-5)


def test_a_part_that_some_ranks_call_is_named(launcher: Launcher, job: Path) -> None:
    set = ('train.step=python("own_steps:some_ranks")', "devices.cpus=2", "parallelism.zero=2")
    made, folder = ready(job, *set), job.parent / "run"
    folder.mkdir()
    outcome, shown = launcher.launch(made.program, made.places, folder)
    assert outcome.failure is not None
    assert "`heads.0` is used in this update by 1 of 2 ranks" in f"{outcome.failure}{shown}"


def test_weights_of_another_network_are_refused_before_a_rank_starts(job: Path, tmp_path: Path) -> None:
    """The network of a step is made, and not called: its tensors are known."""
    save_file({"other": torch.ones(2)}, tmp_path / "other.safetensors")
    found = Report()
    assert prepare(load(str(job), [f'model.weights="{tmp_path}/other.safetensors"']), found) is None
    assert [each.code for each in found.errors] == ["E0713"]
