"""Faults of a training on several hosts, each drawn from a seed: its kind, its moment, and the host that it hits.

    kill, crash, end, stop   SIGKILL, SIGSEGV, SIGTERM, SIGSTOP to a rank of the host
    launcher                 SIGKILL to the host's launcher; the same command is typed again at once
    all launchers            SIGKILL to those of all hosts, at once; all commands are typed again
    cut                      the host is off the network for some seconds; further faults may come meanwhile

    step       some steps are logged
    saving     a checkpoint begins to be written
    restart    the ranks are started again after the fault before
    at once    with the fault before

Moments are seen by what is written into the run directory, so they hold for a training of torchrun as well, if it
writes `metrics.jsonl`, checkpoints `step-…` that end with `.part` until they are whole, and a log `rank-…` for each
start.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from helpers.hosts import logged, ranks_of, started, tool
from helpers.launcher import Command

from instruments.killer import Events

SIGNALS = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "end": signal.SIGTERM, "stop": signal.SIGSTOP}
KINDS = {"kill": 5, "crash": 2, "end": 2, "stop": 1, "launcher": 5, "all launchers": 1, "cut": 2}  # how often
MOMENTS = {"step": 3, "saving": 3, "restart": 2, "at once": 2}
CUTS = (1.0, 11.0, 14.0)  # seconds: less and more than those after which a host is lost
_NO_RESTART = 40  # steps after which there was none: a short cut harms nobody
_LISTENS = "0A"  # the state of a socket, in /proc/net/tcp


@dataclass(frozen=True)
class Fault:
    """`host` counts from 1; `few`: events that are waited for beyond the moment's first; `seconds`: of a cut."""

    kind: str
    moment: str
    host: int
    few: int
    seconds: float

    def __str__(self) -> str:
        where = "" if self.kind == "all launchers" else f" of host{self.host}"
        long = f" for {self.seconds:g} s" if self.kind == "cut" else ""
        return f"{self.kind}{where}{long} ({self.moment})"


def drawn(draw: random.Random, hosts: int, kinds: Mapping[str, int] = KINDS, *, first: bool = False) -> Fault:
    """Returns a fault; the `first` of a training has none before it."""
    moments = {name: weight for name, weight in MOMENTS.items() if not first or name in ("step", "saving")}
    (kind,), (moment,) = (
        draw.choices(list(kinds), list(kinds.values())),
        draw.choices(list(moments), list(moments.values())),
    )
    host, few = draw.randrange(hosts) + 1, draw.randrange(1, 30 if moment == "step" else 8)
    return Fault(kind, moment, host, few, draw.choice(CUTS))


class Struck:
    """A training on hosts, a launcher for each, and the faults that have `hit` it.

    `commands` are those of `host1` …; `ranks_of` returns the processes of the ranks of one; `ends_ranks`: ranks end
    with their launcher, and are waited for. No fault comes once
    `most` steps are logged, as a launcher that is typed again after the end begins anew. `folder` takes what the
    launchers say.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        out: Path,
        most: int,
        folder: Path,
        around: ExitStack,
        ranks_of: Callable[[Command], list[int]],
        *,
        ends_ranks: bool = True,
    ) -> None:
        self.hit: list[Fault] = []
        self._commands, self._out, self._most, self._folder, self._around = commands, out, most, folder, around
        self._ranks_of, self._ends_ranks, self._timers = ranks_of, ends_ranks, list[Timer]()
        out.mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._events = Events(out)
        around.callback(self._events.close)
        around.callback(self._mend)
        self.commands: list[Command] = []  # of all launchers that were started
        self.running: dict[int, Command] = {}
        self._watched: dict[int, int] = {}
        for host in range(1, len(commands) + 1):
            self._start(host)

    def _start(self, host: int) -> None:
        name = f"{len(self.commands) + 1}-host{host}"
        words = ["bash", "-c", 'exec "$@" >"$0" 2>&1', str(self._folder / f"{name}.txt"), *self._commands[host - 1]]
        (command,) = self._around.enter_context(started(self._folder / name, [words]))
        self.commands.append(command)
        self.running[host], self._watched[host] = command, os.pidfd_open(command.process.pid)
        self._events.ends = self._watched.values()

    def strike(self, fault: Fault) -> bool:
        """Waits for the moment of a fault, which then hits. Returns False if the training was faster."""
        if not self._wait_for(fault):
            return False
        victims: list[int] = []
        while fault.kind in SIGNALS and not victims:
            victims = self._ranks_of(self.running[fault.host])
            if not victims and not self._events.wait_for_names(lambda name: True):
                return False
        if max(logged(self._out), default=0) >= self._most:
            return False
        if fault.kind in SIGNALS:
            with suppress(ProcessLookupError):
                os.kill(victims[0], SIGNALS[fault.kind])
        elif fault.kind == "cut":
            tool("cut", str(fault.host))
            self._timers.append(Timer(fault.seconds, tool, ["mend", str(fault.host)]))
            self._timers[-1].start()
        else:
            self._lose(list(self.running) if fault.kind == "all launchers" else [fault.host])
        self.hit.append(fault)
        return True

    def _wait_for(self, fault: Fault) -> bool:
        steps, wait = 0, self._events.wait_for_names

        def starts(name: str) -> bool:
            nonlocal steps
            steps += name == "metrics.jsonl"
            return name.startswith("rank-") or steps > _NO_RESTART

        match fault.moment:
            case "step":
                return wait(lambda name: name == "metrics.jsonl", fault.few)
            case "saving":
                return wait(lambda name: name.startswith("step-") and name.endswith(".part")) and wait(
                    lambda name: True, fault.few
                )
            case "restart":
                return wait(starts, fault.few)
        return True

    def _lose(self, hosts: list[int]) -> None:
        for host in hosts:
            self.running[host].process.kill()
        for host in hosts:
            self.running[host].process.wait()
            if self._ends_ranks:
                self.running[host].wait_for_all()
            os.close(self._watched.pop(host))
            self._start(host)

    def ends(self, seconds: float | None = None) -> list[int]:
        """Returns the exit statuses of the launchers. Raises subprocess.TimeoutExpired after so many seconds."""
        until = None if seconds is None else time.monotonic() + seconds
        found = [
            command.process.wait(until and max(0.0, until - time.monotonic()))
            for _, command in sorted(self.running.items())
        ]
        self._mend()
        return found

    def _mend(self) -> None:
        for timer in self._timers:
            timer.join()
        self._timers = []
        while self._watched:
            os.close(self._watched.popitem()[1])

    def left(self) -> list[str]:
        """Returns the processes that are left, and the ports that listen, on each host."""
        found = [left for command in self.commands for left in command.left()]
        for host in self.running:
            found += [f"host{host}: process {each}" for each in _lines("ip", "netns", "pids", f"host{host}")]
            for line in _lines("ip", "netns", "exec", f"host{host}", "cat", "/proc/net/tcp", "/proc/net/tcp6"):
                if line.split()[3:4] == [_LISTENS]:
                    found.append(f"host{host}: listens at {line.split()[1]}")
        return found

    def said(self) -> str:
        """Returns what the launchers have said, the end of it, and the faults."""
        texts = [f"--- {path.stem}\n{path.read_text()[-4000:]}" for path in sorted(self._folder.glob("*.txt"))]
        return "\n".join([*map(str, self.hit), *texts])


def started_ranks_of(command: Command) -> list[int]:
    """Returns the ranks of a launcher, and no other process that it has forked: those that write a log."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for rank in ranks_of(command):
            with suppress(OSError):
                if os.path.basename(os.readlink(f"/proc/{rank}/fd/2")).startswith("rank-"):
                    found.append(rank)
    return found


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
