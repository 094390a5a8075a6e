"""A loss that is not finite: the training ends with the step, the ranks and the module, and nothing of it is saved; or
the update is skipped, the same on all ranks; or training continues. On one process and over each axis.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.commands import dslc
from helpers.gang import gang
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import Trained, ready, train
from safetensors.numpy import load_file

from dslc.jobs.prepare_run import Ready
from dslc.runtime import train as runtime
from dslc.runtime.checkpoint.files import checkpoints_in
from dslc.runtime.data.sources.open_sources import open_source
from dslc.runtime.loop.nonfinite import NonFinite
from dslc.runtime.measure.position_details import PositionReporter
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.process.failure import Outcome, describe
from dslc.runtime.process.records import read_metrics
from dslc.runtime.process.stop import RunControl
from dslc.runtime.step.assemble import assemble

JOB = job_text(
    model={"network": "[linear(16), relu(), linear(16), relu(), linear(4)]"},
    data={"source": 'arrays("samples.npz")', "batch": 8, "shuffle": "false"},
    train={"steps": 10, "optimizer": "adamw(lr = 1e-2)"},
)
PLANS: dict[str, tuple[str, ...]] = {
    "one process": ("devices.cpus=1",),
    "ddp": ("devices.cpus=2",),
    "zero 1": ("devices.cpus=2", "parallelism.zero=1"),
    "zero 3": ("devices.cpus=2", "parallelism.zero=3"),
    "pipeline": ("devices.cpus=2", "parallelism.pipeline=2", "parallelism.data=1", "parallelism.microbatches=2"),
    "data x pipeline": ("devices.cpus=4", "parallelism.pipeline=2", "parallelism.data=2", "parallelism.microbatches=2"),
    "tensor": ("devices.cpus=2", "parallelism.tensor=2", "parallelism.data=1"),
}
BAD = 53  # a sample of step 7; of two ranks the second has it


def write_job(folder: Path, bad: float = float("nan"), text: str = JOB, size: float = 1.0) -> Path:
    """A job over 80 samples, one of which is not finite."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, 80)
    inputs = (random.normal(size=(80, 6)) + random.normal(size=(4, 6))[labels]).astype(np.float32)
    inputs[BAD, 2] = bad if bad != 0 else inputs[BAD, 2]
    np.savez(folder / "samples.npz", x=inputs * np.float32(size), y=labels)
    job = folder / "job.plt"
    job.write_text(text)
    return job


def end(launcher: Launcher, job: Path, folder: Path, *settings: str) -> tuple[Outcome, str]:
    """Returns the outcome of a training that fails, and the message."""
    made = ready(job, *settings)
    outcome, shown = launcher.launch(made.program, made.places, folder)
    assert outcome is not None and outcome.failure is not None, shown
    return outcome, describe(outcome)


def goes_on(launcher: Launcher, job: Path, folder: Path, *settings: str) -> Trained:
    made = ready(job, *settings)
    return train(launcher, folder, made.program, made.places)


@pytest.mark.core
@pytest.mark.parametrize("plan", PLANS)
def test_it_stops_with_the_step_the_rank_and_the_module(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    """Earlier checkpoints are kept, and a resume over corrected data ends like a training that never met the fault."""
    job, folder = write_job(tmp_path), tmp_path / "run"
    settings = (*PLANS[plan], "checkpoint.every=3 steps")
    outcome, message = end(launcher, job, folder, *settings)
    assert outcome.failure is not None and outcome.failure.step == 7 and outcome.steps == 6
    assert "the loss of step 7 is nan" in message
    if plan in ("ddp", "zero 1", "zero 3"):
        assert "training failed on rank 1 at step 7" in message and "nan, on rank 1" in message
    assert f"the input of sample {BAD} of the training data" in message
    assert "the first module whose output is not finite is `0` (Linear)" in message
    assert "step-00000006" in message and "on_nonfinite" in message
    assert not (folder / "weights.safetensors").exists()
    assert Path(checkpoints_in(str(folder / "checkpoints"))[0]).name == "step-00000006"

    write_job(tmp_path, bad=0)
    found = goes_on(launcher, job, folder, *settings, "checkpoint.resume=auto")
    whole = goes_on(launcher, job, tmp_path / "whole", "devices.cpus=1")
    assert "resumes after step 6" in found.shown
    np.testing.assert_allclose(found.losses(), whole.losses(), rtol=0, atol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize("plan", PLANS)
def test_the_update_is_left_out_on_all_ranks(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    job = write_job(tmp_path, bad=float("inf"))
    skipping = ("train.on_nonfinite=skip", "checkpoint.every=7 steps")
    found = goes_on(launcher, job, tmp_path / "run", *PLANS[plan], *skipping)
    assert [line["skipped"] for line in found.lines] == [0] * 6 + [1] * 4
    assert [loss is None for loss in found.losses()] == [False] * 6 + [True] + [False] * 3
    assert "by step 7 1 update was left out, 1 in all" in found.shown
    assert all(np.isfinite(value).all() for value in found.weights.values())
    one = goes_on(launcher, job, tmp_path / "one", "devices.cpus=1", *skipping)
    for name, value in one.weights.items():
        np.testing.assert_allclose(found.weights[name], value, rtol=0, atol=0.05 * 1e-2 * 10, err_msg=name)


@pytest.mark.parametrize(
    ("plan", "precision"), [("one process", "fp32"), ("one process", "fp16"), ("ddp", "fp32"), ("pipeline", "fp16")]
)
def test_what_was_left_out_is_counted_on_after_a_resume(
    launcher: Launcher, tmp_path: Path, plan: str, precision: str
) -> None:
    """It is not reported again."""
    job, folder = write_job(tmp_path, bad=float("inf")), tmp_path / "run"
    settings = (*PLANS[plan], f"train.precision={precision}", "train.on_nonfinite=skip", "checkpoint.every=8 steps")
    before = goes_on(launcher, job, folder, *settings, "train.steps=8")
    after = goes_on(launcher, job, folder, *settings, "checkpoint.resume=auto")
    assert before.lines[-1]["skipped"] > 0
    assert [line["skipped"] for line in after.lines[8:]] == [before.lines[-1]["skipped"]] * 2
    assert "left out" not in after.shown


def test_a_checkpoint_is_gone_on_from_whether_it_counts_what_is_left_out_or_not(
    launcher: Launcher, tmp_path: Path
) -> None:
    job, folder = write_job(tmp_path, bad=0), tmp_path / "run"
    every, again = "checkpoint.every=1 steps", "checkpoint.resume=auto"
    goes_on(launcher, job, folder, every, "train.steps=1", "train.on_nonfinite=skip")
    goes_on(launcher, job, folder, every, "train.steps=2", again, "train.precision=fp16")
    goes_on(launcher, job, folder, every, "train.steps=3", again, "train.precision=fp16", "train.on_nonfinite=skip")
    goes_on(launcher, job, folder, every, "train.steps=4", again, "train.on_nonfinite=skip")
    found = goes_on(launcher, job, folder, every, "train.steps=5", again)
    assert [line["step"] for line in found.lines] == [1, 2, 3, 4, 5]


def test_a_step_that_is_left_out_is_as_if_it_had_not_been(launcher: Launcher, tmp_path: Path) -> None:
    """The statistics of a batch norm, which the forward pass has spoilt, are restored; no other number changes."""
    norm = JOB.replace("relu(), linear(16)", "batch_norm(), relu(), linear(16)").replace("steps     = 10", "steps = 7")
    job = write_job(tmp_path, text=norm)
    found = goes_on(launcher, job, tmp_path / "run", "train.on_nonfinite=skip")
    shorter = goes_on(launcher, job, tmp_path / "shorter", "train.steps=6")
    for name, value in shorter.weights.items():
        if "num_batches" not in name:
            np.testing.assert_array_equal(found.weights[name], value, err_msg=name)


@pytest.mark.parametrize("plan", ["one process", "zero 3"])
def test_it_trains_on_where_it_is_told_to(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    job = write_job(tmp_path)
    found = goes_on(launcher, job, tmp_path / "run", *PLANS[plan], "train.on_nonfinite=continue")
    assert found.losses()[6:] == [None] * 4
    assert np.isnan(found.weights["0.weight"]).any()


OWN = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 16), torch.nn.Linear(16, 4)
        self.between = torch.nn.ReLU()

    def forward(self, x):
        return self.last(self.between(self.first(x)))

class Log(Net):
    def forward(self, x):
        y = self.first(x)
        return self.last(self.between(y / (x[:, 2:3] - BAD)))

def steep(output, target):
    loss = torch.nn.functional.cross_entropy(output, target, reduction="none")
    return loss + torch.sqrt(output.sum(1) - output.sum(1).detach())  # 0, whose root has an infinite slope

def infinite(output, target):
    return torch.nn.functional.cross_entropy(output, target, reduction="none") / 0

def constant(output, target):  # infinite for the fourth class, with the gradient of a cross entropy
    offset = torch.where(target == 3, torch.inf, 0.0)
    return torch.nn.functional.cross_entropy(output, target, reduction="none") + offset
"""


def write_own(folder: Path, net: str, loss: str = "cross_entropy()") -> Path:
    job = write_job(folder, bad=77.0, text=JOB.replace("[linear(16), relu(), linear(16), relu(), linear(4)]", net))
    job.write_text(job.read_text().replace("cross_entropy()", loss))
    (folder / "own.py").write_text(OWN.replace("BAD", "77.0"))
    return job


@pytest.mark.parametrize("plan", ["one process", "ddp", "zero 3"])
def test_a_fault_between_modules(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    job = write_own(tmp_path, 'python("own:Log")')
    _, message = end(launcher, job, tmp_path / "run", *PLANS[plan])
    assert "the loss of step 7 is nan" in message and "the batch" not in message
    assert "the first module whose output is not finite is `between` (ReLU)" in message
    assert "its input was already not finite: that comes from code between modules" in message
    assert "there is no checkpoint to resume from" in message


def test_a_loss_that_makes_it_of_finite_outputs(launcher: Launcher, tmp_path: Path) -> None:
    job = write_own(tmp_path, 'python("own:Net")', 'python("own:infinite")')
    _, message = end(launcher, job, tmp_path / "run", *PLANS["ddp"])
    assert "the loss of step 1 is infinite, on ranks 0 and 1" in message
    assert "the output of every module is finite: the loss turns it" in message


@pytest.mark.parametrize("plan", ["one process", "ddp", "zero 3", "pipeline"])
def test_a_step_is_left_out_whose_loss_alone_is_not_finite(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    job = write_own(tmp_path, "[linear(16), relu(), linear(4)]", 'python("own:constant")')
    samples = dict(np.load(tmp_path / "samples.npz"))
    samples["x"][BAD], samples["y"] = 0, samples["y"] % 3
    samples["y"][BAD] = 3
    np.savez(tmp_path / "samples.npz", **samples)
    found = goes_on(launcher, job, tmp_path / "run", *PLANS[plan], "train.on_nonfinite=skip")
    assert [line["skipped"] for line in found.lines] == [0] * 6 + [1] * 4


@pytest.mark.cases(2)
@pytest.mark.parametrize("plan", ["one process", "ddp", "zero 3"])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("train.steps=1",), "the loss of step 1 is finite, and its gradient is not"),
        (("train.clip=1.0",), "the loss of step 1 is finite, and its gradient is not"),
        (("checkpoint.every=1 step",), "the loss of step 1 is finite, and its gradient is not"),
        ((), "the parameters were not finite when it began: `first.weight`"),
    ],
)
def test_a_gradient_that_is_not_finite(
    launcher: Launcher, tmp_path: Path, plan: str, settings: tuple[str, ...], words: str
) -> None:
    job = write_own(tmp_path, 'python("own:Net")', 'python("own:steep")')
    _, message = end(launcher, job, tmp_path / "run", *PLANS[plan], *settings)
    assert words in message
    if settings:
        assert "the first parameter whose gradient is not finite, as the backward pass goes, is `last.bias`" in message
    assert not checkpoints_in(str(tmp_path / "run" / "checkpoints"))
    assert not (tmp_path / "run" / "weights.safetensors").exists()


@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_an_update_that_goes_too_far_is_not_saved(launcher: Launcher, tmp_path: Path, mode: str) -> None:
    job = write_job(tmp_path, bad=0, size=1000.0)
    settings = ("train.optimizer=sgd(lr = 3e38)", "train.steps=1", f"train.on_nonfinite={mode}")
    _, message = end(launcher, job, tmp_path / "run", *settings)
    assert "after step 1, whose loss is finite, what would be saved is not" in message
    assert "is `0.weight`" in message
    assert not (tmp_path / "run" / "weights.safetensors").exists()


def _train_elsewhere(rank: int, made: Ready, folder: str) -> tuple[str, int | None]:
    """Returns the end of a rank's training that is told to be on a node of its own."""
    program = replace(made.program, processes=1)
    mesh_of(program)
    splits, parts = open_source(program.data), assemble(program, torch.device("cpu"))
    try:
        board = RunControl(1, first=rank)
        positions = PositionReporter(program, rank, board, os.pipe()[0])
        runtime.train(program, made.places[rank], parts, splits, board, folder, positions)
    except NonFinite as found:
        return str(found), found.told
    return "", None


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "zero 3"])
def test_it_is_found_in_a_step_that_is_logged(tmp_path: Path, plan: str) -> None:
    """On GPUs and over several nodes. Where every step is, its update is not done yet."""
    job = write_job(tmp_path)
    (tmp_path / "logs").mkdir()
    every = gang(2, _train_elsewhere, ready(job, *PLANS[plan]), str(tmp_path))
    assert every[0][0] == every[1][0] and [told for _, told in every] == [False, True]
    assert "the loss of step 7 is nan, on rank 1" in every[0][0] and "is `0` (Linear), on rank 1" in every[0][0]
    fourth = gang(2, _train_elsewhere, ready(job, *PLANS[plan], "log.every=4 steps"), str(tmp_path))
    assert "the loss of step 7 is nan, on rank 1, found in step 8" in fourth[0][0]
    assert "by now the parameters are not finite: `0.weight`" in fourth[0][0]
    assert not (tmp_path / "weights.safetensors").exists()


@pytest.mark.parametrize("plan", ["one process", "ddp", "zero 3"])
def test_an_overflow_of_scaled_gradients_is_no_fault(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    """The first scale is too large for these gradients, and halved until it fits."""
    job = write_job(tmp_path, bad=0, text=JOB.replace("cross_entropy()", 'python("own:large")'))
    (tmp_path / "own.py").write_text(
        "import torch\ndef large(output, target):\n"
        "    return 100 * torch.nn.functional.cross_entropy(output, target, reduction='none')\n"
    )
    low = (*PLANS[plan], "train.precision=fp16", "checkpoint.every=2 steps")
    found = goes_on(launcher, job, tmp_path / "run", *low)
    assert found.losses()[0] == pytest.approx(found.losses()[1], rel=1.0)
    skipping = goes_on(launcher, job, tmp_path / "skip", *low, "train.on_nonfinite=skip")
    assert skipping.losses() == found.losses()
    assert skipping.lines[-1]["skipped"] > 0


@pytest.mark.slow
def test_the_command_ends_with_status_3_and_goes_on_afterwards(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    settings: Any = ("--out", tmp_path / "run", "--set", "checkpoint.every=3 steps")
    ended = dslc("run", job, *settings)
    assert ended.returncode == 3 and "the loss of step 7 is nan" in ended.stderr
    weights = tmp_path / "run" / "weights.safetensors"
    assert not weights.exists()
    again = dslc("run", job, *settings, "--set", "checkpoint.resume=auto", "--set", "train.on_nonfinite=skip")
    assert again.returncode == 0, again.stderr
    assert "1 in all" in again.stdout
    assert all(np.isfinite(value).all() for value in load_file(weights).values())
    assert [line["step"] for line in read_metrics(str(tmp_path / "run"))] == list(range(1, 11))
