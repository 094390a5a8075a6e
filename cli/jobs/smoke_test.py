"""`dslc run --try`: a job's first steps, an evaluation, a checkpoint, and a resume from it, without leaving a file.

Model: the ranks train the job as it is for `STEPS` steps, evaluate, and save; new ranks resume from that checkpoint and
take one more step. Only the times differ: when it logs, evaluates and saves. What a training would find hours later (an
evaluation that fails, state that cannot be written or read) shows in the first minute.

Contract: everything lies in a temporary folder, which is removed; it stays, and is named, if the ranks fail.

Limits: a checkpoint that the job resumes from is not read, and its `checkpoint.dir` is not touched. Its loggers, which
may write elsewhere, are not called. The folder is where Python puts temporary files (`TMPDIR`), which may be another
disk than the training's.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace

from dslc.compiler.ir.number_text import byte_text, time_text
from dslc.compiler.ir.program import JobProgram
from dslc.dsl.plain import plain
from dslc.dsl.words import plural
from dslc.jobs.prepare_run import Ready, launch_quietly, show_failure
from dslc.runtime.checkpoint.files import checkpoints_in
from dslc.runtime.process.records import Record, overview_numbers, read_metrics
from dslc.terminal.exit_codes import GOOD, TRAINING_FAILED

STEPS = 3


def try_training(ready: Ready) -> int:
    """Tries a training, prints the parts that were tried, and returns the exit status."""
    folder, status = tempfile.mkdtemp(prefix="dslc-try-"), TRAINING_FAILED
    try:
        status = _run_trial(ready, folder)
    except KeyboardInterrupt:
        status = GOOD  # nothing of it is to be read
        raise
    finally:
        if status != TRAINING_FAILED:
            shutil.rmtree(folder)
    return status


def _run_trial(ready: Ready, folder: str) -> int:
    job = ready.program
    first = max(1, min(STEPS, job.steps - 1))
    last = min(first + 1, job.steps)
    if not _train(ready, _shortened(job, first, resume="none"), folder, "the first steps"):
        return TRAINING_FAILED
    lines = read_metrics(folder)
    steps = [line for line in lines if line["split"] == "train"]
    said = f"{plural(first, 'step')} on {plural(job.world_size, 'rank')}, {time_text(steps[-1]['seconds'])}"
    print(plain(f"tried {said}: {_numbers(steps[-1])}"))
    evaluated = next((line for line in lines if line["split"] not in ("train", "test")), None)
    if evaluated is not None:
        samples = plural(job.data.validation_samples, "sample")
        print(plain(f"tried an evaluation over {samples}: {_numbers(evaluated)}"))
    (checkpoint,) = checkpoints_in(os.path.join(folder, "checkpoints"))
    size = sum(entry.stat().st_size for entry in os.scandir(checkpoint))
    print(f"tried a checkpoint: {byte_text(size)}")
    if not _train(ready, _shortened(job, last, resume="auto"), folder, "the resume from a checkpoint"):
        return TRAINING_FAILED
    more = f"step {last}: {_numbers(read_metrics(folder)[-1])}" if last > first else "the job has no further step"
    print(plain(f"tried to resume from it, {more}"))
    print(plain(f"the job trains, of {plural(job.steps, 'step')}; nothing of this trial is left"))
    return GOOD


def _shortened(job: JobProgram, steps: int, resume: str) -> JobProgram:
    checkpoint = replace(job.checkpoint, every=steps, seconds=0.0, keep=1, folder="", resume=resume)
    return replace(
        job,
        steps=steps,
        log_every=1,
        evaluate_every=0,
        evaluate_start=False,
        evaluate_training=False,
        max_time=None,
        on_spike=None,
        tensorboard=False,
        loggers=(),
        checkpoint=checkpoint,
    )


def _train(ready: Ready, program: JobProgram, folder: str, what: str) -> bool:
    """Runs the ranks; returns false, with the failure shown, if they fail."""
    outcome = launch_quietly(program, ready.places, folder)
    if outcome.failure is not None:
        show_failure(outcome, before=f"{what}: ")
    return outcome.failure is None


def _numbers(record: Record) -> str:
    """Formats the numbers of a record: `loss 2.31, accuracy 0.12`."""
    return ", ".join(f"{name} {_number(value)}" for name, value in overview_numbers(record) if name != "lr")


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
