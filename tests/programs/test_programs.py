"""Programs of the kind people have, each as a plain torch loop and as a job: the same training, step by step.

Each folder has a module, with the loop as its function `plain`, and a job, which names parts of the module.
"""

from __future__ import annotations

import importlib
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.commands import dslc
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, ready, train, train_job
from instruments.killer import live, records

from dslc.runtime.checkpoint.files import checkpoints_in

HERE = Path(__file__).parent
STEPS, SAVED = 12, 5
LIVES = 50  # more than any program needs
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
ATTENDING = ("gpt", "tagging", "translation")
LONG = (
    "citation",
    "contrast",
    "lora",  # as in tests/training/test_adapters.py
    "qlora",  # as in tests/training/test_quantized_weights.py
    "reinforce",
    "segmentation",  # as in tests/training/test_class_maps.py
    "siamese",
    "tagging",  # as in tests/training/test_own_parts.py
    "unet",
    "vae",
    "vit",
    "wordmodel",
)  # whose training is compared in the long tests alone
STEPPING = ("gan", "reinforce")  # whose steps are their own, and take no micro-batches
TWO = "devices.cpus=2"
# Under which plans each is killed, () on one process; those of `QUICK` in the shortest tests too.
KILLED = [(program, plan) for program in PROGRAMS for plan in ((), *PLANS)]
QUICK = [("gpt", PLANS[3]), ("gan", ())]

Run = Callable[..., Trained]
Loop = Callable[[str], list[float]]


@pytest.fixture
def run(launcher: Launcher, tmp_path: Path) -> Run:
    def run(program: str, *settings: str) -> Trained:
        return train_job(launcher, laid_out(program, tmp_path), *SETTINGS, *settings)

    return run


def laid_out(program: str, folder: Path) -> Path:
    """Copies a program, with the files that it makes for itself, and returns its job there."""
    prepare(program)
    if not (folder / program).exists():
        shutil.copytree(HERE / program, folder / program, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / program / f"{program}.plt"


def prepare(program: str) -> Any:
    """Lets a program make the files that it begins from; returns its module."""
    if str(HERE / program) not in sys.path:
        sys.path.insert(0, str(HERE / program))
    module = importlib.import_module(program)
    if hasattr(module, "prepare"):
        module.prepare()
    return module


@pytest.fixture
def loop() -> Iterator[Loop]:
    """Yields the function that returns the losses of a program's plain loop."""

    def losses(program: str) -> list[float]:
        found: list[float] = prepare(program).plain(STEPS)
        return found

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield losses
    torch.set_num_threads(threads)


def _taken(program: str, plan: tuple[str, ...]) -> tuple[str, ...]:
    return plan[:1] if program in STEPPING else plan


@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in PROGRAMS]
)
def test_a_job_trains_as_the_plain_loop_does(run: Run, loop: Loop, program: str) -> None:
    """In one process, and from its checkpoint on in two."""
    saving = run(program, f"checkpoint.every={SAVED} steps", "checkpoint.keep=9")
    np.testing.assert_allclose(saving.losses(), loop(program), rtol=1e-5, atol=1e-5)
    plan = _taken(program, PLANS[PROGRAMS.index(program) % len(PLANS)])
    found = run(program, TWO, *plan, f'checkpoint.resume="{saving.folder}/checkpoints/step-{SAVED:08d}"')
    saving.lines = [line for line in saving.lines if line["step"] > SAVED]
    agree(saving, found, weights=None if program in ATTENDING else 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan[0][-1])
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_under_each_sharding(run: Run, program: str, plan: tuple[str, ...]) -> None:
    agree(
        run(program),
        run(program, "devices.cpus=4", *_taken(program, plan)),
        weights=None if program in ATTENDING else 1e-5,
    )


@pytest.mark.parametrize(
    ("program", "plan"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.long) for each in KILLED],
    ids=lambda part: part if isinstance(part, str) else " ".join(part) or "alone",
)
def test_a_program_that_is_killed_goes_on_as_if_it_were_not(
    launcher: Launcher, tmp_path: Path, program: str, plan: tuple[str, ...]
) -> None:
    """A process is killed once there is a checkpoint, and the curve and the weights are the same to the bit."""
    saving = ("checkpoint.every=2 steps", "checkpoint.resume=auto")
    settings = (TWO, *_taken(program, plan)) if plan else ()
    made = ready(laid_out(program, tmp_path), *SETTINGS, *saving, *settings)
    whole = train(launcher, tmp_path / "whole", made.program, made.places)
    for seed in range(LIVES):
        folder = tmp_path / f"killed{seed}"
        saved = folder / "checkpoints"
        saved.mkdir(parents=True)
        outcome, killed = live(
            launcher, random.Random(seed), made.program, folder, made.places, partial(checkpoints_in, str(saved))
        )
        if outcome is not None and outcome.is_complete:
            continue  # it was faster
        assert killed, f"failed by itself: {outcome}"
        broken = train(launcher, folder, made.program, made.places)
        assert records(folder) == records(whole.folder)
        assert broken.losses() == whole.losses()
        for name, value in whole.weights.items():
            np.testing.assert_array_equal(broken.weights[name], value, err_msg=name)
        return
    pytest.fail(f"none of {LIVES} trainings was hit")


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_holds_the_invariants(program: str) -> None:
    prepare(program)
    job = HERE / program / f"{program}.plt"
    run = dslc("verify", job, "--steps", "3", "--set", "devices.cpus=2", cwd=job.parent)
    assert run.returncode == 0 and "the plan trains as one process does" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_short(program: str) -> None:
    assert len((HERE / program / f"{program}.py").read_text().splitlines()) < 100
    assert len((HERE / program / f"{program}.plt").read_text().splitlines()) < 25
