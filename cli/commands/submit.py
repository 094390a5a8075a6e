"""`dslc submit`: hands a job to SLURM or Kubernetes, after all that `run` would refuse; a sweep as one array."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dslc.compiler.compile import compile_plan
from dslc.compiler.facts.untrusted_files import write_private
from dslc.compiler.ir.program import TrainMode
from dslc.dsl.diagnostics import Report
from dslc.dsl.files import write_file
from dslc.dsl.language.calls import Kubernetes, Slurm
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.load import LoadResult, load_each
from dslc.dsl.plain import plain
from dslc.jobs.check_job import inspect_for_run, is_over_limit, show
from dslc.jobs.choose_plan import with_choice
from dslc.jobs.plan_file_input import is_plan_file
from dslc.jobs.prepare_run import Ready, folders_of, place_ranks, write_run_directory
from dslc.jobs.worst_batch import check_worst_batches
from dslc.launching.run_state import Submission, write_submission
from dslc.launching.slurm_requeue import forget
from dslc.launching.slurm_script import slurm_script, warning_seconds
from dslc.runs.run_folder import claim_folder, make_folder, refuse_others
from dslc.runs.sweep_file import write_sweep
from dslc.runtime.process.run_status import RunStatus, write_status
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT, CommandFailedError

_NO_TOKEN = "see submit"  # in a manifest that is only shown; too short to be taken
_AUTO = "checkpoint.resume=auto"


@dataclass(frozen=True, kw_only=True)
class SubmittedRuns:
    """Trainings that are handed over together, and the folder of each."""

    runs: Sequence[Ready]
    folder: str
    folders: Sequence[str]
    name: str


def main(arguments: argparse.Namespace) -> int:
    if is_plan_file(arguments.job):
        reason = "submits a job, which each node compiles: give it the `.plt` file"
        raise CommandFailedError(plain(f"{arguments.job}: `dslc submit` {reason}"))
    report = Report()
    preparation = _prepared(arguments.job, arguments.settings, report)
    if preparation is not None and not report.errors:
        _check(preparation[1], report)
    show(report)
    if preparation is None or report.errors:
        return JOB_AT_FAULT
    load_result, runs, combinations = preparation
    folder = os.path.abspath(os.path.expanduser(arguments.out or os.path.join("runs", runs[0].program.job, "<time>")))
    places = [place for place, _ in folders_of(load_result, combinations, folder)]
    name = os.path.splitext(os.path.basename(arguments.job))[0]
    if not (_names_are_plain(arguments.job, places, report) and _options_fit(runs, places, name, report)):
        show(report)
        return JOB_AT_FAULT
    if not arguments.dry_run:
        folder = make_folder(runs[0].program, arguments.out)
    folders = [place for place, _ in folders_of(load_result, combinations, folder)]
    submitted_runs = SubmittedRuns(runs=runs, folder=folder, folders=folders, name=name)
    if not arguments.dry_run and folders != [folder]:
        write_sweep(folder, load_result, [os.path.basename(place) for place in folders], runs[0].program)
    if isinstance(runs[0].compiled.analysis.job.launch.with_, Kubernetes):
        return _to_kubernetes(submitted_runs, dry=arguments.dry_run)
    return _to_slurm(submitted_runs, dry=arguments.dry_run)


def _prepared(
    path: str, settings: Sequence[str], report: Report
) -> tuple[LoadResult, list[Ready], list[LoadResult]] | None:
    """Returns the trainings of a job, which go on where they were when they are started again."""
    load_result, combinations = load_each(path, settings)
    first_job = combinations[0].job
    if first_job is not None and first_job.checkpoint.resume is None and first_job.checkpoint.is_enabled:
        load_result, combinations = load_each(path, [*settings, _AUTO])
    runs = []
    for combination in combinations:
        ready = _ready(combination, report)
        if is_over_limit(report) or ready is None:
            return None
        runs.append(ready)
    return load_result, runs, list(combinations)


def _ready(load_result: LoadResult, report: Report) -> Ready | None:
    """Compiles a job for the machines that it will find, which are not this one; returns None with the reasons in the
    report, where warnings that block a run are errors.
    """
    counts = inspect_for_run(load_result, report, trace=True)
    if not report.errors:
        check_worst_batches(counts, report)
    if report.errors or not counts:
        return None
    compilation = compile_plan(counts[min(counts)])  # of an elastic job: the fewest nodes have the most to do each
    return place_ranks(with_choice(load_result, compilation.analysis), compilation, TrainMode())


def _check(runs: Sequence[Ready], report: Report) -> None:
    """Reports why trainings cannot be handed over."""
    job = runs[0].compiled.analysis.job
    _check_launcher(job, report)
    if job.checkpoint.resume not in (None, "auto"):
        report.add(
            "E0818",
            "a submitted job goes on from its own newest checkpoint, and this one names another to begin with",
            job.checkpoint.value_span("resume"),
            help=f"copy it to `checkpoints/` in the run directory, and say `resume = auto`: {job.checkpoint.resume}",
        )
    call = job.launch.with_
    if isinstance(call, Slurm) and call.time is not None and runs[0].program.checkpoint.is_enabled:
        seconds = warning_seconds(runs)
        if 2 * seconds > call.time:
            report.add(
                "E0819",
                f"SLURM would warn {seconds} s before the time limit, which some steps and a checkpoint take, and the "
                f"limit is {call.time:g} s",
                call.value_span("time"),
                help=f'{2 * seconds / 60:.0f} min are the least; or `options = ["--signal=USR1@…"]` and no `time`',
            )


def _names_are_plain(job: str, folders: Sequence[str], report: Report) -> bool:
    """Reports the first name with control characters that a cluster's script would hold: bash runs a second line."""
    named_texts = [("the job's file name", os.path.basename(job)), ("the current folder", os.getcwd())]
    named_texts += [("the path of Python", sys.executable), *(("a run directory", folder) for folder in folders)]
    for subject, text in named_texts:
        if plain(text) != text:
            message = f"{subject}, `{plain(text)}`, has control characters, which would reach the cluster's script"
            report.add("E0836", message, None, help="rename it, or name another run directory with --out")
            return False
    return True


def _options_fit(runs: Sequence[Ready], folders: Sequence[str], name: str, report: Report) -> bool:
    """Reports the first option that sets a field which a resource of Kubernetes cannot have."""
    from dslc.launching.manifest import OptionError, manifest

    call = runs[0].compiled.analysis.job.launch.with_
    if isinstance(call, Kubernetes):
        try:
            manifest(runs, folders, name, lambda: _NO_TOKEN)
        except OptionError as error:
            help = "`spec.path=value`, as `kubectl explain job.spec` shows the fields"
            report.add("E0837", str(error), call.value_span("options"), help=help)
            return False
    return True


def _check_launcher(job: JobSpec, report: Report) -> None:
    call = job.launch.with_
    if not isinstance(call, Slurm | Kubernetes):
        report.add(
            "E0817",
            f"`dslc submit` hands a job to SLURM or Kubernetes, and this one says `{call.word}()`",
            job.launch.value_span("with_"),
            help="`--set launch.with=slurm()`; `dslc run` starts the others",
        )
    if isinstance(call, Kubernetes) and not call.volumes:
        report.add(
            "W0817",
            "without a volume, weights, metrics and checkpoints are gone when the pods are",
            job.launch.value_span("with_"),
            help='`volumes = ["claim:/runs"]` mounts a persistent volume claim, which holds the run directory',
        )


def _to_slurm(submitted: SubmittedRuns, *, dry: bool) -> int:
    script = slurm_script(submitted.runs, submitted.folders, submitted.folder, submitted.name)
    if dry:
        print(script, end="")
        return GOOD
    path = os.path.join(submitted.folder, "submit.sh")
    _write_run_directories(submitted)
    write_file(path, script)
    answer = _hand_over(["sbatch", "--parsable", path], f"`sbatch {path}` where SLURM is")
    number = answer.strip().partition(";")[0]
    for n, folder in enumerate(submitted.folders):
        job = f"{number}_{n}" if len(submitted.folders) > 1 else number
        write_submission(folder, Submission(cluster="slurm", job=job, script=path))
    _say_where(submitted, number)
    return GOOD


def _to_kubernetes(submitted: SubmittedRuns, *, dry: bool) -> int:
    from dslc.launching.manifest import JOBSET, folder_in_pod, is_elastic, manifest, name_of, text_of

    if dry:
        print(text_of(manifest(submitted.runs, submitted.folders, submitted.name, lambda: _NO_TOKEN)), end="")
        return GOOD
    path = os.path.join(submitted.folder, "submit.json")
    _write_run_directories(submitted)
    text = text_of(manifest(submitted.runs, submitted.folders, submitted.name, lambda: secrets.token_hex(32)))
    write_private(path, text, replace=True)
    call = submitted.runs[0].compiled.analysis.job.launch.with_
    assert isinstance(call, Kubernetes)
    for folder in submitted.folders:
        submission = Submission(
            cluster="kubernetes",
            job=name_of(submitted.name, folder),
            script=path,
            space=call.namespace or "",
            kind="jobset" if JOBSET in call.options else "job",
            elastic=is_elastic(submitted.runs[0]),
        )
        write_submission(folder, submission)
    _hand_over(["kubectl", "apply", "--filename", path], f"`kubectl apply --filename {path}` where it is")
    _say_where(submitted, name_of(submitted.name, submitted.folders[0]))
    if folder_in_pod(call, submitted.folder) != submitted.folder:
        print(plain(f"in the pods the run directory is {folder_in_pod(call, submitted.folder)}"))
    return GOOD


def _hand_over(words: Sequence[str], instead: str) -> str:
    """Shows and runs a command of the cluster, and returns its output. Raises CommandFailedError."""
    print(plain(shlex.join(words)), flush=True)
    try:
        process = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        raise CommandFailedError(plain(f"there is no `{words[0]}` here: type {instead}")) from None
    if process.returncode:
        raise CommandFailedError(f"{words[0]} refuses the job: {process.stderr.strip()}")
    return process.stdout


def _say_where(submitted: SubmittedRuns, job: str) -> None:
    place = os.path.relpath(submitted.folder)
    print(plain(f"job {job}: {place}"))
    print(plain(f"where it stands:  dslc status {shlex.quote(place)}"))


def _write_run_directories(submitted: SubmittedRuns) -> None:
    """Writes the job of each training as resolved. Raises FolderInUseError."""
    for ready, folder in zip(submitted.runs, submitted.folders, strict=True):
        refuse_others(folder, folder, goes_on=True)
        with claim_folder(folder, ready.program):
            write_run_directory(ready, folder)
            forget(folder)
            write_status(folder, RunStatus(state="waiting", steps=ready.program.steps))
    if submitted.folders != [submitted.folder]:
        with claim_folder(submitted.folder, None):
            pass  # its lock file says that it is a sweep's
