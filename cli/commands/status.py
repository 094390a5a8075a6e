"""`dslc status`: where a run stands, or each run of a folder, from what lies there. Starts nothing."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from dslc.dsl.plain import plain, plain_lines
from dslc.launching.run_state import RunState, run_states, runs_in
from dslc.sweeps.table import show_sweep, write_csv
from dslc.terminal.exit_codes import GOOD, INTERRUPTED, TRAINING_FAILED, CommandFailedError

_LOOK = 1.0  # seconds between two looks
_QUIET = 10.0  # seconds between two lines of a run that goes on, where there is no terminal


def main(arguments: argparse.Namespace) -> int:
    folder = os.path.normpath(arguments.run)
    folders = runs_in(folder) if os.path.isdir(folder) else []
    if not folders:
        reason = "there is no run in it" if os.path.isdir(folder) else "there is no such folder"
        raise CommandFailedError(plain(f"{folder}: {reason}"))
    if arguments.follow:
        return _exit_status(follow(folders))
    runs = run_states(folders)
    if arguments.json:
        json.dump([_record(run) for run in runs], sys.stdout, indent=2)
        print()
    elif not show_sweep(folder):
        show(runs, folder)
    else:
        with contextlib.suppress(OSError):  # a folder of another user's can be looked at
            write_csv(folder)
    return _exit_status(runs)


def show(runs: Sequence[RunState], folder: str) -> None:
    """Prints the state of runs: a single run with all details, several runs with a line each."""
    if len(runs) == 1 and runs[0].folder == folder:
        print(plain(f"{folder}: {runs[0].line()}"))
        if runs[0].state == "failed" and "\n" in runs[0].why:
            print(plain_lines(runs[0].why))
        return
    names = [os.path.relpath(run.folder, folder) for run in runs]
    wide = max(map(len, names))
    for name, run in zip(names, runs, strict=True):
        print(plain(f"{name:<{wide}}  {run.line()}"))


def follow(folders: Sequence[str]) -> list[RunState]:
    """Shows where runs stand until all have ended: on a terminal in place, else in lines, few of them."""
    runs: list[RunState] = []
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        from rich.live import Live
        from rich.text import Text

        with Live(auto_refresh=False) as live:
            for runs in _states_until_the_end(folders):
                lines = (plain(f"{os.path.relpath(run.folder)}: {run.line()}") for run in runs)
                live.update(Text("\n".join(lines)), refresh=True)
        return runs
    last_shown: dict[str, tuple[str, float]] = {}
    for runs in _states_until_the_end(folders):
        for run in runs:
            state, shown_at = last_shown.get(run.folder, ("", 0.0))
            if state != run.state or (not run.has_ended and time.monotonic() - shown_at >= _QUIET):
                last_shown[run.folder] = run.state, time.monotonic()
                print(plain(f"{os.path.relpath(run.folder)}: {run.line()}"), flush=True)
    return runs


def _states_until_the_end(folders: Sequence[str]) -> Iterator[list[RunState]]:
    """Yields where runs stand, at intervals, until each has ended or does not say where it stands."""
    while True:
        runs = run_states(folders)
        yield runs
        if all(run.has_ended or run.state == "unknown" for run in runs):
            return
        time.sleep(_LOOK)


def _exit_status(runs: Sequence[RunState]) -> int:
    """Returns the exit status of the run, or the worst of several; 0 while they wait or run."""
    states = {run.state for run in runs}
    if states & {"failed", "gone"}:
        return TRAINING_FAILED
    return INTERRUPTED if "stopped" in states else GOOD


def _record(run: RunState) -> dict[str, object]:
    job = run.submitted
    return {
        "run": run.folder,
        "state": run.state,
        "step": run.step,
        "steps": run.steps,
        "message": run.why,
        "asked": run.asked,
        "restarts": run.restarts,
        "metrics": dict(run.metrics),
        "step_time": run.step_time or None,
        "expected": run.expected or None,
        "submitted": asdict(job) if job is not None else None,
    }
