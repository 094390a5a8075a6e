"""`dslc run`: compiles, launches, trains, and leaves a run directory."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from dslc.dsl.diagnostics import Report
from dslc.front import load_each, show
from dslc.main import GOOD, JOB_AT_FAULT, TRAINING_FAILED, WRONG_USAGE
from dslc.runs import Ready, Taken, finish_drawing, folders_of, lay_down, make_folder, prepare, report_on, start_drawing

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(arguments: argparse.Namespace) -> int:
    loaded, combinations = load_each(arguments.job, arguments.settings)
    report = Report()
    ready = [prepare(chosen, report, profile=arguments.profile) for chosen in combinations]
    show(report)
    if report.errors or loaded.job is None or ready[0] is None:
        return JOB_AT_FAULT
    try:
        folder = make_folder(ready[0], arguments.out)
    except Taken as taken:
        print(f"dslc: {taken}", file=sys.stderr)
        return WRONG_USAGE
    status = GOOD
    runs = folders_of(loaded, combinations, folder)
    for n, ((place, _), each) in enumerate(zip(runs, ready, strict=True), 1):
        assert each is not None
        if len(runs) > 1:
            print(f"run {n} of {len(runs)}: {os.path.relpath(place)}")
        again = [arguments.job, *arguments.settings] if len(runs) == 1 else [os.path.join(place, "job.plt")]
        status = max(status, run_one(each, place, again))
        if status == INTERRUPTED:
            break
    return status


def run_one(ready: Ready, folder: str, again: Sequence[str]) -> int:
    """One training, from its run directory to its exit status; `again`: its job and the settings that change it."""
    from dslc.measured import show_report
    from dslc.runtime.failure import describe
    from dslc.runtime.launch import launch

    lay_down(ready, folder)
    drawing = start_drawing(folder)
    try:
        outcome = launch(ready.program, ready.places, folder)
    finally:
        finish_drawing(drawing, folder)
    if outcome.failure is not None:
        print(describe(outcome), file=sys.stderr)
        _show_how_to_go_on(ready, folder, again)
        return TRAINING_FAILED
    if outcome.stopped_at != 0:  # 0: ended at once, with nothing written down
        report = report_on(ready, folder, outcome.steps)
        if ready.program.profile:
            show_report(report)
    if outcome.stopped_at is not None:
        _show_how_to_go_on(ready, folder, again)
    return GOOD if outcome.stopped_at is None else INTERRUPTED


def _show_how_to_go_on(ready: Ready, folder: str, again: Sequence[str]) -> None:
    """After a training that ended early: the command that goes on from its newest checkpoint, if there is one."""
    from dslc.runtime.checkpoint_files import checkpoints_in

    if checkpoints_in(ready.program.checkpoint.folder or os.path.join(folder, "checkpoints")):
        job, *settings = again
        kept = [setting for setting in settings if not setting.startswith("checkpoint.resume")]
        words = ["dslc", "run", os.path.relpath(job), "--out", os.path.relpath(folder)]
        for setting in (*kept, "checkpoint.resume=auto"):
            words += ["--set", setting]
        print(f"to go on: {shlex.join(words)}", file=sys.stderr)
