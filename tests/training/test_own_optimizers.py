"""A user's own optimizer trains over several ranks as in one process, wherever its updates may be divided."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.launcher import Launcher
from helpers.paths import HELPERS
from helpers.trained import Trained, agree, staged, train_job
from safetensors.numpy import load_file

from dslc.compiler.ir.program import OptimizerStep, PythonFunction
from dslc.runtime.checkpoint.export import export
from dslc.runtime.checkpoint.state import keys_of, read_tensors
from dslc.runtime.loop.optimizer_trial import try_out

JOB = """
model {
  network = [linear(24), gelu(), linear(20), gelu(), linear(24), gelu(), linear(10)]
  loss    = cross_entropy()
}
data {
  source     = synthetic(samples = 72, shape = [12], classes = 10)
  batch      = 8
  validation = 8/72
}
devices { cpus = 1 }
train {
  steps       = 6
  optimizer   = OPTIMIZER
  lr_schedule = warmup_cosine(warmup = 2 steps)
}
"""
LION = 'python("own_optimizers:Lion", lr = 1e-3, weight_decay = 0.1)'
MUON = 'python("own_optimizers:Muon", lr = 0.02, besides = ["6."])'
SCHEDULE_FREE = 'python("own_optimizers:ScheduleFree", lr = 0.3)'
ADAM8 = 'python("own_optimizers:Adam8", lr = 1e-2)'
TOGETHER = 'python("own_optimizers:Together", lr = 0.1)'
NO_DECAY = 'train.no_decay=["*.bias"]'


def job(folder: Path, optimizer: str) -> Path:
    shutil.copy(HELPERS / "own_optimizers.py", folder)
    made = folder / "job.plt"
    made.write_text(JOB.replace("OPTIMIZER", optimizer))
    return made


def over(data: int, zero: int = 0, **axes: int) -> tuple[str, ...]:
    ranks = data
    for size in axes.values():
        ranks *= size
    more = tuple(f"parallelism.{axis}={size}" for axis, size in axes.items())
    return (f"devices.cpus={ranks}", f"parallelism.data={data}", f"parallelism.zero={zero}", *more)


STAGES = staged("1f1b", 2, 1, 2)
STAGES_AND_DATA = staged("1f1b", 2, 2, 2)
SAME = [
    (LION, (over(2, 1), over(2, 3, tensor=2))),
    (MUON, (over(4, 1), STAGES_AND_DATA)),
    (ADAM8, (over(2, 1),)),
    (TOGETHER, (over(2),)),
    (SCHEDULE_FREE, (over(2, 3),)),
]
MORE = [
    (LION, (over(2), over(2, 2), over(4, 3), over(1, tensor=2), STAGES)),
    (MUON, (over(2), STAGES)),
    (ADAM8, (over(4), STAGES_AND_DATA)),
    ('python("torchao.optim:AdamW8bit", lr = 1e-3)', (over(2), over(2, 1))),
    (SCHEDULE_FREE, (over(2), over(1, tensor=2), STAGES, STAGES_AND_DATA)),
]


@pytest.fixture(scope="module", autouse=True)
def _tried() -> None:
    """Loads what a trial needs into this process, once, and not into each child."""
    function = PythonFunction(function="own_optimizers:Lion", folder=str(HELPERS))
    try_out(OptimizerStep(kind="", lr=0.1, state=(), counts=(), fused=(), python=function), ())


@pytest.mark.parametrize(("optimizer", "plans"), SAME, ids=["lion", "muon", "adam8", "together", "schedule-free"])
def test_over_ranks_as_in_one_process(
    launcher: Launcher, tmp_path: Path, optimizer: str, plans: tuple[tuple[str, ...], ...]
) -> None:
    made = job(tmp_path, optimizer)
    settings = (NO_DECAY,) if optimizer == LION else ()
    one = train_job(launcher, made, *settings)
    assert one.losses()[0] - one.losses()[-1] > (0.001 if optimizer == SCHEDULE_FREE else 0.01), "it learns"
    for plan in plans:
        agree(one, train_job(launcher, made, *settings, *plan), weights=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(("optimizer", "plans"), MORE, ids=["lion", "muon", "adam8", "torchao", "schedule-free"])
def test_over_more_ranks_as_in_one_process(
    launcher: Launcher, tmp_path: Path, optimizer: str, plans: tuple[tuple[str, ...], ...]
) -> None:
    test_over_ranks_as_in_one_process(launcher, tmp_path, optimizer, plans)


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        (LION, over(2, 3), over(1)),
        (MUON, over(2, 1), STAGES),
        (SCHEDULE_FREE, over(1), over(2, 2)),
        pytest.param(ADAM8, over(1), over(2, 1), marks=pytest.mark.long),
    ],
    ids=["lion", "muon", "schedule-free", "adam8"],
)
def test_a_training_resumes_under_another_plan(
    launcher: Launcher, tmp_path: Path, optimizer: str, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    made = job(tmp_path, optimizer)
    whole = train_job(launcher, made, "log.every=1 step")
    kept = f"checkpoint.dir={tmp_path / 'kept'}"
    first = train_job(launcher, made, "checkpoint.every=2 steps", kept, *before)
    assert first.losses()
    for path in (tmp_path / "kept").iterdir():
        if path.name.endswith("6"):
            shutil.rmtree(path)
    resumed = train_job(launcher, made, "checkpoint.resume=auto", kept, *after)
    assert all(line["step"] > 4 for line in resumed.lines)
    _close(whole, resumed)


def _close(one: Trained, other: Trained) -> None:
    for name, value in one.weights.items():
        assert abs(other.weights[name] - value).max() < 1e-4, name


@pytest.mark.core
def test_an_optimizer_evaluates_other_weights_than_it_trains(launcher: Launcher, tmp_path: Path) -> None:
    """`eval()` comes before evaluations, checkpoints and the last weights; the training itself does not see it."""
    made = job(tmp_path, SCHEDULE_FREE)
    often = train_job(launcher, made, "evaluate.every=1 step", "checkpoint.every=2 steps")
    seldom = train_job(launcher, made, "evaluate.every=6 steps")
    assert often.losses() == seldom.losses()
    for name, value in seldom.weights.items():
        np.testing.assert_array_equal(often.weights[name], value, err_msg=name)
    source = str(often.folder / "checkpoints" / "step-00000006")
    kept = {}
    for raw in (True, False):
        export(source, {}, str(tmp_path / "weights.safetensors"), raw=raw)
        kept[raw] = load_file(tmp_path / "weights.safetensors")
    state = {key: torch.empty(tuple(at.size)) for key, at in keys_of(source).items() if key.endswith(".z")}
    read_tensors(source, state)
    assert state
    for name, value in kept[False].items():
        np.testing.assert_array_equal(value, often.weights[name], err_msg=name)
        z, y = state[f"optimizer.{name}.z"], torch.from_numpy(kept[True][name])
        np.testing.assert_allclose(value, y.lerp(z, 1 - 1 / 0.9), rtol=0, atol=1e-6, err_msg=name)
        assert not torch.equal(y, torch.from_numpy(value))
