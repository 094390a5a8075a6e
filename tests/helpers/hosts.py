"""Several hosts for tests: launchers on this one, or in network namespaces with addresses and names of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dslc.runtime.hosts.wire import listen
from helpers.launcher import Command
from helpers.paths import ROOT

TOOL = ROOT.parent / "shared" / "tools" / "hosts"


def why_none() -> str:
    """Returns why namespaces cannot be made here; "" if they can."""
    if not TOOL.exists():
        return f"there is no {TOOL}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and `ip`"
    return ""


@contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Makes `host1` … and yields their names."""
    names = subprocess.run([TOOL, "up", str(count)], check=True, capture_output=True, text=True).stdout.split()
    try:
        yield names
    finally:
        subprocess.run([TOOL, "down"], check=True)


def tool(*arguments: str) -> None:
    subprocess.run([TOOL, *arguments], check=True)


def free_port() -> int:
    with listen("127.0.0.1") as found:
        port: int = found.getsockname()[1]
        return port


def here(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "dslc.main", *words]


@contextmanager
def started(folder: Path, commands: Sequence[Sequence[str]]) -> Iterator[list[Command]]:
    """Starts a command for each host."""
    with ExitStack() as around:
        yield [
            around.enter_context(Command(folder / f"host{n}", list(command))) for n, command in enumerate(commands, 1)
        ]
