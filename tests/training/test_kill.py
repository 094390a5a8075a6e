"""kill -9 at any moment, saving included: the training resumes from the newest whole checkpoint as if nothing had
happened.

A moment is the n-th event in the run directory, its checkpoints and the one that is being written (a line of
metrics.jsonl, a file created, written to, closed, renamed, removed; by inotify), and a few instructions more; n, the
instructions and the victim, a rank or the launcher, are drawn from a seed.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import shutil
import signal
import struct
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.launcher import Launcher
from helpers.made_programs import gpt_model, optimizer_step, places, program, tokens

from dslc.compiler.ir import program as p
from dslc.runtime.checkpoint import files
from dslc.runtime.process.failure import Outcome
from dslc.runtime.process.records import read_metrics

STEPS = 14
LIVES = 400  # more than any training needs
ENGINES = {
    "one process": (1, p.GradientStep(kind="none")),
    "ddp": (2, p.GradientStep(kind="ddp", static_graph=True)),
    "zero 1 on 4": (4, p.GradientStep(kind="zero1", static_graph=True)),
    "zero 3": (2, p.GradientStep(kind="fsdp", units=("2",), reshard=True)),
}


def job(data: p.DataStep, engine: str, asynchronous: bool) -> p.JobProgram:
    ranks, gradients = ENGINES[engine]
    return program(
        ranks,
        data,
        model=gpt_model(),
        sync_batch_norm=False,
        steps=STEPS,
        optimizer=optimizer_step("AdamW", lr=0.01, weight_decay=0.1),
        learning_rate=p.LearningRateStep(kind="cosine", steps=STEPS, warmup=3),
        gradients=gradients,
        evaluate_every=5,
        checkpoint=p.CheckpointStep(every=2, keep=2, asynchronous=asynchronous, resume="auto"),
    )


class Events:
    """Yields the events in some folders, one by one, without polling (Linux: inotify)."""

    _MASK = 0x2 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200  # modified, closed, moved from and to, created, removed
    _CREATED, _FOLDER = 0x100, 0x40000000
    _HEAD = struct.Struct("iIII")

    def __init__(self, *folders: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._events = self._libc.inotify_init1(os.O_CLOEXEC)
        assert self._events >= 0
        self._paths: dict[int, Path] = {}
        self._wake, self._end = os.pipe()
        for folder in folders:
            self._add(folder)

    def _add(self, folder: Path) -> None:
        number = self._libc.inotify_add_watch(self._events, os.fsencode(folder), self._MASK)
        if number >= 0:  # it may be gone already
            self._paths[number] = folder

    def _wait_for(self, count: int) -> bool:
        """Waits until that many events have been; returns False if `stop` was called before."""
        while True:
            ready, _, _ = select.select([self._events, self._wake], [], [])
            if self._wake in ready:
                return False
            content = os.read(self._events, 1 << 16)
            while content:
                number, mask, _, length = self._HEAD.unpack_from(content)
                name = content[self._HEAD.size : self._HEAD.size + length].rstrip(b"\0").decode()
                content = content[self._HEAD.size + length :]
                if mask & self._CREATED and mask & self._FOLDER and number in self._paths:
                    self._add(self._paths[number] / name)
                count -= 1
                if count <= 0:
                    return True

    def wait_for_drawn(self, draw: random.Random) -> bool:
        """Waits until a moment that `draw` determines; returns False if `stop` was called before."""
        if not self._wait_for(draw.randrange(1, 60)):
            return False
        for _ in range(draw.randrange(20_000)):
            pass
        return True

    def stop(self) -> None:
        os.write(self._end, b"x")

    def close(self) -> None:
        for each in (self._events, self._wake, self._end):
            os.close(each)


def children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it ended while we looked
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.name))
    return found


class Killer:
    """Kills one process of a training at a moment that `draw` determines. `killed` says which, "" if the training was
    faster.
    """

    def __init__(self, draw: random.Random, launcher: Launcher, folder: Path) -> None:
        self.killed = ""
        self._draw, self._server = draw, launcher.process_id
        self._checkpoints = folder / "checkpoints"
        self._events = Events(folder, self._checkpoints)
        self._watched: list[int] = []
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        draw = self._draw
        if not self._events.wait_for_drawn(draw):
            return
        (trainer,) = children(self._server)
        ranks = sorted(children(trainer))
        victim = draw.choice([*ranks, trainer])
        self._watched = [os.pidfd_open(process) for process in (trainer, *ranks)]
        self.killed = "the launcher" if victim == trainer else f"rank {ranks.index(victim)} of {len(ranks)}"
        if any(name.endswith(".part") for name in os.listdir(self._checkpoints)):
            self.killed += ", saving"
        os.kill(victim, signal.SIGKILL)

    def end(self) -> None:
        """Asserts that every process of the training is gone."""
        self._events.stop()
        self._thread.join()
        self._events.close()
        for watched in self._watched:
            select.select([watched], [], [])
            os.close(watched)


def live(launcher: Launcher, draw: random.Random, made: p.JobProgram, folder: Path) -> tuple[Outcome | None, str]:
    """Runs a training once; returns how it ended, and who was killed."""
    killer = Killer(draw, launcher, folder)
    try:
        outcome, _ = launcher.launch(made, places(made.world_size), folder)
    finally:
        killer.end()
    return outcome, killer.killed


def examine(folder: Path) -> None:
    """Asserts that every folder named like a checkpoint is whole."""
    for path in files.checkpoints_in(str(folder / "checkpoints")):
        found = files.look(path)
        assert found.manifest is not None, found.reason
        assert not files.damage(path, found.manifest)


def records(folder: Path) -> list[tuple[int, str, int]]:
    return [(line["step"], line["split"], line["samples"]) for line in read_metrics(str(folder))]


def kill(launcher: Launcher, tmp_path: Path, kills: int, seed: int) -> list[str]:
    """Trains repeatedly, with that many kills, until the last training is done; returns whom they hit."""
    draw, data, hit = random.Random(seed), tokens(tmp_path), list[str]()
    whole = tmp_path / "whole"
    launcher.launch(job(data, "one process", True), places(1), whole)
    wanted = read_metrics(str(whole))
    for training in range(kills):
        if len(hit) >= kills:
            break
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "checkpoints").mkdir(parents=True)
        for _ in range(LIVES):
            made = job(data, draw.choice(list(ENGINES)), asynchronous=training % 2 == 0)
            if len(hit) < kills:
                outcome, killed = live(launcher, draw, made, folder)
                hit += [killed] if killed else []
            else:
                outcome, _ = launcher.launch(made, places(made.world_size), folder)
            examine(folder)
            if outcome is not None and outcome.done:
                break
            assert killed, f"failed by itself: {outcome}"
        found = read_metrics(str(folder))
        assert records(folder) == records(whole), "each step and each evaluation once, in order, of the same samples"
        for name in ("loss", "lr"):
            np.testing.assert_allclose(
                [line.get(name, 0) for line in found], [line.get(name, 0) for line in wanted], rtol=0, atol=1e-5
            )
        assert len(files.checkpoints_in(str(folder / "checkpoints"))) == 2
        left = [name for name in os.listdir(folder / "checkpoints") if "." in name]
        assert not left, "what was left half written is cleared away"
    return hit


def test_five_kills(launcher: Launcher, tmp_path: Path) -> None:
    assert len(kill(launcher, tmp_path, 5, seed=3)) == 5


@pytest.mark.long
def test_a_hundred_kills(launcher: Launcher, tmp_path: Path) -> None:
    hit = kill(launcher, tmp_path, 100, seed=0)
    assert len(hit) == 100
    counts = Counter(hit)
    print(*(f"{count:3} {what}" for what, count in sorted(counts.items())), sep="\n")
    assert {"the launcher, saving", "rank 0 of 2, saving"} <= set(hit)
    assert sum(count for what, count in counts.items() if "saving" in what) >= 30
