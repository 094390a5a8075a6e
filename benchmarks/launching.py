"""Trainings of two hosts, beside torchrun's; and what it costs that many launchers meet.

A host is a launcher of its own on this machine, with a share of its cores. Both sides meet at 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection

HERE = os.path.dirname(os.path.abspath(__file__))
BIN = os.path.dirname(sys.executable)
_ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")}
_ENVIRONMENT["PYTHONUNBUFFERED"] = "1"
_LIMIT = 30.0  # seconds that a step is waited for
_TRIES = 20  # of torchrun, whose restart over gloo often hangs
HOSTS = 2


class _NoStep(Exception):
    """The step that is waited for has not come; the text is what the launchers have said."""


@dataclass
class _Launchers:
    """The launchers of all hosts, which say what they do into one file."""

    processes: list[subprocess.Popen[bytes]]
    log: str

    def read_log(self) -> str:
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def wait_until(self, reached: Callable[[], bool]) -> float:
        """Returns the time of the clock at which that was so. Raises _NoStep."""
        until = time.perf_counter() + _LIMIT
        while not reached():
            if time.perf_counter() > until or any(each.poll() for each in self.processes):
                raise _NoStep(self.read_log())
            time.sleep(0.005)
        return time.perf_counter()

    def kill_a_rank(self, words: bytes) -> None:
        """Kills a rank of the last host: the child of its launcher that has these words in its command line."""
        for child in _children(self.processes[-1].pid):
            with open(f"/proc/{child}/cmdline", "rb") as told:
                if words in told.read():
                    os.kill(child, 9)
                    return
        raise _NoStep(self.read_log())


def _children(process: int) -> list[int]:
    try:
        with open(f"/proc/{process}/task/{process}/children", encoding="ascii") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def _descendants(process: int) -> list[int]:
    return [found for child in _children(process) for found in (child, *_descendants(child))]


@contextlib.contextmanager
def _launched(command: Callable[[int], list[str]], folder: str) -> Iterator[_Launchers]:
    """Starts a launcher for each host, and ends them. `command` gives its words, for a port."""
    port = random.randrange(10_000, 16_000)
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[n::HOSTS] or cores for n in range(HOSTS)]
    path = os.path.join(folder, "said")
    with open(path, "wb") as log:
        made = _Launchers([], path)
        for share in shares:
            words = ["taskset", "--cpu-list", ",".join(map(str, share)), *command(port)]
            made.processes.append(subprocess.Popen(words, env=_ENVIRONMENT, stdout=log, stderr=log))
        try:
            yield made
        finally:
            for each in made.processes:
                for process in (each.pid, *_descendants(each.pid)):  # torchrun's ranks outlive it
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, 9)
                each.wait()


def _dslc(folder: str, *settings: str) -> Callable[[int], list[str]]:
    job, out = os.path.join(HERE, "jobs", "gpt.plt"), os.path.join(folder, "run")
    given = (f"devices.nodes={HOSTS}", "devices.cpus=1", "log.every=1 step", "train.steps=100000", *settings)
    flags = [word for setting in given for word in ("--set", setting)]
    command = [os.path.join(BIN, "dslc"), "run", job, "--out", out, *flags]
    return lambda port: [*command, "--rendezvous", f"127.0.0.1:{port}"]


def _torchrun(*options: str) -> Callable[[int], list[str]]:
    def command(port: int) -> list[str]:
        meets = ["--rdzv-backend", "c10d", "--rdzv-id", "benchmark", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        loop = [os.path.join(HERE, "handwritten.py"), "gpt", "--steps", "100000"]
        return [os.path.join(BIN, "torchrun"), "--nnodes", str(HOSTS), "--nproc-per-node", "1", *meets, *options, *loop]

    return command


def _steps(folder: str) -> int:
    """Returns the number of the last step in metrics.jsonl; 0 if there is none."""
    path = os.path.join(folder, "run", "metrics.jsonl")
    if not os.path.exists(path):
        return 0
    with open(path, encoding="utf-8") as file:
        lines = [line for line in file if line.endswith("\n")]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def first_step() -> float:
    """Returns the seconds from the command to the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        with _launched(_dslc(folder), folder) as launchers:
            return launchers.wait_until(lambda: _steps(folder) > 0) - begun


def first_step_by_hand() -> float:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        with _launched(_torchrun(), folder) as launchers:
            return launchers.wait_until(lambda: "first step done" in launchers.read_log()) - begun


def next_step() -> float:
    """Returns the seconds from the kill -9 of a rank to the end of the step that follows, the first: there is no
    checkpoint yet, as there is none in the loop by hand.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = ("launch.restarts=3", "checkpoint.every=10000 steps")
        with _launched(_dslc(folder, *settings), folder) as launchers:
            launchers.wait_until(lambda: _steps(folder) >= 30)
            launchers.kill_a_rank(b"benchmarks/jobs/gpt.plt")
            killed = time.perf_counter()
            return launchers.wait_until(lambda: 0 < _steps(folder) < 25) - killed


@dataclass
class ByHand:
    """torchrun's restarts: `failed` counts those after which no step came."""

    failed: int = 0
    asked: int = field(default=0)

    def next_step(self) -> float:
        for _ in range(_TRIES):
            self.asked += 1
            try:
                return self._next_step()
            except _NoStep:
                self.failed += 1
        sys.exit(f"torchrun did not go on in {_TRIES} tries")

    def _next_step(self) -> float:
        def firsts() -> int:
            return launchers.read_log().count("first step done, loss")

        command = _torchrun("--max-restarts", "3")
        with tempfile.TemporaryDirectory() as folder, _launched(command, folder) as launchers:
            launchers.wait_until(lambda: firsts() == 1)
            launchers.kill_a_rank(b"handwritten.py")
            killed = time.perf_counter()
            return launchers.wait_until(lambda: firsts() == 2) - killed


# -------------------------------------------------------------------------------------------------- many launchers

LAUNCHERS = (2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Meetings:
    """Milliseconds, by the keeper: until all have met, agreed on a folder, and met again for a restart; `busy` is the
    processor time that it took for all that.
    """

    meet: float
    folder: float
    again: float
    busy: float


def meetings(launchers: int, runs: int) -> Meetings:
    """Returns the medians of some runs. Each launcher is a process that does what one with ranks does, without them."""
    found = [_meeting(launchers) for _ in range(runs)]
    names = ("meet", "folder", "again", "busy")
    return Meetings(**{name: statistics.median(getattr(each, name) for each in found) for name in names})


def _meeting(launchers: int) -> Meetings:
    import dslc.runtime.hosts.launcher_group  # noqa: F401 - once, and not in each process

    context, rendezvous = get_context("fork"), f"127.0.0.1:{random.randrange(10_000, 16_000)}"
    with tempfile.TemporaryDirectory() as folder:
        begin = context.Barrier(launchers)
        pipes = [context.Pipe(duplex=False) for _ in range(launchers)]
        made = [context.Process(target=_launcher, args=(rendezvous, launchers, folder, begin, p[1])) for p in pipes]
        for process in made:
            process.start()
        try:
            found = [reading.recv() for reading, _ in pipes if reading.poll(_LIMIT)]
        finally:
            for process in made:
                process.kill()
                process.join()
    (kept,) = [each for each in found if each is not None]
    assert len(found) == launchers and isinstance(kept, Meetings)
    return kept


def _launcher(rendezvous: str, launchers: int, folder: str, begin: object, told: Connection) -> None:
    from dslc.runtime.hosts.launcher_group import meet, shared
    from dslc.runtime.hosts.rendezvous import Rendezvous

    begin.wait()  # type: ignore[attr-defined]
    times, busy = [time.perf_counter()], time.process_time()
    facts = {f"the file {n}": "280 bytes, cb7e35a8" for n in range(10)}
    group = meet(Rendezvous(rendezvous, launchers, facts, _LIMIT, again=True))
    times.append(time.perf_counter())
    shared(group, folder if group.is_coordinator else "", _LIMIT)
    times.append(time.perf_counter())
    group.meet_again(2, math.inf, lambda: False)
    times.append(time.perf_counter())
    first, second, third = (1000 * (b - a) for a, b in itertools.pairwise(times))
    busy = 1000 * (time.process_time() - busy)
    told.send(Meetings(meet=first, folder=second, again=third, busy=busy) if group.is_coordinator else None)
    group.let_end()
    group.close()
