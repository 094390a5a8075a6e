"""What a step of a user's own draws follows from the sample: the curve of one process, on more ranks and sharded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, ready, train, train_job, write_job_with_helper

from dslc.compiler.ir.program import DrawStep
from dslc.compiler.ir.steps import OUTSIDE
from dslc.jobs.check_job import check_one

JOB = """
model {{ network = python("own_step_draws:{network}"), loss = own() }}
data  {{ source = python("own_step_draws:Clouds"), batch = 8 }}
devices {{ cpus = 1 }}
train {{ steps = 6, step = python("own_step_draws:{step}"), optimizer = sgd(lr = 0.05) }}
log   {{ every = 1 step }}
"""
TWO = "devices.cpus=2"


def job_of(folder: Path, step: str) -> Path:
    network = "Duel" if step == "duel" else "Denoiser"
    return write_job_with_helper("own_step_draws.py", folder, JOB.format(network=network, step=step))


@pytest.mark.parametrize(("step", "zero"), [("diffusion", "0"), ("duel", "3")])
def test_a_step_draws_what_one_process_draws(launcher: Launcher, tmp_path: Path, step: str, zero: str) -> None:
    job = job_of(tmp_path, step)
    assert "W0624" not in codes_of(job)
    agree(train_job(launcher, job), train_job(launcher, job, TWO, f"parallelism.zero={zero}"))


def codes_of(job: Path, *settings: str) -> dict[str, str]:
    return {
        each.code: f"{each.message}: {each.label}"
        for each in check_one(str(job), [TWO, *settings], trace=True)[0].found
    }


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (
            "mixup",
            "own_step_draws.py:70), which are others on each of 2 ranks than in one process: it orders the samples",
        ),
        pytest.param("halves", "is of a part of 2 samples", marks=pytest.mark.slow),
        ("by_numpy", "it draws from numpy's random numbers"),
        ("backwards", "draws other numbers for its samples than a pass over all"),
        ("contrastive", "no trial tells whether its rows go sample by sample"),
    ],
)
def test_draws_that_nothing_controls_are_warned_of_with_their_line(tmp_path: Path, step: str, text: str) -> None:
    codes = codes_of(job_of(tmp_path, step))
    assert text in codes["W0624"]
    assert ("W0625" in codes) == (step == "contrastive")


def line_of(folder: Path, mark: str) -> str:
    lines = (folder / "own_step_draws.py").read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}")]
    return f"own_step_draws.py:{line}"


def test_a_step_that_no_trial_has_seen_draws_by_shape_and_says_so(launcher: Launcher, tmp_path: Path) -> None:
    job = job_of(tmp_path, "untried")
    runs: list[Trained] = []
    for settings in ((), (TWO,)):
        made = ready(job, *settings)
        program = replace(made.program, draws=DrawStep(kinds=(OUTSIDE,), untried=True))
        folder = tmp_path / f"run{len(runs)}"
        folder.mkdir()
        runs.append(train(launcher, folder, program, made.places))
    agree(runs[0], runs[1])
    one, two = (run.shown for run in runs)
    assert "random numbers" not in one
    assert f"({line_of(tmp_path, 'another kernel')}), which are others on each of 2 ranks" in two
    assert "`poisson` draws in a kernel of torch's" in two
    assert two.count("that no trial has seen: in shapes with 4, the samples of this rank") == 1


def test_a_later_step_may_draw_more_and_a_shape_of_no_samples_is_told(launcher: Launcher, tmp_path: Path) -> None:
    job = job_of(tmp_path, "later")
    one, two = train_job(launcher, job), train_job(launcher, job, TWO)
    assert two.losses()[:3] == pytest.approx(one.losses()[:3], abs=1e-5)
    text = f"code outside of modules ({line_of(tmp_path, 'of no samples')}) draws numbers of shape (3, 1)"
    assert text in two.shown
