"""Commands of `dslc` for programs: each in a fresh interpreter, so that a program that has used torch may call them.

Contract: what the program gives (python_objects.py) is handed over as for a training. A command that ends badly raises:
JobError if the job is at fault, else CommandError with what the command said.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from dslc.dsl.diagnostics import JobError, Report
from dslc.dsl.show import render
from dslc.jobs.check_job import check_one
from dslc.runtime.process.user_code import hand_over
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT

_START = """
import sys
from dslc.runtime.process.user_code import take_over
from dslc.main import main
if sys.argv[1]:
    take_over(sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""


class CommandError(Exception):
    """A command ended badly; the text is what it said."""


def run_command(
    command: str, path: str, settings: Sequence[str], options: Sequence[str], *, may_disagree: bool = False
) -> tuple[str, bool]:
    """Runs `dslc COMMAND PATH …`; returns its output, and whether it ended well, as it must unless it `may_disagree`
    with a job that has no mistake. Raises JobError, CommandError, KeyboardInterrupt.
    """
    words = [command, path, *options]
    for setting in settings:
        words += ["--set", setting]
    with tempfile.TemporaryDirectory(prefix="dslc-") as folder:
        functions = os.path.join(folder, "functions.pkl")
        hand_over(_named(settings), functions)
        # -P: no module of the current folder hides those of Python and torch.
        child = subprocess.run(
            [sys.executable, "-P", "-c", _START, functions if os.path.exists(functions) else "", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_search_path())},
            check=False,
        )
    if child.returncode == 130:
        raise KeyboardInterrupt
    if child.returncode == JOB_AT_FAULT:
        _raise_mistakes(path, settings)
        if may_disagree and child.stdout:
            return child.stdout, False
    if child.returncode != GOOD:
        raise CommandError(child.stderr.strip() or child.stdout.strip() or f"exit status {child.returncode}")
    return child.stdout, True


def _named(settings: Sequence[str]) -> list[str]:
    """Returns the functions that settings name; the functions of this program are handed over."""
    return [text.split('"')[1] for text in " ".join(settings).split("python(")[1:] if text.startswith('"')]


def _search_path() -> list[str]:
    return [path for path in sys.path if path] + ([os.getcwd()] if "" in sys.path else [])


def _raise_mistakes(path: str, settings: Sequence[str]) -> None:
    """Raises JobError if the job has mistakes, found anew here; returns if the fault is another."""
    report: Report = check_one(path, list(settings), trace=True)[0]
    if report.errors:
        raise JobError(report, render(report, color=False).rstrip())
