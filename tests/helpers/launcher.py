"""Launches trainings for tests from a process that has loaded torch and run nothing.

`Launcher` is one such process for a whole test session. It forks itself for each training, so that a training begins in
0.1 s instead of the 2 s of a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.runtime.process import program_file
from helpers.paths import TESTS

# What models of transformers and adapters need, in a process that traces and in one that trains.
LIBRARIES = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bert.modeling_bert",
    "peft",
)
# Modules that many trainings need and that take seconds to import.
PRELOADED = (
    "helpers.vision",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining.schedules",
    "torch.distributed.tensor.parallel",
    # They import torchao, which asks CUDA about devices if it is there, and a process forked after that cannot use it.
    *(() if torch.version.cuda else LIBRARIES),
)


class Launcher:
    def __init__(self, *modules: str) -> None:
        """`modules` are imported once, beforehand, instead of by each training that needs them."""
        start = f"import {', '.join(['helpers.launcher', *modules])}; helpers.launcher.serve()"
        command = [sys.executable, "-c", start]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)]),
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait leave the cores to the ranks of other trainings
        }
        self._server = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    @property
    def process_id(self) -> int:
        """Returns the id of the process that forks the launchers, one at a time, which fork the ranks."""
        return self._server.pid

    def launch(self, program: JobProgram, places: tuple[RankPlace, ...], folder: Path) -> Any:
        """Returns the outcome, and the output. The outcome is None if the launcher itself was killed."""
        assert self._server.stdin is not None and self._server.stdout is not None
        pickle.dump((program, places, str(folder)), self._server.stdin)
        self._server.stdin.flush()
        return pickle.load(self._server.stdout)

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        os.killpg(self._server.pid, signal.SIGKILL)  # a training that hangs must not hang the tests
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()


def serve() -> None:
    """Takes (program, places, run directory) from standard input, one after another, until it ends."""
    from dslc.runtime.checkpoint.checkpoint import preload
    from dslc.runtime.launch import launch

    torch._C._set_print_stack_traces_on_fatal_signal(True)  # of a rank that crashes its log has the native stacks too
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed output must not mix with the answers
    while True:
        try:
            program, places, folder = pickle.load(requests)
        except EOFError:
            return
        preload(program)  # once, instead of by each of the children
        child = os.fork()
        if child == 0:
            screen = io.StringIO()
            outcome = launch(program, places, folder, screen=screen)
            pickle.dump((outcome, screen.getvalue()), answers)
            answers.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            pickle.dump((None, f"the launcher ended with {os.waitstatus_to_exitcode(status)}"), answers)
            answers.flush()


# ------------------------------------------------------------------------------------------- by a command of its own


def write_program(program: JobProgram, places: tuple[RankPlace, ...], folder: Path) -> Path:
    """Creates a run directory that `python -m dslc.runtime.launch` takes."""
    folder.mkdir()
    program_file.write_program(str(folder), program, places)
    return folder


class Command:
    """`python -m dslc.runtime.launch FOLDER`, or another command, as a process group, with its output."""

    def __init__(self, folder: Path, command: list[str] | None = None) -> None:
        self._mark = f"DSLC_TEST={folder}"
        self.process = subprocess.Popen(
            command or [sys.executable, "-m", "dslc.runtime.launch", str(folder)],
            env=dict(os.environ, DSLC_TEST=str(folder), CI="1", OMP_WAIT_POLICY="PASSIVE"),  # as above
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def wait_for(self, words: str) -> None:
        """Waits until a line with these words has been shown."""
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            if words in line:
                return
            said.append(line)
        raise AssertionError(f"ended without saying {words!r}, but:\n{''.join(said)}")

    def end(self) -> tuple[int, str]:
        """Returns the exit status, and the output since."""
        output, _ = self.process.communicate()
        return self.process.returncode, output

    def left(self) -> list[str]:
        """Returns the processes left of it (Linux), which have inherited its environment."""
        return [f"{process} {command}" for process, command in self._remaining_processes().items()]

    def processes(self) -> list[int]:
        """Returns the processes of it, as `left` does."""
        return list(self._remaining_processes())

    def wait_for_all(self) -> None:
        """Waits until no process of it is left."""
        while left := self._remaining_processes():
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    ending = os.pidfd_open(process)
                    select.select([ending], [], [])
                    os.close(ending)

    def _remaining_processes(self) -> dict[int, str]:
        """Returns the command of each process."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(bytes(1), b" ").decode()
            except OSError:
                continue  # it ended while we looked
        return found
