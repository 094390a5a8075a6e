"""Runs the trainings of a sweep, one after another or several at once, and goes on with a sweep that was killed.

Model: each combination has a sub-folder, which is a run directory of its own. A training is not done again if its
`status.json` says that it is done, and its `job.plt` matches the combination. An unfinished one resumes from its newest
checkpoint, or begins again without one.

Contract: a training that fails does not end the others. Ctrl-C ends running trainings after their step, and begins no
more. At the end, however it comes, `sweep.csv` and the table are made from the folder.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dslc.compiler.facts.untrusted_files import read_text
from dslc.compiler.ir.number_text import path_text
from dslc.dsl.bounds import BYTES
from dslc.dsl.meaning.load import LoadResult
from dslc.dsl.meaning.write import anchored, write
from dslc.dsl.plain import plain
from dslc.jobs.prepare_run import Ready, folders_of
from dslc.runs.run_folder import FolderInUseError, claim_folder, refuse_others
from dslc.runs.sweep_file import write_sweep
from dslc.runtime.process.run_status import read_status
from dslc.sweeps.table import show_sweep, write_csv
from dslc.terminal.exit_codes import GOOD, INTERRUPTED, TRAINING_FAILED, WRONG_USAGE


@dataclass(frozen=True, kw_only=True)
class SweepTraining:
    """One training of a sweep: `number` of `many`, in a sub-folder. `done`: it was trained before."""

    number: int
    many: int
    name: str
    folder: str
    ready: Ready
    done: bool = False

    @property
    def head(self) -> str:
        return f"run {self.number} of {self.many}: {path_text(self.folder)}"


Runner = Callable[[Sequence[SweepTraining]], int]


def run_sweep(loaded: LoadResult, runs: Sequence[Ready], folder: str, run: Runner, again: Sequence[str]) -> int:
    """Runs the unfinished trainings of a sweep by `run`, which returns the worst of the exit statuses. Shows the table,
    and if trainings remain, the command to go on: `again` (the command without --out). Raises FolderInUseError before
    the first training.
    """
    with claim_folder(folder, None):
        places = trainings(loaded, runs, folder)
        write_sweep(folder, loaded, [each.name for each in places], runs[0].program)
        for each in places:
            if each.done:
                print(plain(f"{each.head}: done already"))
        try:
            status = run([each for each in places if not each.done])
        finally:
            written = write_csv(folder)
            show_sweep(folder)
        print(plain(f"the table is in {path_text(written)}"))
        if status != GOOD:
            words = shlex.join([*again, "--out", os.path.relpath(folder)])
            print(plain(f"to go on with what is left:  {words}"), file=sys.stderr)
        return status


def one_after_another(train: Callable[[SweepTraining], int]) -> Runner:
    """Returns the runner of trainings by `train`, which returns the exit status of one and raises FolderInUseError."""

    def run(trainings: Sequence[SweepTraining]) -> int:
        status = GOOD
        for each in trainings:
            print(plain(each.head), flush=True)
            try:
                found = train(each)
            except FolderInUseError as reason:
                print(plain(f"dslc: {reason}"), file=sys.stderr)
                found = WRONG_USAGE
            except OSError as error:
                print(plain(f"dslc: {each.name}: {error}"), file=sys.stderr)
                found = TRAINING_FAILED
            status = max(status, found)
            if status == INTERRUPTED:
                break
        return status

    return run


def trainings(loaded: LoadResult, runs: Sequence[Ready], folder: str) -> list[SweepTraining]:
    """Returns the trainings of a sweep; begun ones go on. Raises FolderInUseError if a folder holds something else."""
    places = [place for place, _ in folders_of(loaded, [ready.loaded for ready in runs], folder)]
    found = []
    for number, (place, ready) in enumerate(zip(places, runs, strict=True), 1):
        resumes = ready.program.checkpoint.resume
        refuse_others(place, path_text(place), goes_on=resumes == "auto")
        done = False
        if os.path.exists(os.path.join(place, "plan.json")):
            same = _is_run_of_job(place, ready)
            if not same and resumes != "auto":
                raise FolderInUseError(
                    f"{path_text(place)} holds a run of another job, or of this one with other settings: `--set "
                    "checkpoint.resume=auto` continues it; otherwise name another folder with --out, or remove it"
                )
            told = read_status(place)
            done = same and told is not None and told.state == "done"
            checkpoint = replace(ready.program.checkpoint, resume="auto")
            ready = replace(ready, program=replace(ready.program, checkpoint=checkpoint))
        found.append(
            SweepTraining(
                number=number, many=len(runs), name=os.path.basename(place), folder=place, ready=ready, done=done
            )
        )
    return found


def _is_run_of_job(place: str, ready: Ready) -> bool:
    assert ready.loaded.job is not None
    try:
        return read_text(os.path.join(place, "job.plt"), BYTES.most) == write(anchored(ready.loaded.job))
    except (OSError, ValueError):
        return False
