"""`dslc status`: where a run stands, or each run of a folder, from what lies there. Starts nothing."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
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
        missing = "there is no run in it" if os.path.isdir(folder) else "there is no such folder"
        raise CommandFailedError(plain(f"{folder}: {missing}"))
    if arguments.follow:
        return _exit_status(follow(folders))
    found = run_states(folders)
    if arguments.json:
        json.dump([_record(each) for each in found], sys.stdout, indent=2)
        print()
    elif not show_sweep(folder):
        show(found, folder)
    else:
        with contextlib.suppress(OSError):  # a folder of another user's can be looked at
            write_csv(folder)
    return _exit_status(found)


def show(found: Sequence[RunState], folder: str) -> None:
    """Prints the state of runs: a single run with all details, several runs with a line each."""
    if len(found) == 1 and found[0].folder == folder:
        print(plain(f"{folder}: {found[0].line()}"))
        if found[0].state == "failed" and "\n" in found[0].why:
            print(plain_lines(found[0].why))
        return
    names = [os.path.relpath(each.folder, folder) for each in found]
    wide = max(map(len, names))
    for name, each in zip(names, found, strict=True):
        print(plain(f"{name:<{wide}}  {each.line()}"))


def follow(folders: Sequence[str]) -> list[RunState]:
    """Shows where runs stand until all have ended: on a terminal in place, else in lines, few of them."""
    found = run_states(folders)
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        from rich.live import Live
        from rich.text import Text

        with Live(auto_refresh=False) as live:
            while True:
                lines = (plain(f"{os.path.relpath(each.folder)}: {each.line()}") for each in found)
                live.update(Text("\n".join(lines)), refresh=True)
                if all(each.has_ended for each in found):
                    return found
                time.sleep(_LOOK)
                found = run_states(folders)
    before: dict[str, tuple[str, float]] = {}
    while True:
        for each in found:
            state, at = before.get(each.folder, ("", 0.0))
            if state != each.state or (not each.has_ended and time.monotonic() - at >= _QUIET):
                before[each.folder] = each.state, time.monotonic()
                print(plain(f"{os.path.relpath(each.folder)}: {each.line()}"), flush=True)
        if all(each.has_ended or each.state == "unknown" for each in found):
            return found
        time.sleep(_LOOK)
        found = run_states(folders)


def _exit_status(found: Sequence[RunState]) -> int:
    """Returns the exit status of the run, or the worst of several; 0 while they wait or run."""
    states = {each.state for each in found}
    if states & {"failed", "gone"}:
        return TRAINING_FAILED
    return INTERRUPTED if "stopped" in states else GOOD


def _record(found: RunState) -> dict[str, object]:
    job = found.submitted
    return {
        "run": found.folder,
        "state": found.state,
        "step": found.step,
        "steps": found.steps,
        "message": found.why,
        "asked": found.asked,
        "restarts": found.restarts,
        "metrics": dict(found.metrics),
        "step_time": found.step_time or None,
        "expected": found.expected or None,
        "submitted": asdict(job) if job is not None else None,
    }
