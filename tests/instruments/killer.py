"""kill -9 to a process of a training, at a moment that a seed determines.

A moment is the n-th event in the run directory, its checkpoints and the one that is being written (a line of
metrics.jsonl, a file created, written to, closed, renamed, removed; by inotify), and a few instructions more; n, the
instructions and the victim, a rank or the launcher, are drawn.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import struct
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from helpers.launcher import Launcher
from helpers.made_programs import places

from dslc.compiler.ir import program as p
from dslc.runtime.process.failure import Outcome
from dslc.runtime.process.records import read_metrics


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
        self.ends: Collection[int] = ()  # descriptors: there is nothing to wait for when one of them is readable
        for folder in folders:
            self._add(folder)

    def _add(self, folder: Path) -> None:
        number = self._libc.inotify_add_watch(self._events, os.fsencode(folder), self._MASK)
        if number >= 0:  # it may be gone already
            self._paths[number] = folder

    def _read_events(self) -> list[str] | None:
        """Returns the names of the files of the next events; None if `stop` was called, or at one of the `ends`."""
        ready, _, _ = select.select([self._events, self._wake, *self.ends], [], [])
        if ready != [self._events]:
            return None
        found, content = [], os.read(self._events, 1 << 16)
        while content:
            number, mask, _, length = self._HEAD.unpack_from(content)
            name = content[self._HEAD.size : self._HEAD.size + length].rstrip(b"\0").decode()
            content = content[self._HEAD.size + length :]
            if mask & self._CREATED and mask & self._FOLDER and number in self._paths:
                self._add(self._paths[number] / name)
            found.append(name)
        return found

    def wait_for_names(self, fits: Callable[[str], bool], count: int = 1) -> bool:
        """Waits for that many events of files whose names fit; returns False if there is nothing to wait for."""
        while count > 0:
            names = self._read_events()
            if names is None:
                return False
            count -= sum(map(fits, names))
        return True

    def _wait_for(self, count: int) -> bool:
        """Waits until that many events have been; returns False if `stop` was called before."""
        return self.wait_for_names(lambda name: True, count)

    def wait_for_drawn(self, draw: random.Random, after: Callable[[], object] | None = None) -> bool:
        """Waits until a moment that `draw` determines, a few events after `after` has become true if it is given;
        returns False if `stop` was called before.
        """
        while after is not None and not after():
            if not self._wait_for(1):
                return False
        if not self._wait_for(draw.randrange(1, 60 if after is None else 12)):
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

    def __init__(
        self, draw: random.Random, launcher: Launcher, folder: Path, after: Callable[[], object] | None = None
    ) -> None:
        self.killed = ""
        self._draw, self._server, self._after = draw, launcher.process_id, after
        self._checkpoints = folder / "checkpoints"
        self._events = Events(folder, self._checkpoints)
        self._watched: list[int] = []
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        draw = self._draw
        if not self._events.wait_for_drawn(draw, self._after):
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


def live(
    launcher: Launcher,
    draw: random.Random,
    made: p.JobProgram,
    folder: Path,
    placed: tuple[p.RankPlace, ...] | None = None,
    after: Callable[[], object] | None = None,
) -> tuple[Outcome | None, str]:
    """Runs a training once; returns how it ended, and who was killed. Without `placed` the ranks are of a data axis."""
    killer = Killer(draw, launcher, folder, after)
    try:
        outcome, _ = launcher.launch(made, placed or places(made.world_size), folder)
    finally:
        killer.end()
    return outcome, killer.killed


def records(folder: Path) -> list[tuple[int, str, int]]:
    return [(line["step"], line["split"], line["samples"]) for line in read_metrics(str(folder))]
