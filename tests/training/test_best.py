"""Early stopping and the best checkpoint: the same on any number of ranks, and after a resume as in one piece."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import Trained, ready, train

from dslc.dsl.meaning.load import load
from dslc.runs.checkpoints import NoCheckpoint, select_weights
from dslc.runtime.checkpoint.files import BEST, STOPPING, Progress, look

# The loss falls, so that its highest value is that of the first evaluation, and the training ends after step 8.
JOB = job_text(
    model={"network": "mlp(widths = [8])"},
    data={"source": "digits()", "batch": 64, "validation": "20%"},
    train={"steps": 20, "early_stopping": "highest(loss, patience = 3)"},
    evaluate={"every": "2 steps", "metrics": "[accuracy]"},
    checkpoint={"every": "4 steps", "best": "highest(loss)", "keep": 1},
)
ONE, TWO = ("devices.cpus=1",), ("devices.cpus=2", "parallelism.zero=3")
REASON = "loss has not risen above 2.3"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    made = tmp_path / "made.plt"
    made.write_text(JOB)
    return made


def until(launcher: Launcher, job: Path, run: str, steps: int, *settings: str) -> Trained:
    made = ready(job, "checkpoint.resume=auto", *settings)
    return train(launcher, job.parent / run, made.program, made.places, steps=steps)


def evaluated(trained: Trained) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in trained.lines if line["split"] == "validation"]


def kept(folder: Path) -> tuple[list[str], str]:
    """Returns the checkpoints in a run, and what the link names."""
    there = folder / "checkpoints"
    return sorted(set(os.listdir(there)) - {BEST}), os.readlink(there / BEST)


def progress(folder: Path) -> dict[str, Progress]:
    manifest = look(str(folder / "checkpoints" / "step-00000008")).manifest
    assert manifest is not None
    return dict(manifest.goals)


def test_a_training_ends_early_and_keeps_the_best(launcher: Launcher, job: Path) -> None:
    whole = until(launcher, job, "whole", 20, *ONE)
    assert [step for step, _ in evaluated(whole)] == [2, 4, 6, 8] and len(whole.losses()) == 8
    assert "ended early, after 8 steps of 20" in whole.shown and REASON in whole.shown
    assert kept(whole.folder) == (["step-00000002", "step-00000008"], "step-00000002")
    found = progress(whole.folder)
    assert {(each.step, each.since) for each in found.values()} == {(2, 3)} and set(found) == {BEST, STOPPING}

    cut = until(launcher, job, "cut", 4, *TWO)
    assert "ended early" not in cut.shown
    assert kept(cut.folder) == (["step-00000002", "step-00000004"], "step-00000002")
    cut = until(launcher, job, "cut", 20, *ONE)
    assert "resumes after step 4" in cut.shown and "ended early, after 8 steps of 20" in cut.shown
    assert [step for step, _ in evaluated(cut)] == [2, 4, 6, 8]
    assert [loss for _, loss in evaluated(cut)] == pytest.approx([loss for _, loss in evaluated(whole)], abs=1e-5)
    assert kept(cut.folder) == kept(whole.folder)

    again = until(launcher, job, "cut", 20, *TWO)  # it has ended, and trains no more
    assert "resumes after step 8" in again.shown and "ended early, after 8 steps of 20" in again.shown
    assert len(again.losses()) == 8 and kept(again.folder) == kept(whole.folder)
    more = until(launcher, job, "cut", 10, *ONE, "train.early_stopping.patience=4")
    assert "ended early" not in more.shown and len(more.losses()) == 10


@pytest.mark.core
def test_a_rate_that_follows_the_evaluations(launcher: Launcher, job: Path) -> None:
    halved = "train.lr_schedule=plateau(loss, better = highest, patience = 0, factor = 0.5, warmup = 2 steps)"
    cut = until(launcher, job, "cut", 4, *TWO, halved)
    assert [line["lr"] for line in cut.lines if line["split"] == "train"] == [0.05, 0.1, 0.1, 0.1]
    whole, cut = (until(launcher, job, run, 20, *ONE, halved) for run in ("whole", "cut"))
    rates = [[line["lr"] for line in each.lines if line["split"] == "train"] for each in (whole, cut)]
    assert rates[0] == rates[1] == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.05, 0.05, 0.025, 0.025])


@pytest.mark.parametrize("plan", [ONE, TWO])
def test_a_training_ends_once_its_time_has_passed(launcher: Launcher, job: Path, plan: tuple[str, ...]) -> None:
    """It is evaluated and saved, as at its end; a resumed one has no more time."""
    made = until(launcher, job, "run", 20, *plan, "train.max_time=1us")
    assert "ended early, after 1 step of 20" in made.shown and "`max_time` has passed" in made.shown
    assert [step for step, _ in evaluated(made)] == [1] and kept(made.folder)[0] == ["step-00000001"]
    again = until(launcher, job, "run", 20, *plan, "train.max_time=1us")
    assert "resumes after step 1" in again.shown and "ended early, after 1 step of 20" in again.shown
    more = until(launcher, job, "run", 3, *plan, "train.max_time=1d")
    assert "ended early" not in more.shown and len(more.losses()) == 3


@pytest.mark.core
def test_the_link_follows_the_best_and_stays_with_its_goal(launcher: Launcher, job: Path) -> None:
    falling = ("checkpoint.best=lowest(loss)", "checkpoint.every=none", "train.early_stopping=none")
    made = until(launcher, job, "run", 6, *TWO, *falling)
    assert kept(made.folder) == (["step-00000006"], "step-00000006")
    link = made.folder / "checkpoints" / BEST
    loaded = load(str(job), [f'checkpoint.dir="{link.parent}"']).job
    assert loaded is not None
    for asked in (BEST, str(link)):
        taken = select_weights(loaded, asked)
        assert taken.manifest is not None and taken.manifest.step == 6
    until(launcher, job, "run", 7, *ONE, "checkpoint.best=none", "checkpoint.every=5 steps")
    assert not link.is_symlink()
    with pytest.raises(NoCheckpoint, match="no run of `made` has a best checkpoint"):
        select_weights(loaded, BEST)
