"""`train.check_replicas`: finds a copy of the parameters that differs in one bit, names its rank, and goes back to the
last checkpoint. It never reports equal copies.
"""

from __future__ import annotations

import random
import re
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.paths import HELPERS
from helpers.trained import Trained, ready

from dslc.runtime.measure.bit_equality import CopyDigests, divide_copies
from dslc.runtime.process.failure import Outcome, describe

JOB = job_text(
    model={"network": "[flatten(), linear(16), relu(), linear(10)]"},
    data={"source": "digits()", "batch": 48},
    devices={"cpus": 4},
    train={
        "steps": 12,
        "optimizer": "adamw(lr = 1e-2)",
        "check_replicas": "2 steps",
        "hooks": '[python("own_trouble:BitFlips", flips = FLIPS, ranks = all)]',
    },
    checkpoint={"every": "4 steps"},
    launch={"restarts": 3},
)
NAMES = ("1.weight", "1.bias", "3.weight", "3.bias")
PLANS = {
    "ddp": (),
    "zero 1": ("parallelism.zero=1",),
    "sharded replicas": ("parallelism.zero=3", "parallelism.replicas=2"),
    "data x pipeline": ("parallelism.pipeline=2", "parallelism.data=2", "parallelism.microbatches=2"),
}


def run(
    launcher: Launcher, folder: Path, flips: list[str], *settings: str, lasting: bool = False
) -> tuple[Outcome, str]:
    """Trains with these flips in `folder`/run; returns the outcome and what was shown."""
    folder.mkdir()
    shutil.copy(HELPERS / "own_trouble.py", folder)
    listed = ", ".join(f'"{flip}"' for flip in flips)
    job = folder / "job.plt"
    job.write_text(JOB.replace("FLIPS", f"[{listed}]" + ", lasting = true" * lasting))
    made = ready(job, *settings)
    return launcher.launch(made.program, made.places, folder / "run")


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    outcome, shown = run(launcher, folder, [])
    assert outcome.is_complete and outcome.restarts == 0, shown
    return Trained(folder / "run")


def assert_same(trained: Trained, undisturbed: Trained) -> None:
    """Asserts that two trainings have the same records, each once. A start of four ranks may sum in another order."""
    assert [line["step"] for line in trained.lines] == [line["step"] for line in undisturbed.lines]
    np.testing.assert_allclose(trained.losses(), undisturbed.losses(), rtol=0, atol=1e-5)


@pytest.mark.core
def test_a_flipped_bit_is_named_and_the_run_goes_back(launcher: Launcher, tmp_path: Path) -> None:
    outcome, shown = run(launcher, tmp_path / "job", ["2:6:2:37:3"])
    assert outcome.is_complete and outcome.restarts == 1, describe(outcome)
    host = socket.gethostname()
    assert "training failed on rank 2 at step 6" in shown
    assert (
        f"after step 6, `3.weight` on rank 2 (host {host}) is not the same as on the 3 other ranks that hold a copy: "
        "1 of 160 numbers differs in one bit, by up to "
    ) in shown
    assert "note: a single flipped bit is what a memory error or a faulty device leaves behind" in shown
    assert "note: restart 1 of 3, from the checkpoint of step 4" in shown


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_flipped_bit_is_found_under_each_plan(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    """Under a pipeline or a sharding a copy is on two ranks alone, which are both named."""
    outcome, shown = run(launcher, tmp_path / "job", ["1:6:0:37:3"], *PLANS[plan])
    assert outcome.is_complete and outcome.restarts == 1, describe(outcome)
    assert "after step 6, `1.weight`" in shown and "in one bit" in shown
    assert "rank 1 (host" in shown
    assert ("do not tell which is right" in shown) == (plan in ("sharded replicas", "data x pipeline"))
    assert "restart 1 of 3, from the checkpoint of step 4" in shown


@pytest.mark.slow
def test_a_difference_that_comes_again_ends_the_run(launcher: Launcher, tmp_path: Path) -> None:
    """As a hook does that always changes one rank."""
    outcome, _ = run(launcher, tmp_path / "job", ["1:6:0:0:3"], lasting=True)
    assert outcome.restarts == 1
    message = describe(outcome)
    assert "not restarted: the same exception ended the same step before" in message
    assert "a hook must not change it on one rank alone: `own_trouble:BitFlips`" in message


@pytest.mark.slow
def test_without_restarts_the_remedy_is_named(launcher: Launcher, tmp_path: Path) -> None:
    outcome, _ = run(launcher, tmp_path / "one", ["1:6:0:0:3"], "launch.restarts=0")
    message = describe(outcome)
    assert "step-00000004: `checkpoint.resume = auto` continues from it" in message and "`launch.restarts`" in message
    outcome, _ = run(launcher, tmp_path / "two", ["1:6:0:0:3"], "launch.restarts=0", "checkpoint.every=none")
    assert "there is no checkpoint to go back to: with `checkpoint.every`" in describe(outcome)


@pytest.mark.long
def test_thirty_flips_are_named_and_mended(launcher: Launcher, tmp_path: Path, undisturbed: Trained) -> None:
    """Drawn over rank, step, parameter, number and bit, in one training with thirty restarts."""
    drawn = random.Random(0)
    flips = [
        (drawn.randrange(4), drawn.randint(1, 12), drawn.randrange(4), drawn.randrange(1024), drawn.randrange(32))
        for _ in range(30)
    ]
    flips.sort(key=lambda flip: flip[1])  # a training that goes back meets the later ones again
    words = [":".join(map(str, flip)) for flip in flips]
    outcome, shown = run(launcher, tmp_path / "job", words, "launch.restarts=30", "train.check_replicas=1 step")
    assert outcome.is_complete and outcome.restarts == 30, describe(outcome)
    named = re.findall(r"after step (\d+), `(\S+)` on rank (\d) \(host", shown)
    assert named == [(str(step), NAMES[parameter], str(rank)) for rank, step, parameter, _, _ in flips]
    assert_same(Trained(tmp_path / "job" / "run"), undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
def test_a_thousand_comparisons_of_equal_copies_report_nothing(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    length = ("train.steps=1000", "log.every=1000 steps")
    settings = (*length, "train.check_replicas=1 step", "launch.restarts=0", "checkpoint.every=none")
    outcome, shown = run(launcher, tmp_path / "job", [], *settings, *PLANS[plan])
    assert outcome.is_complete and outcome.steps == 1000, shown


def copies(*digests: int) -> list[CopyDigests]:
    return [
        CopyDigests(rank=rank, host="a", of_all=number, by_parameter=(number,)) for rank, number in enumerate(digests)
    ]


@pytest.mark.parametrize(
    ("digests", "reference", "wrong"),
    [
        ((1, 1, 2), 0, [2]),
        ((2, 1, 1, 1), 1, [0]),
        ((1, 2), 0, []),
        ((1, 1, 2, 2), 0, []),
        ((1, 2, 3), 0, []),
        ((1, 2, 1, 3, 1), 0, [1, 3]),
    ],
)
def test_the_majority_of_three_or_more_is_right(digests: tuple[int, ...], reference: int, wrong: list[int]) -> None:
    right, others = divide_copies(copies(*digests))
    assert right.rank == reference and [copy.rank for copy in others] == wrong
