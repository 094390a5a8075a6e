"""Faults of every kind at any moment: each ends the training with its cause named, or the training continues to the
same curve; nothing hangs, and nothing is left.

A fault is drawn from a seed: its kind, the moment (as in test_kill.py) and whom it hits.

    kill            SIGKILL to a rank or to the launcher
    stop            SIGSTOP to a rank, or to all of them
    term            SIGTERM to a rank, or to the launcher, for which it is a request to stop
    full disk       nothing more fits onto the disk of the run directory
    removed folder  the run directory is removed
    damaged file    a process is killed, and a file of the newest checkpoint is changed, cut off or removed
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
from helpers.small_disk import fill, small_disk
from instruments.killer import Events, children, records
from test_kill import ENGINES, LIVES, job

from dslc.runtime.checkpoint import files
from dslc.runtime.process.failure import Outcome, describe
from dslc.runtime.process.records import read_metrics

KINDS = ("kill", "stop", "term", "full disk", "removed folder", "damaged file")
PAUSE = 12.0  # seconds: `launch.timeout` of a training in which ranks are stopped
SIGNALS = {"kill": signal.SIGKILL, "damaged file": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


class Fault:
    """One fault, which hits a training at its moment. `hit` says whom, "" if the training was faster."""

    def __init__(self, draw: random.Random, kind: str, launcher: Launcher, folder: Path) -> None:
        self.kind, self.hit = kind, ""
        self._draw, self._server, self._folder = draw, launcher.process_id, folder
        self._events = Events(folder, folder / "checkpoints")
        self._watched: list[int] = []
        self._ports: set[str] = set()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        if not self._events.wait_for_drawn(self._draw):
            return
        trainers = children(self._server)
        ranks = sorted(children(trainers[0])) if trainers else []
        if not ranks:
            return
        self._watched = [os.pidfd_open(process) for process in (*trainers, *ranks)]
        self._ports = {port for process in (*trainers, *ranks) for port in listening(process)}
        if self.kind == "full disk":
            fill(self._folder.parent)
            self.hit = "the disk"
        elif self.kind == "removed folder":
            self.hit = "the folder"
            while self._folder.exists():
                shutil.rmtree(self._folder, ignore_errors=True)
        else:
            self._signal(ranks, trainers[0])

    def _signal(self, ranks: list[int], trainer: int) -> None:
        number, others = SIGNALS[self.kind], "all ranks" if self.kind == "stop" else "the launcher"
        who = self._draw.randrange(len(ranks) + 1)
        victims = [ranks[who]] if who < len(ranks) else ranks if self.kind == "stop" else [trainer]
        self.hit = f"rank {who}" if who < len(ranks) else others
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, number)

    def end(self) -> None:
        """Asserts that every process of the training is gone, and so are the ports at which they listened."""
        self._events.stop()
        self._thread.join()
        self._events.close()
        for watched in self._watched:
            select.select([watched], [], [])
            os.close(watched)
        while self.hit and (left := left_of(self._server)):
            for process in left:  # a rank that was forked since; the test's own time limit ends this
                with contextlib.suppress(ProcessLookupError):
                    ending = os.pidfd_open(process)
                    select.select([ending], [], [])
                    os.close(ending)
        assert not self._ports & sockets()


def sockets() -> set[str]:
    """Returns the listening sockets of this machine."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            lines = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            found |= {f"socket:[{line[9]}]" for line in lines if line[3] == "0A"}
    return found


def listening(process: int) -> set[str]:
    """Returns the listening sockets of a process."""
    open_files = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                open_files.add(os.readlink(f"/proc/{process}/fd/{name}"))
    return open_files & sockets()


def left_of(session: int) -> list[int]:
    """Returns the processes of a session, except its leader."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != session:
            with contextlib.suppress(OSError):
                state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(of) == session and state != "Z":
                    found.append(int(entry.name))
    return found


def ending(fault: Fault, outcome: Outcome | None) -> str:
    """Returns the end of a training with the fault. Raises AssertionError for a wrong one."""
    if outcome is None:
        assert fault.hit == "the launcher" and fault.kind in ("kill", "damaged file"), fault.hit
        return "the launcher is gone"
    if outcome.failure is None:
        assert outcome.is_complete or fault.hit == "the launcher", describe(outcome)
        return "done all the same" if outcome.is_complete else "stopped between two steps"
    said, about = describe(outcome), f"{fault.kind}, {fault.hit}"
    number, rank = fault.hit.removeprefix("rank "), outcome.failure.rank
    if fault.kind == "full disk":
        assert "no space is left" in said or "No space left" in said, f"{about}: {said}"
    elif fault.kind == "removed folder":
        assert "was removed while the training ran" in said, f"{about}: {said}"
    elif fault.kind == "stop":
        assert "the process is stopped" in said and fault.hit in (f"rank {rank}", "all ranks"), f"{about}: {said}"
    else:
        name = SIGNALS[fault.kind].name
        assert f"was ended by {name}" in said and number == str(rank), f"{about}: {said}"
    assert len(said) < 4000 and "Traceback" not in said
    return "the cause is named"


def examine(folder: Path, damaged: set[str]) -> None:
    """Asserts that every folder named like a checkpoint is whole, except those that were damaged here."""
    for path in files.checkpoints_in(str(folder / "checkpoints")):
        found = files.look(path)
        assert path in damaged or (found.manifest and not files.damage(path, found.manifest)), found


def damage(draw: random.Random, folder: Path) -> set[str]:
    """Damages a file of the newest checkpoint; returns the checkpoint's path, none if there is no checkpoint."""
    kept = files.checkpoints_in(str(folder / "checkpoints"))
    if not kept:
        return set()
    path = Path(kept[0], draw.choice(sorted(os.listdir(kept[0]))))
    how = draw.choice(("changed", "cut off", "removed"))
    content = bytearray(path.read_bytes())
    if how == "removed" or not content:
        path.unlink()
    elif how == "cut off":
        path.write_bytes(content[: draw.randrange(len(content))])
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    return {kept[0]}


def prepare(folder: Path) -> None:
    """Prepares a run directory whose events can be watched, with space for it."""
    (folder.parent / "filling").unlink(missing_ok=True)
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)


def faults(launcher: Launcher, tmp_path: Path, count: int, seed: int) -> list[str]:
    """Trains repeatedly under so many faults, each training to its end; returns the faults and how the trainings
    ended.
    """
    draw, data, seen = random.Random(seed), tokens(tmp_path), list[str]()
    whole, folder, damaged = tmp_path / "whole", tmp_path / "disk" / "run", set[str]()
    launcher.launch(job(data, "one process", True), places(1), whole)
    kinds = [KINDS[number % len(KINDS)] for number in range(count)]
    draw.shuffle(kinds)
    while len(seen) < count:
        shutil.rmtree(folder, ignore_errors=True)
        damaged.clear()
        for _ in range(LIVES):
            prepare(folder)
            made = job(data, draw.choice(list(ENGINES)), asynchronous=draw.random() < 0.5)
            fault = None
            if len(seen) < count:
                kind = kinds[len(seen)]
                made = replace(made, timeout=PAUSE if kind == "stop" else made.timeout)
                fault = Fault(draw, kind, launcher, folder)
            try:
                outcome, _ = launcher.launch(made, places(made.world_size), folder)
            finally:
                if fault is not None:
                    fault.end()
            examine(folder, damaged)
            if fault is not None and fault.hit:
                seen.append(f"{fault.kind:14} {fault.hit:12} {ending(fault, outcome)}")
                print(len(seen), seen[-1], flush=True)
            removed = fault is not None and fault.kind == "removed folder" and bool(fault.hit)
            if outcome is not None and outcome.is_complete and not removed:
                break
            assert fault is not None and fault.hit, f"failed by itself: {outcome}"
            if fault.kind == "damaged file":
                damaged |= damage(draw, folder)
            elif removed:  # a checkpoint on its way may have been written into a new one
                shutil.rmtree(folder, ignore_errors=True)
        compare(folder, whole)
    return seen


def compare(folder: Path, whole: Path) -> None:
    """Asserts equal curves: each step and each evaluation once, in order, of the same samples."""
    found, wanted = read_metrics(str(folder)), read_metrics(str(whole))
    assert records(folder) == records(whole)
    for name in ("loss", "lr"):
        np.testing.assert_allclose(
            [line.get(name, 0) for line in found], [line.get(name, 0) for line in wanted], rtol=0, atol=1e-5
        )


def test_a_fault_of_each_kind(launcher: Launcher, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m"):
        assert len(faults(launcher, tmp_path, len(KINDS), seed=1)) == len(KINDS)


@pytest.mark.long
def test_a_hundred_faults(launcher: Launcher, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m"):
        seen = faults(launcher, tmp_path, 100, seed=0)
    counts = Counter((line[:14].strip(), line[28:]) for line in seen)
    print(*(f"{number:3} {kind}: {how}" for (kind, how), number in sorted(counts.items())), sep="\n")
    assert len(seen) == 100 and {kind for kind, _ in counts} == set(KINDS)
