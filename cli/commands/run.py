"""`dslc run`: compiles, launches, trains, and leaves a run directory."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load_each
from dslc.dsl.plain import plain
from dslc.front import over, show
from dslc.planned import is_plan_file, prepare_plan
from dslc.run_folder import Occupied, claimed, make_folder, refuse_others, refuse_run
from dslc.runs import Ready, folders_of, launch, prepare, show_failure, train
from dslc.status import GOOD, JOB_AT_FAULT, TRAINING_FAILED, WRONG_USAGE

if TYPE_CHECKING:
    from dslc.runtime.process.failure import Outcome

INTERRUPTED = 130  # 128 + SIGINT, as in shells


def main(arguments: argparse.Namespace) -> int:
    for option, given in (("--out", arguments.out), ("--profile", arguments.profile)):
        if arguments.trial and given:
            print(f"dslc: `--try` leaves nothing, and `{option}` asks for something: leave one out", file=sys.stderr)
            return WRONG_USAGE
    rendezvous = arguments.rendezvous or os.environ.get("DSLC_RENDEZVOUS", "")
    if is_plan_file(arguments.job):
        return _run_plan(arguments, rendezvous)
    loaded, combinations = load_each(arguments.job, arguments.settings)
    report = Report()
    how = {"profile": arguments.profile, "hosts": bool(rendezvous) and not arguments.trial}
    ready = [prepare(chosen, report, **how) for chosen in combinations if not over(report)]
    show(report)
    if report.errors or loaded.job is None:
        return JOB_AT_FAULT
    runs = [each for each in ready if each is not None]
    if arguments.trial:
        return _try_each(runs)
    if rendezvous:
        return _run_with_others(runs, rendezvous, arguments)
    try:
        folder = make_folder(runs[0].program, arguments.out)
        places = [place for place, _ in folders_of(loaded, combinations, folder)]
        if places == [folder]:
            return run_one(runs[0], places[0], [arguments.job, *arguments.settings])
        with claimed(folder, None):
            return _run_each(runs, places)
    except Occupied as reason:
        print(plain(f"dslc: {reason}"), file=sys.stderr)
        return WRONG_USAGE


def _run_with_others(runs: Sequence[Ready], rendezvous: str, arguments: argparse.Namespace) -> int:
    """Runs a training of which this host has a part."""
    from dslc.hosts import train_on_hosts
    from dslc.runtime.hosts.company import NotMet

    if len(runs) > 1:
        print("dslc: a sweep runs on one node; `--set` chooses one of its values", file=sys.stderr)
        return WRONG_USAGE
    try:
        outcome, report, folder = train_on_hosts(runs[0], rendezvous, arguments.out)
    except (Occupied, NotMet) as reason:
        print(plain(f"dslc: {reason}"), file=sys.stderr)
        return WRONG_USAGE
    return _ended(runs[0], outcome, report, folder, [arguments.job, *arguments.settings], rendezvous)


def _run_plan(arguments: argparse.Namespace, rendezvous: str) -> int:
    report = Report()
    hosts = bool(rendezvous) and not arguments.trial
    ready = prepare_plan(arguments.job, arguments.settings, report, profile=arguments.profile, hosts=hosts)
    show(report)
    if ready is None:
        return JOB_AT_FAULT
    if arguments.trial:
        return _try_each([ready])
    if rendezvous:
        return _run_with_others([ready], rendezvous, arguments)
    try:
        folder = make_folder(ready.program, arguments.out)
        # A plan takes no settings: the job in the run directory does.
        return run_one(ready, folder, [os.path.join(folder, "job.plt")])
    except Occupied as reason:
        print(plain(f"dslc: {reason}"), file=sys.stderr)
        return WRONG_USAGE


def _try_each(runs: Sequence[Ready]) -> int:
    """Tries the trainings of a sweep, one after another; returns the worst of their exit statuses."""
    from dslc.trial import tried

    status = GOOD
    for n, ready in enumerate(runs, 1):
        if len(runs) > 1:
            print(f"run {n} of {len(runs)}", flush=True)
        status = max(status, tried(ready))
    return status


def _run_each(runs: Sequence[Ready], places: Sequence[str]) -> int:
    """Runs the trainings of a sweep, one after another; returns the worst of their exit statuses. Raises Occupied."""
    for ready, place in zip(runs, places, strict=True):
        refuse_others(place, place, goes_on=ready.program.checkpoint.resume == "auto")
        refuse_run(place, ready.program)  # before the first of them trains
    status = GOOD
    for n, (ready, place) in enumerate(zip(runs, places, strict=True), 1):
        print(plain(f"run {n} of {len(runs)}: {os.path.relpath(place)}"))
        status = max(status, run_one(ready, place, [os.path.join(place, "job.plt")]))
        if status == INTERRUPTED:
            break
    return status


def run_one(ready: Ready, folder: str, again: Sequence[str]) -> int:
    """Runs one training, from its run directory to its exit status; `again`: its job and the settings that change it.
    Raises Occupied.
    """
    outcome, report = train(ready, folder, launch)
    return _ended(ready, outcome, report, folder, again)


def _ended(
    ready: Ready,
    outcome: Outcome,
    report: dict[str, Any] | None,
    folder: str,
    again: Sequence[str],
    rendezvous: str = "",
) -> int:
    """Says how a training ended and how to go on, and returns the exit status."""
    from dslc.measured import show_report

    if outcome.failure is not None:
        show_failure(outcome)
    if report and ready.program.profile:
        show_report(report)
    if outcome.done:
        return GOOD
    _show_how_to_go_on(ready, folder, again, rendezvous)
    return INTERRUPTED if outcome.failure is None else TRAINING_FAILED


def _show_how_to_go_on(ready: Ready, folder: str, again: Sequence[str], rendezvous: str) -> None:
    """Shows, after a training that ended early, the command that resumes from its newest checkpoint, if there is
    one.
    """
    from dslc.runtime.checkpoint.files import checkpoints_in, folder_of

    if checkpoints_in(folder_of(ready.program, folder)):
        job, *settings = again
        kept = [setting for setting in settings if not setting.startswith("checkpoint.resume")]
        words = ["dslc", "run", os.path.relpath(job), "--out", os.path.relpath(folder)]
        words += ["--rendezvous", rendezvous] if rendezvous else []
        for setting in (*kept, "checkpoint.resume=auto"):
            words += ["--set", setting]
        print(plain(f"to resume:  {shlex.join(words)}"), file=sys.stderr)
