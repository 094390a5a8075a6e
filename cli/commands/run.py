"""`dslc run`: compiles, launches, trains, and leaves a run directory."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from dslc.compiler.ir.program import TrainMode
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.calls import SSH
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.load import LoadResult, load_each
from dslc.dsl.plain import plain, plain_lines
from dslc.dsl.show import render
from dslc.jobs.check_job import is_over_limit, presented, show
from dslc.jobs.choose_plan import chosen_text
from dslc.jobs.launcher_environment import NOT_STARTED, command
from dslc.jobs.plan_file_input import is_plan_file, prepare_plan
from dslc.jobs.prepare_run import ALONE, LaunchContext, Ready, check_batches, launch, prepare, show_failure, train
from dslc.launching.hosts import HostPaths, no_endpoint, tell_fault, train_with_others, wait_for_speaker
from dslc.launching.restart_detection import (
    folder_of,
    is_queue_job,
    is_training_done,
    resume_after_restart,
    was_stopped_by_user,
)
from dslc.runtime.checkpoint import files
from dslc.runtime.launchers.detect import worlds
from dslc.runtime.launchers.world import World
from dslc.sweeps.running import Runner, SweepTraining, one_after_another, run_sweep
from dslc.terminal.exit_codes import GOOD, INTERRUPTED, JOB_AT_FAULT, TRAINING_FAILED, WRONG_USAGE, CommandFailedError

if TYPE_CHECKING:
    from dslc.probe.child import ChildAnswer
    from dslc.runtime.measure.report import RunReport
    from dslc.runtime.process.failure import Outcome

_PROFILES = {"": "", "profile": "--profile", "trace": "--profile=trace"}
_ONE_NODE = "a sweep runs on one node; `--set` chooses one of its values"


def main(arguments: argparse.Namespace) -> int:
    for option, value in (("--out", arguments.out), (_PROFILES[arguments.profile], arguments.profile)):
        if arguments.trial and value:
            raise CommandFailedError(f"`--try` leaves nothing, and `{option}` asks for something: leave one out")
    if arguments.parallel > 1 and (arguments.trial or is_plan_file(arguments.job)):
        raise CommandFailedError("`--parallel` is for the trainings of a job's `sweep`: leave it out")
    rendezvous = arguments.rendezvous or os.environ.get("DSLC_RENDEZVOUS", "")
    if rendezvous and not arguments.trial and (bad_endpoint := no_endpoint(rendezvous)):
        option_name = "--rendezvous" if arguments.rendezvous else "DSLC_RENDEZVOUS"
        fault = plain(f"{option_name} is `{rendezvous}`, and `{bad_endpoint}` is not HOST or HOST:PORT")
        help = "the name or address of one of the hosts: node-a, node-a:29400, [fd00::1]:29400"
        raise CommandFailedError(f"{fault}\nhelp: {help}")
    context = ALONE if arguments.trial else LaunchContext(hosts=bool(rendezvous), environ=os.environ)
    if is_plan_file(arguments.job):
        return _run_plan(arguments, rendezvous, context)
    places = _worlds(context)
    load_result, combinations = load_each(arguments.job, arguments.settings)
    report = Report()
    profile, trace = _measurements(arguments)
    jobs = [
        prepare(combination, report, profile=profile, trace=trace, around=context)
        for combination in combinations
        if not is_over_limit(report)
    ]
    if not _show_findings(report, places, arguments, rendezvous) or load_result.job is None:
        return JOB_AT_FAULT
    call = _ssh_of(load_result.job, arguments, rendezvous)
    if call is not None:
        return _start_by_ssh(call, arguments, [job for job in jobs if job is not None])
    runs = [resume_after_restart(job) for job in jobs if job is not None]
    if was_stopped_by_user(runs[0], arguments.out):
        # The status ends the Job, and does not only give this pod up.
        raise CommandFailedError("it was stopped by `dslc stop`: submit it again to go on", JOB_AT_FAULT)
    if is_training_done(runs[0], arguments.out):
        raise CommandFailedError(plain(f"the training has ended without this pod: {arguments.out}"), GOOD)
    if not _check_each(runs, places, arguments, rendezvous):
        return JOB_AT_FAULT
    if not places or places[0].speaks:
        _print_choices(runs)
    if arguments.trial:
        return _try_each(runs)
    if rendezvous or _has_peers(runs[0]):
        return _run_with_others(runs, rendezvous, arguments)
    runner = _runner(load_result, runs, arguments.parallel)
    folder = folder_of(runs[0], arguments.out)
    if not load_result.combinations:
        return run_one(runs[0], folder, _repeat_arguments(arguments, folder))
    repeat_command = [
        "dslc",
        "run",
        arguments.job,
        *(word for setting in arguments.settings for word in ("--set", setting)),
    ]
    repeat_command += ["--parallel", str(arguments.parallel)] if arguments.parallel > 1 else []
    return run_sweep(load_result, runs, folder, runner, repeat_command)


def _print_choices(runs: Sequence[Ready]) -> None:
    """Prints what was chosen for each training that leaves fields to the compiler."""
    for run in runs:
        if choice := chosen_text(run.compiled.analysis):
            print(plain(choice))


def _ssh_of(job: JobSpec, arguments: argparse.Namespace, rendezvous: str) -> SSH | None:
    """Returns how `ssh` starts the job on its hosts; None for a job that this process trains."""
    call = job.launch.with_
    return call if isinstance(call, SSH) and not rendezvous and not arguments.trial else None


def _start_by_ssh(call: SSH, arguments: argparse.Namespace, trainings: Sequence[Ready]) -> int:
    """Has `ssh` start the training on each host of the job, with the words of this command."""
    from dslc.launching.ssh_launch import run_by_ssh

    if len(trainings) > 1:
        raise CommandFailedError(_ONE_NODE)
    words = [os.path.abspath(arguments.job), *([_PROFILES[arguments.profile]] if arguments.profile else [])]
    words += ["--out", os.path.abspath(os.path.expanduser(arguments.out))] if arguments.out else []
    for setting in arguments.settings:
        words += ["--set", setting]
    return run_by_ssh(call, words, trainings[0])


def _run_with_others(runs: Sequence[Ready], rendezvous: str, arguments: argparse.Namespace) -> int:
    """Runs a training in which this process takes part."""
    world = runs[0].world
    speaks = world is None or world.speaks
    if len(runs) > 1:
        if speaks:
            print(f"dslc: {_ONE_NODE}", file=sys.stderr)
        wait_for_speaker(world)
        return WRONG_USAGE

    def then(outcome: Outcome, report: RunReport | None, folder: str) -> int:
        if not speaks:
            return _status(outcome)
        repeat_arguments = _repeat_arguments(arguments, folder)
        return _report_outcome(runs[0], outcome, report, folder, repeat_arguments, rendezvous)

    paths = HostPaths(job=arguments.job, rendezvous=rendezvous, out=arguments.out)
    return train_with_others(runs[0], paths, then)


def _worlds(context: LaunchContext) -> list[World]:
    """Returns the places of this process; the first one counts."""
    return list(worlds(context.environ).values()) if context.environ is not None else []


def _has_peers(ready: Ready) -> bool:
    return ready.world is not None and ready.world.size > 1


def _show_findings(report: Report, places: Sequence[World], arguments: argparse.Namespace, rendezvous: str) -> bool:
    """Shows what was found, once where a launcher has started several processes like this one. Returns False if the job
    cannot run.
    """
    speaks = all(world.speaks for world in places[:1])
    if speaks:
        show(report)
    if report.errors and places and places[0].size > 1:
        paths = HostPaths(job=arguments.job, rendezvous=rendezvous, out=arguments.out)
        is_not_started = any(
            error.code == NOT_STARTED for error in report.errors
        )  # each process finds it, and none meets
        if is_not_started or not tell_fault(places[0], paths, render(presented(report), color=False)):
            wait_for_speaker(places[0])
    return not report.errors


def _check_each(runs: Sequence[Ready], places: Sequence[World], arguments: argparse.Namespace, rendezvous: str) -> bool:
    """Looks for the fullest micro-batch of each training, and shows what was found. Returns False if one does not fit;
    the other processes of a launcher wait at the rendezvous, and learn of it there.
    """
    report = Report()
    answers: dict[str, ChildAnswer] = {}
    for run in runs:
        check_batches(run, report, answers)
    return _show_findings(report, places, arguments, rendezvous)


def _measurements(arguments: argparse.Namespace) -> tuple[bool, bool]:
    """Returns whether the ranks record a profile, and a trace."""
    return arguments.profile == "profile", arguments.profile == "trace"


def _run_plan(arguments: argparse.Namespace, rendezvous: str, context: LaunchContext) -> int:
    report, places = Report(), _worlds(context)
    profile, trace = _measurements(arguments)
    ready = prepare_plan(arguments.job, arguments.settings, report, profile=profile, trace=trace, around=context)
    if not _show_findings(report, places, arguments, rendezvous) or ready is None:
        return JOB_AT_FAULT
    call = _ssh_of(ready.compiled.analysis.job, arguments, rendezvous)
    if call is not None:
        if len(call.hosts) == 1:  # whose command says `--set launch.with=local()`, which no plan takes
            raise CommandFailedError(
                plain(f"{arguments.job}: `ssh(…)` with one host takes the job: give `run` its file")
            )
        return _start_by_ssh(call, arguments, [ready])
    if not _check_each([ready], places, arguments, rendezvous):
        return JOB_AT_FAULT
    if arguments.trial:
        return _try_each([ready])
    ready = resume_after_restart(ready)
    if rendezvous or _has_peers(ready):
        return _run_with_others([ready], rendezvous, arguments)
    folder = folder_of(ready, arguments.out)
    return run_one(ready, folder, _repeat_arguments(arguments, folder))


def _repeat_arguments(arguments: argparse.Namespace, folder: str) -> list[str]:
    """Returns the job of a command that goes on with this one's training, and the settings that change it. A plan takes
    no settings: the job in the run directory does.
    """
    if is_plan_file(arguments.job):
        return [os.path.join(folder, "job.plt")]
    return [arguments.job, *arguments.settings]


def _try_each(runs: Sequence[Ready]) -> int:
    """Tries the trainings of a sweep, one after another; returns the worst of their exit statuses."""
    from dslc.jobs.smoke_test import try_training

    status = GOOD
    for n, run in enumerate(runs, 1):
        if len(runs) > 1:
            print(f"run {n} of {len(runs)}", flush=True)
        status = max(status, try_training(run))
    return status


def _runner(load_result: LoadResult, runs: Sequence[Ready], parallel: int) -> Runner:
    """Returns the runner of a sweep's trainings, `parallel` at once. Raises CommandFailedError if that cannot be."""
    if parallel <= 1:
        return one_after_another(_run_of_sweep)
    from dslc.sweeps.side_by_side import NotHeld, at_once, places_for

    try:
        if not load_result.combinations:
            raise NotHeld("the job has no `sweep`, of which several trainings could run at once")
        return at_once(places_for(runs, min(parallel, len(runs))))
    except NotHeld as reason:
        raise CommandFailedError(plain(f"--parallel {parallel}: {reason}")) from None


def _run_of_sweep(training: SweepTraining) -> int:
    return run_one(training.ready, training.folder, [])


def run_one(ready: Ready, folder: str, repeat_arguments: Sequence[str]) -> int:
    """Runs one training, from its run directory to its exit status. `repeat_arguments`: its job and the settings that
    change it; empty if another message says how to go on. Raises FolderInUseError.
    """
    outcome, report = train(ready, folder, partial(launch, in_group=ready.world is not None))
    return _report_outcome(ready, outcome, report, folder, repeat_arguments)


def _report_outcome(
    ready: Ready,
    outcome: Outcome,
    report: RunReport | None,
    folder: str,
    repeat_arguments: Sequence[str],
    rendezvous: str = "",
) -> int:
    """Says how a training ended and how to go on, and returns the exit status."""
    from dslc.runs.report_table import show_report
    from dslc.runs.trace_file import write_trace

    if outcome.failure is not None:
        show_failure(outcome)
    if report and ready.program.mode == TrainMode(profile=True):
        show_report(report)
    mode = ready.program.mode
    if report and isinstance(mode, TrainMode) and mode.trace:
        print(plain_lines(write_trace(ready.compiled.graph, ready.compiled.plan, folder, mode.traced)))
    failure = outcome.failure
    # The command that resumes would be the one that has just been refused.
    is_refused = failure is not None and failure.step == 0 and ready.program.checkpoint.resume != "none"
    if (
        not outcome.is_complete
        and repeat_arguments
        and not is_refused
        and not (failure is not None and failure.goes_on)
    ):
        _show_how_to_go_on(ready, folder, repeat_arguments, rendezvous)
    return _status(outcome)


def _status(outcome: Outcome) -> int:
    if outcome.failure is not None:
        return TRAINING_FAILED
    return GOOD if outcome.is_complete else INTERRUPTED


def _show_how_to_go_on(ready: Ready, folder: str, repeat_arguments: Sequence[str], rendezvous: str) -> None:
    """Shows, after a training that ended early, the command that resumes from its newest checkpoint, if any."""
    if files.checkpoints_in(files.folder_of(ready.program, folder)):
        job, *settings = repeat_arguments
        kept_settings = [setting for setting in settings if not setting.startswith("checkpoint.resume")]
        layout = ready.compiled.analysis.layout
        restarts = ready.compiled.analysis.job.launch.restarts
        begin = command(ready.world.word, layout, os.path.relpath(job), restarts) if ready.world is not None else None
        is_submitted = is_queue_job(ready)
        begin = ["dslc", "submit", os.path.relpath(job)] if is_submitted else begin
        words = [*(begin or ["dslc", "run", os.path.relpath(job)]), "--out", os.path.relpath(folder)]
        by_ssh = isinstance(ready.compiled.analysis.job.launch.with_, SSH)
        words += ["--rendezvous", rendezvous] if rendezvous and not by_ssh and not is_submitted else []
        for setting in (*kept_settings, "checkpoint.resume=auto"):
            words += ["--set", setting]
        print(plain(f"to resume:  {shlex.join(words)}"), file=sys.stderr)
