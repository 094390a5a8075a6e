"""`train.on_spike`: finds a planted bad batch by its loss. The training goes back and skips it under any plan, ends, or
notes it. The samples are listed, and a resume on other ranks skips the same batches.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import Trained, ready

from dslc.compiler.ir.program import SpikeStep
from dslc.runtime.checkpoint.files import checkpoints_in
from dslc.runtime.loop.loss_spikes import find_spike, read_spikes
from dslc.runtime.process.failure import Outcome, describe

BATCH, STEPS, BAD = 8, 40, 26  # the step with the bad batch
JOB = job_text(
    model={"network": "[linear(16), relu(), linear(4)]"},
    data={"source": 'arrays("samples.npz")', "batch": BATCH, "shuffle": "false"},
    train={
        "steps": STEPS,
        "optimizer": "sgd(lr = 0.05)",
        "on_spike": "rewind(steps = 10, skip = 2 batches, window = 12)",
    },
    checkpoint={"every": "5 steps", "keep": 1},
)
PLANS = {
    "one process": ("devices.cpus=1",),
    "four ranks": ("devices.cpus=4",),
    "zero 3": ("devices.cpus=2", "parallelism.zero=3"),
    "pipeline": ("devices.cpus=2", "parallelism.pipeline=2", "parallelism.data=1", "parallelism.microbatches=2"),
}
SAMPLES = list(range((BAD - 2) * BATCH, BAD * BATCH))  # of the two batches up to the spike


def write_job(folder: Path, bad_steps: tuple[int, ...] = (BAD,)) -> Path:
    """Writes a job over samples in order, whose batches of some steps have large inputs and wrong labels."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, BATCH * STEPS)
    inputs = (random.normal(size=(len(labels), 6)) + 3 * np.eye(4, 6)[labels]).astype(np.float32)
    for step in bad_steps:
        batch = slice((step - 1) * BATCH, step * BATCH)
        inputs[batch] *= 30
        labels[batch] = (labels[batch] + 1) % 4
    np.savez(folder / "samples.npz", x=inputs, y=labels)
    job = folder / "job.plt"
    job.write_text(JOB)
    return job


def run(launcher: Launcher, job: Path, folder: Path, *settings: str) -> tuple[Outcome, str]:
    made = ready(job, *settings)
    return launcher.launch(made.program, made.places, folder)


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in Trained(folder).lines]


def skipped_samples(folder: Path) -> list[int]:
    spikes: list[dict[str, Any]] = json.loads((folder / "skipped_batches.json").read_text())["spikes"]
    return [number for spike in spikes for numbers in spike["samples"].values() for number in numbers]


@pytest.mark.core
@pytest.mark.parametrize("plan", list(PLANS)[1:])
def test_the_training_goes_back_and_skips_the_same_batches_on_any_plan(
    launcher: Launcher, tmp_path: Path, plan: str
) -> None:
    job = write_job(tmp_path)
    for name in ("one process", plan):
        outcome, shown = run(launcher, job, tmp_path / name, *PLANS[name])
        assert outcome.is_complete and outcome.restarts == 0, describe(outcome)
        assert f"the loss of step {BAD} is " in shown and "a spike: the mean of the losses before it is" in shown
        assert "the training goes back to step 16 or before, and skips the batches of steps 25 to 26" in shown
        assert "note: the batch of step 26 has the samples 200, 201, 202" in shown
        assert "note: rewind 1 of 3" in shown and "resumes after step 15, from " in shown
        assert steps_of(tmp_path / name) == [*range(1, BAD - 1), *range(BAD + 1, STEPS + 1)]
        assert skipped_samples(tmp_path / name) == SAMPLES
    one, other = (Trained(tmp_path / name).losses() for name in ("one process", plan))
    np.testing.assert_allclose(other, one, rtol=0, atol=1e-5)
    assert np.mean(one[BAD:]) < np.mean(one[BAD - 12 : BAD - 2])  # the curve returns


@pytest.mark.slow
def test_a_resume_on_other_ranks_skips_the_same_batches(launcher: Launcher, tmp_path: Path) -> None:
    """Of the checkpoint alone, in another run directory, before the spike and after it."""
    job = write_job(tmp_path)
    run(launcher, job, tmp_path / "one", *PLANS["one process"])
    outcome, shown = run(launcher, job, tmp_path / "two", *PLANS["one process"], "train.steps=24")
    assert outcome.is_complete and "spike" not in shown
    again = (*PLANS["four ranks"], "checkpoint.resume=auto")
    outcome, shown = run(launcher, job, tmp_path / "two", *again)
    assert outcome.is_complete and "resumes after step 24" in shown and "resumes after step 15" in shown
    np.testing.assert_allclose(Trained(tmp_path / "two").losses(), Trained(tmp_path / "one").losses(), atol=1e-5)
    # The first run went back to step 15, and its next checkpoints have the list.
    rewound = write_job(tmp_path, bad_steps=(BAD, 38))
    outcome, shown = run(launcher, rewound, tmp_path / "three", *PLANS["one process"])
    assert outcome.is_complete and "rewind 2 of 3" in shown
    assert skipped_samples(tmp_path / "three") == [*SAMPLES, *range(36 * BATCH, 38 * BATCH)]
    newest = checkpoints_in(str(tmp_path / "three" / "checkpoints"))[1]
    resume = f'checkpoint.resume="{newest}"'
    outcome, shown = run(launcher, rewound, tmp_path / "four", *PLANS["four ranks"], resume)
    assert outcome.is_complete and "spike" not in shown
    assert not {36, 37} <= set(steps_of(tmp_path / "four"))
    np.testing.assert_allclose(
        Trained(tmp_path / "four").losses()[-2:], Trained(tmp_path / "three").losses()[-2:], atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(("action", "completes"), [("stop", False), ("note", True)])
def test_a_spike_ends_the_training_or_is_noted(
    launcher: Launcher, tmp_path: Path, action: str, completes: bool
) -> None:
    job = write_job(tmp_path)
    settings = (*PLANS["four ranks"], f"train.on_spike={action}(window = 12)", "launch.restarts=2")
    outcome, shown = run(launcher, job, tmp_path / "run", *settings)
    assert outcome.is_complete == completes and outcome.restarts == 0, shown
    text = shown if completes else describe(outcome)
    assert f"the loss of step {BAD} is " in text and "200, 201, 202, 203, 204, 205, 206, 207" in text
    if not completes:
        assert "the last checkpoint is " in text and "step-00000025" in text


@pytest.mark.slow
def test_rewinds_are_bounded(launcher: Launcher, tmp_path: Path) -> None:
    job = write_job(tmp_path, bad_steps=(20, 26))
    settings = (*PLANS["one process"], "train.on_spike.times=1")
    outcome, _ = run(launcher, job, tmp_path / "run", *settings)
    message = describe(outcome)
    assert not outcome.is_complete and "1 rewind is the most that `train.on_spike` allows" in message


@pytest.mark.parametrize(
    ("losses", "loss", "is_spike"),
    [
        ([1.0, 1.1, 0.9, 1.0], 1.3, False),
        ([1.0, 1.1, 0.9, 1.0], 1.6, True),
        ([1.0, 1.1, 0.9], 9.0, False),
        ([1.0, 1.0, 1.0, 1.0], 1.005, False),
        ([1.0, 1.0, 1.0, 1.0], 1.02, True),
        ([1.0, 1.1, 0.9, 1.0], 0.1, False),
    ],
)
def test_a_spike_is_far_above_the_mean_of_a_full_window(losses: list[float], loss: float, is_spike: bool) -> None:
    how = SpikeStep(action="note", window=4, deviations=6.0)
    assert (find_spike(5, loss, losses, how) is not None) == is_spike


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"spikes": 1}', '{"spikes": [{}], "rewind_to": null}', "\\x00"])
def test_a_list_of_another_program_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "skipped_batches.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"skipped_batches\.json does not list skipped batches"):
        read_spikes(str(file))
