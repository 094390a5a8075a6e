"""Several hosts for tests: launchers on this one, or in network namespaces with addresses and names of their own."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dslc.runtime.checkpoint.files import checkpoints_in
from dslc.runtime.hosts.connection import listen
from helpers.launcher import Command
from helpers.paths import ROOT
from helpers.waiting import until

TOOL = ROOT.parent / "shared" / "tools" / "hosts"


def why_none() -> str:
    """Returns why namespaces cannot be made here; "" if they can."""
    if not TOOL.exists():
        return f"there is no {TOOL}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and `ip`"
    return ""


@contextmanager
def namespaces(count: int, rate: str = "") -> Iterator[list[str]]:
    """Makes `host1` …, with links of a `rate` (`100mbit`), and yields their names. They are the machine's: tests that
    need them wait for each other, and hosts that a killed test has left are removed.
    """
    with open(Path(tempfile.gettempdir()) / "dslc-hosts.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _idle():
            subprocess.run([TOOL, "down"], check=True)
        made = subprocess.run([TOOL, "up", str(count), *filter(None, [rate])], capture_output=True, text=True)
        assert made.returncode == 0, f"{made.stderr}`{TOOL} down` removes hosts that are in use"
        names = made.stdout.split()
        try:
            yield names
        finally:
            subprocess.run([TOOL, "down"], check=True)


def _idle() -> bool:
    """Returns whether there are hosts in which no process runs."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout.splitlines()
    names = [line.split()[0] for line in listed if line.startswith("host")]
    return bool(names) and not any(
        subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True).stdout for name in names
    )


def tool(*arguments: str) -> None:
    subprocess.run([TOOL, *arguments], check=True)


def free_port() -> int:
    """Returns a port that nothing listens on, out of those that no system gives to who asks for any: the command that
    takes it listens there seconds later.
    """
    while True:
        port = random.randrange(10_000, 16_000)
        with suppress(OSError), listen("127.0.0.1", port), listen("::1", port):
            return port


def local_command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "dslc.main", *words]


@contextmanager
def started(folder: Path, commands: Sequence[Sequence[str]]) -> Iterator[list[Command]]:
    """Starts a command for each host."""
    with ExitStack() as around:
        yield [
            around.enter_context(Command(folder / f"host{n}", list(command))) for n, command in enumerate(commands, 1)
        ]


def reach(out: Path, step: int, among: list[Command]) -> None:
    """Waits until a training has logged a step."""
    until(lambda: [0, *logged(out)][-1] >= step, among)


def reach_checkpoint(out: Path, among: list[Command]) -> None:
    """Waits until a training has a checkpoint, which a thread writes while steps go on."""
    until(lambda: bool(checkpoints_in(str(out / "checkpoints"))), among)


def logged(out: Path) -> list[int]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def is_rank(process: int, launcher: int) -> bool:
    """True if a child of a launcher is a rank: it has the same command line, and the same priority, unlike the child
    that draws the plan.
    """
    one, other = (Path(f"/proc/{each}/cmdline").read_bytes() for each in (process, launcher))
    return one == other and os.getpriority(os.PRIO_PROCESS, process) == os.getpriority(os.PRIO_PROCESS, launcher)


def ranks_of(command: Command) -> list[int]:
    """Returns the processes of the ranks that a launcher has forked."""
    launcher, ranks = command.process.pid, []
    for child in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if is_rank(child, launcher):
                ranks.append(child)
    return ranks
