"""The part of `launch.with = ssh(…)` on each host: runs `dslc run` there, as long as the starting command lives.

python -P -m dslc.launching.ssh_agent RESTARTS FOLDER WORD…

Model: it says `READY` on standard output, and then starts the command in FOLDER, when a line `go` comes. The line
before it has the secret of the run. `stop` ends the training after its step, `end` at once; any other line is a sign of
life.

Contract: the command and its ranks end with this process, however it ends; and it ends when its input does, or when no
line has come for `SILENCE` seconds. Where a signal ends the command, it is started again, `RESTARTS` times in all: then
the other hosts, which wait for this one, go on. The exit status is the command's, 128 + N where signal N ended it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from dslc.runtime.hosts.run_secret import TOKEN
from dslc.runtime.process.lifetime import end_with

READY = "dslc: ready to start"
SILENCE = 20.0  # seconds without a line, of which one comes every `BEAT`
BEAT = 2.0
_LOOK = 0.2  # seconds between two looks at the command
SECRET = "secret"  # the first word of the line that has the secret of the run
NO_FOLDER = 66  # exit status, where FOLDER is not there


def main(words: Sequence[str]) -> int:
    restarts, folder, *command = words
    try:
        os.chdir(folder)
    except OSError as error:
        print(f"{folder}: {error.strerror}", file=sys.stderr, flush=True)
        return NO_FOLDER
    print(READY, flush=True)
    lines = _InputLines()
    found: list[str] = []
    while "go" not in found:
        found = lines.new(SILENCE)
        _keep_secret(found)
        if lines.ended or "end" in found or "stop" in found:  # also right behind `go`
            return 130
    for again in range(1, int(restarts) + 1):
        if (status := _run(command, lines)) is None or status >= 0:
            break
        said = f"{signal.Signals(-status).name} has ended the launcher of {socket.gethostname()}"
        print(f"dslc: {said}: started again ({again} of {restarts}, `launch.restarts`)", flush=True)
    else:
        status = _run(command, lines)
    if status is None:
        return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


def _keep_secret(lines: Sequence[str]) -> None:
    """Hands the secret of the run, if it is among these lines, to the command: by its environment."""
    for line in lines:
        first, _, secret = line.partition(" ")
        if first == SECRET:
            os.environ[TOKEN] = secret


def _run(command: Sequence[str], lines: _InputLines) -> int | None:
    """Runs the command to its end, and returns its exit status, -N where signal N ended it; None if it had to end."""
    here = os.getpid()
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "dslc.main", *command],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: _prepare_child(here),
    )
    try:
        while child.poll() is None:
            found = lines.new(_LOOK)
            if lines.ended or "end" in found:
                break
            if "stop" in found:
                child.send_signal(signal.SIGTERM)
        else:
            return child.returncode
    finally:
        if child.poll() is None:
            child.kill()  # its ranks end with it
            child.wait()
    return None


def _prepare_child(parent: int) -> None:
    os.setpgid(0, 0)
    end_with(parent)


class _InputLines:
    """The lines of standard input, as they come. `ended`: no more come."""

    def __init__(self) -> None:
        self.ended, self._rest, self._at = False, b"", time.monotonic()

    def new(self, seconds: float) -> list[str]:
        readable, _, _ = select.select([0], [], [], seconds)
        if not readable:
            self.ended = self.ended or time.monotonic() - self._at >= SILENCE
            return []
        self._at = time.monotonic()
        content = b""
        with contextlib.suppress(OSError):
            content = os.read(0, 4096)
        self.ended = not content
        *whole, self._rest = (self._rest + content).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
