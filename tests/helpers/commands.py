"""The `dslc` command as a user types it, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

from helpers.launcher import DSLC, shared_launcher


def dslc(
    *arguments: object,
    cwd: Path | None = None,
    input: str | None = None,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs the command with `input` on standard input, and returns its result, whatever its exit status; `env` replaces
    the environment. The process is a fork of one that has loaded torch, or a fresh interpreter where that makes a
    difference: `fresh`, or another environment.
    """
    command, environment = [str(DSLC), *map(str, arguments)], os.environ if env is None else env
    if not fresh:
        with Streams(input) as streams:
            status = shared_launcher().run_command(command[1:], cwd or Path.cwd(), environment, streams.descriptors)
            if status is not None:
                return subprocess.CompletedProcess(command, status, *streams.read())
    return subprocess.run(command, cwd=cwd, input=input, env=env, capture_output=True, text=True, check=False)


class Streams:
    """The standard streams of a command: pipes that threads write and read. Without input it has that of the tests."""

    def __init__(self, input: str | None) -> None:
        self._texts = ["", ""]
        self._threads, self.descriptors = list[threading.Thread](), [0]
        if input is not None:
            self.descriptors[0], write = os.pipe()
            self._threads.append(threading.Thread(target=self._write, args=(write, input)))
        for number in range(2):
            read, write = os.pipe()
            self.descriptors.append(write)
            self._threads.append(threading.Thread(target=self._read, args=(number, read)))
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        for thread in self._threads:
            thread.join()

    def read(self) -> list[str]:
        """Returns standard output and standard error, once every process has closed them."""
        self._close()
        for thread in self._threads:
            thread.join()
        return self._texts

    @staticmethod
    def _write(descriptor: int, text: str) -> None:
        with contextlib.suppress(BrokenPipeError), open(descriptor, "w") as file:
            file.write(text)

    def _read(self, number: int, descriptor: int) -> None:
        with open(descriptor) as file:
            self._texts[number] = file.read()

    def _close(self) -> None:
        for descriptor in filter(None, self.descriptors):
            os.close(descriptor)
        self.descriptors = []
