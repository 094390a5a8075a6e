"""Launches trainings and commands for tests from a process that has loaded torch and run nothing.

`Launcher` is one such process for a whole test session. It forks itself for each training, so that a training begins in
0.1 s instead of the 2 s of a fresh interpreter. It does the same for a command of `dslc`: the fork has the arguments,
the environment, the folder, the standard streams and the path of modules that a fresh interpreter has.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.runtime.process import program_file
from helpers.paths import EXAMPLES, TESTS

DSLC = Path(sys.executable).parent / "dslc"
# What models of transformers and adapters need, in a process that traces and in one that trains.
LIBRARIES = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bert.modeling_bert",
    "peft",
)
# Modules of the product that a child which traces would import.
TRACING = (
    "dslc.runtime.data.sources.open_sources",
    "dslc.runtime.loop.optimizer_trial",
    "dslc.runtime.model.adapters",
    "dslc.runtime.pipeline.captured",
    "dslc.runtime.step.custom_step",
    "dslc.runtime.step.network_trial",
)
# Modules that many trainings need and that take seconds to import.
PRELOADED = (
    "cattrs",
    "helpers.vision",
    "networkx",
    "numpy.ma",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining.schedules",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
    # They import torchao, which asks CUDA about devices if it is there, and a process forked after that cannot use it.
    *(() if torch.version.cuda else LIBRARIES),
)


# Variables that Python, its libraries and threads read once, when they start.
READ_AT_START = (
    "CUDA",
    "DSLC_COVERAGE",
    "DSLC_SHARED_MEMORY",
    "GOMP",
    "HF_",
    "KMP_",
    "LANG",
    "LC_",
    "LD_",
    "MKL_",
    "OMP_",
    "PYTHON",
    "TORCH",
)
# But not this one, which torch also sets where a test compiles or loads torchao: a fork reads what it is given.
READ_LATER = "TORCHINDUCTOR_CACHE_DIR"
SIZE = 8  # bytes of a message's length, which comes first


class Launcher:
    def __init__(self, *modules: str) -> None:
        """`modules` are imported once, beforehand, instead of by each training that needs them."""
        self._modules, self._lock = modules, threading.Lock()
        self._start()

    def _start(self) -> None:
        imported = ", ".join(["helpers.launcher", *self._modules])
        here, there = socket.socketpair()
        start = (
            f"import sys; path = sys.path[1:]; sys.path[:0] = {[str(TESTS), *filter(None, sys.path)]}; "
            f"import {imported}; helpers.launcher.serve({there.fileno()}, path)"
        )
        self._environment = dict(os.environ)
        self._server = subprocess.Popen(
            [sys.executable, "-c", start],
            # Threads that wait leave the cores to the ranks of other trainings.
            env={**self._environment, "OMP_WAIT_POLICY": "PASSIVE"},
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            start_new_session=True,
        )
        there.close()
        self._socket = here

    @property
    def process_id(self) -> int:
        """Returns the id of the process that forks the launchers, one at a time, which fork the ranks."""
        return self._server.pid

    def launch(self, program: JobProgram, places: tuple[RankPlace, ...], folder: Path) -> Any:
        """Returns the outcome, and the output. The outcome is None if the launcher itself was killed."""
        with self._lock:
            return self._ask((program, places, str(folder)))

    def run_command(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], streams: Sequence[int]
    ) -> int | None:
        """Runs `dslc` with these standard streams, and returns its status. Returns None, having run nothing, while
        something else runs, or if the environment has other variables that a fresh interpreter reads.
        """
        if read_at_start(environment) != read_at_start(self._environment) or not self._lock.acquire(blocking=False):
            return None
        try:
            status: int = self._ask((list(arguments), str(folder), dict(environment)), streams)
        finally:
            self._lock.release()
        return status

    def _ask(self, request: object, streams: Sequence[int] = ()) -> Any:
        try:
            send(self._socket, request, streams)
            return receive(self._socket)[0]
        except BaseException:  # such as the time limit of a test: the next one is not to receive this answer
            self.close()
            self._start()
            raise

    def close(self) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)  # a training that hangs must not hang the tests
        self._socket.close()
        self._server.wait()


@cache
def shared_launcher() -> Launcher:
    """Returns the launcher of this process of pytest, which lasts as long as it."""
    launcher = Launcher(*PRELOADED)
    atexit.register(launcher.close)
    return launcher


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START) and name != READ_LATER}


def send(connection: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    content = pickle.dumps(message)
    size = len(content).to_bytes(SIZE, "little")
    if descriptors:
        socket.send_fds(connection, [size], descriptors)
    else:
        connection.sendall(size)
    connection.sendall(content)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Returns a message, and the descriptors that came with it. Raises EOFError at the end."""
    size, descriptors, _, _ = socket.recv_fds(connection, SIZE, 3)
    if not size:
        raise EOFError
    content = bytearray()
    while missing := int.from_bytes(size, "little") - len(content):
        part = connection.recv(missing)
        if not part:
            raise EOFError
        content += part
    return pickle.loads(content), descriptors


def serve(descriptor: int, path: list[str]) -> None:
    """Takes trainings and commands, one after another, until the connection ends. `path` is what a fresh interpreter
    has in `sys.path`, without the folder of its script.
    """
    from dslc.runtime.checkpoint.checkpoint import preload
    from dslc.runtime.launch import launch

    prepare_commands()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # of a rank that crashes its log has the native stacks too
    os.dup2(2, 1)  # pytest's own output must not mix with what a training prints
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    while True:
        try:
            request, streams = receive(connection)
        except EOFError:
            return
        if not streams:
            preload(request[0])  # once, instead of by each of the children
        gc.freeze()  # or each child looks through all that libraries have made, and copies it
        child = os.fork()
        if child == 0 and streams:
            connection.close()
            become_command(request, streams, path)
        if child == 0:
            program, places, folder = request
            screen = io.StringIO()
            outcome = launch(program, places, folder, screen=screen)
            send(connection, (outcome, screen.getvalue()))
            os._exit(0)
        for stream in streams:
            os.close(stream)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if streams:
            send(connection, code)
        elif code != 0:
            send(connection, (None, f"the launcher ended with {code}"))


def prepare_commands() -> None:
    """Imports what commands and the ranks of most trainings import, and writes a run directory, which fills caches."""
    from dslc.commands import bisect, check, evaluate, plan, run, verify  # noqa: F401
    from dslc.dsl.diagnostics import Report
    from dslc.dsl.meaning.load import load
    from dslc.jobs.prepare_run import prepare, write_run_directory

    for name in TRACING:
        importlib.import_module(name)
    ready = prepare(load(str(EXAMPLES / "digits.plt")), Report())
    assert ready is not None
    ready.compiled.plan.to_json()  # cattrs writes a function for each class of records
    with tempfile.TemporaryDirectory() as folder:
        write_run_directory(ready, folder)


def become_command(request: tuple[list[str], str, dict[str, str]], streams: list[int], path: list[str]) -> NoReturn:
    """Turns this process into a command of `dslc`, as its script in a fresh interpreter. It ends as processes of
    multiprocessing do: threads and exit functions as ever, but it does not free what the launcher has loaded, which
    takes a second.
    """
    arguments, folder, environment = request
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = os.fdopen(
            number,
            "w" if number else "r",
            buffering=1 if name == "stderr" else -1,
            errors="backslashreplace" if name == "stderr" else None,
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # which the environment chooses
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # of libraries: 0.2 s at the end
    for name in [name for name in sys.modules if name.partition(".")[0] == "helpers"]:
        del sys.modules[name]
    sys.path[:] = [str(DSLC.parent), *path]
    sys.path_importer_cache.clear()
    sys.argv = [str(DSLC), *arguments]
    from dslc.main import main

    code: object = 1
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


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
