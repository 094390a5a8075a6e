"""Launches trainings for tests from a process that has torch loaded and nothing run.

`Launcher` is one such process for a whole test session. It forks itself for each training, so that a training begins in
0.1 s instead of the 2 s of a fresh interpreter.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from dslc.compiler.program import JobProgram, RankPlace

TESTS = Path(__file__).parent


class Launcher:
    def __init__(self) -> None:
        command = [sys.executable, "-c", "import launcher; launcher.serve()"]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])}
        self._server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def launch(self, program: JobProgram, places: tuple[RankPlace, ...], folder: Path) -> Any:
        """The outcome, and what was shown."""
        assert self._server.stdin is not None and self._server.stdout is not None
        pickle.dump((program, places, str(folder)), self._server.stdin)
        self._server.stdin.flush()
        return pickle.load(self._server.stdout)

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()


def serve() -> None:
    """Takes (program, places, run directory) from standard input, one after another, until it ends."""
    import io

    from dslc.runtime.launch import launch

    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints goes beside the answers
    while True:
        try:
            program, places, folder = pickle.load(requests)
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            screen = io.StringIO()
            outcome = launch(program, places, folder, screen=screen)
            pickle.dump((outcome, screen.getvalue()), answers)
            answers.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"the launcher ended with {status}"
