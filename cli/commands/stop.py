"""`dslc stop`: ends a run after its step, with a checkpoint where the job has them, from any machine that sees its
folder; a job that waits in SLURM's queue is cancelled. A folder of runs, or of a sweep, is stopped whole.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dslc.commands.status import follow
from dslc.dsl.plain import plain
from dslc.launching.run_state import NAME, RunState, Submission, command, is_own_submission, run_states, runs_in
from dslc.runtime.process.run_status import RunStatus, ask_to_stop, read_status, write_status
from dslc.terminal.exit_codes import GOOD, TRAINING_FAILED, WRONG_USAGE


def main(arguments: argparse.Namespace) -> int:
    folder = os.path.normpath(arguments.run)
    folders = runs_in(folder) if os.path.isdir(folder) else []
    runs = run_states(folders)
    live_runs = [run for run in runs if not run.has_ended and run.state != "unknown"]
    if not live_runs:
        reason = "it runs no more" if folders else "there is no run in it"
        state_text = f"{runs[0].line()}" if len(runs) == 1 else reason
        print(
            plain(f"dslc: {folder}: {state_text if os.path.isdir(folder) else 'there is no such folder'}"),
            file=sys.stderr,
        )
        return GOOD if folders else WRONG_USAGE
    # Those that wait first, or one of them would begin when another ends.
    stopped_folders = [run.folder for run in sorted(live_runs, key=lambda run: run.state != "waiting") if _stop(run)]
    if len(stopped_folders) < len(live_runs):
        return TRAINING_FAILED
    if not arguments.no_wait:
        follow(stopped_folders)
    return GOOD


def _stop(run: RunState) -> bool:
    """Stops one run, or asks it to; returns False, with the reason shown, if that cannot be."""
    job = run.submitted
    if job is not None and (run.state == "waiting" or _is_unseen(run, job)):
        words = ["scancel", job.job] if job.cluster == "slurm" else _delete(job)
        if not is_own_submission(run.folder, job):
            owner_text = f"another user wrote {os.path.join(run.folder, NAME)}, which may name any job"
            print(plain(f"dslc: {owner_text}: `{' '.join(words)}` stops it, if it is the right one"), file=sys.stderr)
            return False
        if command(words) is None:
            failure = f"dslc: {run.folder}: `{' '.join(words)}` failed, or is not to be had on this machine"
            print(plain(failure), file=sys.stderr)
            return False
        write_status(run.folder, RunStatus(state="stopped", step=run.step, steps=run.steps, asked="dslc stop"))
        return True
    ask_to_stop(run.folder)
    print(plain(f"{os.path.relpath(run.folder)}: asked to stop after its step"), flush=True)
    return True


def _is_unseen(run: RunState, job: Submission) -> bool:
    """True of a training whose pods run, and have written nothing here: they see another run directory."""
    status = read_status(run.folder)
    return job.cluster == "kubernetes" and not run.has_ended and (status is None or status.state == "waiting")


def _delete(submission: Submission) -> Sequence[str]:
    """Returns the command that deletes the job's resources in Kubernetes; its pods end as by one Ctrl-C."""
    space = ["--namespace", submission.space] if submission.space else []
    return [
        "kubectl",
        "delete",
        f"{submission.kind},service,configmap,secret",
        "--selector",
        f"dslc-run={submission.job}",
        *space,
    ]
