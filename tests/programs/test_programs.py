"""Programs of the kind people have, each as a plain torch loop and as a job: the same training, step by step.

Each folder has a module, with the loop as its function `plain`, and a job, which names parts of the module.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import dslc
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, train_job

HERE = Path(__file__).parent
STEPS, SAVED = 12, 5
PROGRAMS = sorted(folder.name for folder in HERE.iterdir() if (folder / f"{folder.name}.plt").exists())
SETTINGS = ("log.every=1 steps", f"train.steps={STEPS}")
# What is tried on two ranks, in turn.
PLANS = [
    ("parallelism.zero=0", "parallelism.microbatches=2"),
    ("parallelism.zero=1",),
    ("parallelism.zero=2",),
    ("parallelism.zero=3", "parallelism.microbatches=2"),
]
# The gradient of the bias of attention's keys is 0 but for rounding, by which Adam divides.
ATTENDING = ("tagging", "translation")
STEPPING = ("gan",)  # whose steps are their own, and take no micro-batches

Run = Callable[..., Trained]
Loop = Callable[[str], list[float]]


@pytest.fixture
def run(launcher: Launcher, tmp_path: Path) -> Run:
    def run(program: str, *settings: str) -> Trained:
        folder = tmp_path / program
        if not folder.exists():
            shutil.copytree(HERE / program, folder, ignore=shutil.ignore_patterns("__pycache__"))
        return train_job(launcher, folder / f"{program}.plt", *SETTINGS, *settings)

    return run


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    """Yields the function that returns the losses of a program's plain loop."""

    def losses(program: str) -> list[float]:
        monkeypatch.syspath_prepend(HERE / program)
        found: list[float] = importlib.import_module(program).plain(STEPS)
        return found

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield losses
    torch.set_num_threads(threads)


def _taken(program: str, plan: tuple[str, ...]) -> tuple[str, ...]:
    return plan[:1] if program in STEPPING else plan


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_job_trains_as_the_plain_loop_does(run: Run, loop: Loop, program: str) -> None:
    saving = run(program, f"checkpoint.every={SAVED} steps", "checkpoint.keep=9")
    np.testing.assert_allclose(saving.losses(), loop(program), rtol=1e-5, atol=1e-5)
    plan = PLANS[PROGRAMS.index(program) % len(PLANS)]
    agree(
        saving, run(program, "devices.cpus=2", *_taken(program, plan)), weights=None if program in ATTENDING else 1e-5
    )
    resumed = run(program, f'checkpoint.resume="{saving.folder}/checkpoints/step-{SAVED:08d}"')
    assert resumed.losses() == saving.losses()[SAVED:]


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan[0][-1])
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_under_each_sharding(run: Run, program: str, plan: tuple[str, ...]) -> None:
    agree(
        run(program),
        run(program, "devices.cpus=4", *_taken(program, plan)),
        weights=None if program in ATTENDING else 1e-5,
    )


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_holds_the_invariants(program: str) -> None:
    job = HERE / program / f"{program}.plt"
    run = dslc("verify", job, "--steps", "3", "--set", "devices.cpus=2", cwd=job.parent)
    assert run.returncode == 0 and "the plan trains as one process does" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_short(program: str) -> None:
    assert len((HERE / program / f"{program}.py").read_text().splitlines()) < 100
    assert len((HERE / program / f"{program}.plt").read_text().splitlines()) < 25
