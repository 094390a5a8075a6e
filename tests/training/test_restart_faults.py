"""Faults at any moment, one after another, in a training with `launch.restarts`: it ends as the undisturbed one.

A fault is a signal to a rank: its kind, the moment (as in test_kill.py: also while a checkpoint is written, or while
ranks are started again) and the rank are drawn.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.launcher import Launcher
from helpers.made_programs import places, tokens
from instruments.killer import Events, children, records
from test_faults import left_of
from test_kill import ENGINES, examine, job

from dslc.compiler.ir import program as p
from dslc.runtime.process.failure import describe
from dslc.runtime.process.records import read_metrics

STEPS, EACH = 60, 12  # faults in one training, at most
TIMEOUT = 6.0  # seconds: `launch.timeout`, for ranks that are stopped
SIGNALS = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "end": signal.SIGTERM, "stop": signal.SIGSTOP}
WEIGHTS = (5, 2, 2, 1)  # how often each is drawn


class Faults:
    """Faults that hit one training, one after another. `hit` says what, and whom."""

    def __init__(self, draw: random.Random, launcher: Launcher, folder: Path, most: int) -> None:
        self.hit: list[str] = []
        self._draw, self._server, self._most, self._folder = draw, launcher.process_id, most, folder
        self._events = Events(folder, folder / "checkpoints")
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        draw = self._draw
        while len(self.hit) < self._most and self._events.wait_for_drawn(draw):
            trainers = children(self._server)
            ranks = sorted(children(trainers[0])) if trainers else []
            if not ranks:
                continue
            (kind,), victim = draw.choices(list(SIGNALS), WEIGHTS), draw.choice(ranks)
            saving = any(name.endswith(".part") for name in os.listdir(self._folder / "checkpoints"))
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, SIGNALS[kind])
                self.hit.append(kind + ", saving" * saving)

    def end(self) -> None:
        """Waits until no process of the training is left, and so no port; the test's own time limit ends this."""
        self._events.stop()
        self._thread.join()
        self._events.close()
        for process in left_of(self._server):
            with contextlib.suppress(ProcessLookupError):
                ending = os.pidfd_open(process)
                select.select([ending], [], [])
                os.close(ending)


def made(data: p.DataStep, engine: str, asynchronous: bool) -> p.JobProgram:
    one = job(data, engine, asynchronous)
    rate = replace(one.learning_rate, steps=STEPS)
    kept = replace(one.checkpoint, every=5, resume="none")
    return replace(
        one, steps=STEPS, learning_rate=rate, checkpoint=kept, restarts=1000, timeout=TIMEOUT, evaluate_every=7
    )


def survive(launcher: Launcher, tmp_path: Path, count: int, seed: int) -> list[str]:
    """Trains until that many faults have been; returns them."""
    draw, data, hit = random.Random(seed), tokens(tmp_path), list[str]()
    whole = tmp_path / "whole"
    outcome, _ = launcher.launch(made(data, "one process", True), places(1), whole)
    wanted, restarts = read_metrics(str(whole)), 0
    while len(hit) < count:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "checkpoints").mkdir(parents=True)
        program = made(data, draw.choice(list(ENGINES)), draw.random() < 0.5)
        faults = Faults(draw, launcher, folder, min(EACH, count - len(hit)))
        try:
            outcome, shown = launcher.launch(program, places(program.world_size), folder)
        finally:
            faults.end()
        assert outcome is not None and outcome.is_complete, f"{describe(outcome)}\n{faults.hit}\n{shown}"
        assert outcome.restarts <= len(faults.hit), shown
        hit += faults.hit
        restarts += outcome.restarts
        examine(folder)
        found = read_metrics(str(folder))
        assert records(folder) == records(whole), "each step and each evaluation once, in order, of the same samples"
        for name in ("loss", "lr"):
            one, other = ([line.get(name, 0) for line in each] for each in (found, wanted))
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    print(f"{len(hit)} faults, {restarts} restarts", Counter(hit))
    return hit


def test_six_faults(launcher: Launcher, tmp_path: Path) -> None:
    assert len(survive(launcher, tmp_path, 6, seed=1)) == 6


@pytest.mark.long
def test_a_hundred_faults(launcher: Launcher, tmp_path: Path) -> None:
    hit = survive(launcher, tmp_path, 100, seed=0)
    assert set(SIGNALS) <= {what.partition(",")[0] for what in hit}
