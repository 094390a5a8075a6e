"""`dslc run`: compiles, launches, trains, and leaves a run directory."""

from __future__ import annotations

import argparse
import os
import sys

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
        status = max(status, run_one(each, place))
        if status == INTERRUPTED:
            break
    return status


def run_one(ready: Ready, folder: str) -> int:
    """One training, from its run directory to its exit status."""
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
        return TRAINING_FAILED
    if outcome.stopped_at != 0:  # 0: ended at once, with nothing written down
        report = report_on(ready, folder, outcome.steps)
        if ready.program.profile:
            show_report(report)
    return GOOD if outcome.stopped_at is None else INTERRUPTED
