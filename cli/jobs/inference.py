"""From a job and a checkpoint to ranks that evaluate or predict: shared by `dslc evaluate` and `dslc predict`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

from dslc.compiler.ir.program import EvaluateMode, PredictMode
from dslc.compiler.placement.layout import lay_out
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.blocks import CheckpointSpec
from dslc.dsl.language.calls import Pretrained
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.preferences import REFERENCES, ReferencedLoss
from dslc.dsl.language.registry import Call
from dslc.dsl.meaning.auto_fields import value_text
from dslc.dsl.meaning.load import LoadResult, load
from dslc.dsl.meaning.write import anchored
from dslc.dsl.plain import plain
from dslc.jobs.check_job import show
from dslc.jobs.prepare_run import Ready, launch_quietly, prepare, show_failure
from dslc.runs.checkpoints import (
    SelectedWeights,
    check_compatibility,
    select_weights,
)
from dslc.terminal.exit_codes import JOB_AT_FAULT, TRAINING_FAILED, CommandFailedError

_UNLIMITED = 2**62
_HELD_OUT_BY = {path: attrgetter(path) for path in ("train.seed", "data.validation", "data.test")}


def prepare_inference(
    loaded: LoadResult,
    asked: SelectedWeights | str | None,
    mode: type[EvaluateMode] | type[PredictMode],
    **arguments: Any,
) -> tuple[Ready, SelectedWeights]:
    """Returns the job as a program of that mode, with these arguments, and its checkpoint.

    Raises CommandFailedError.
    """
    report = Report()
    if loaded.job is None or loaded.report.errors:
        show(loaded.report)
        raise CommandFailedError(status=JOB_AT_FAULT)
    made = prepare(replace(loaded, job=_without_training(loaded.job)), report)
    show([each for each in report if each.severity == "error"])  # warnings are about a training
    if made is None:
        raise CommandFailedError(status=JOB_AT_FAULT)
    taken = asked if isinstance(asked, SelectedWeights) else select_weights(loaded.job, asked)
    check_compatibility(taken, made.compiled.analysis)
    program = replace(made.program, mode=mode(use=taken.path, **arguments))
    if program.data.split == "random" and arguments["split"] in ("validation", "test"):
        _warn_of_seen_samples(loaded.job, taken, arguments["split"])
    return replace(made, program=program), taken


def _warn_of_seen_samples(job: JobSpec, taken: SelectedWeights, split: str) -> None:
    """Warns if the run that wrote the weights held out other samples of the same source, or none."""
    run = os.path.dirname(taken.path) if taken.manifest is None else os.path.dirname(os.path.dirname(taken.path))
    written = os.path.join(run, "job.plt")
    trained = load(written).job if os.path.isfile(written) else None
    if trained is None or trained.data.source != anchored(job).data.source:
        return
    theirs = {path: value(trained) for path, value in _HELD_OUT_BY.items() if value(trained) != value(job)}
    if not getattr(trained.data, split):
        text = f"the training held out no samples for `{split}`, and has seen these"
    elif theirs:
        settings = " ".join(f"--set {path}={value_text(value)}" for path, value in theirs.items())
        text = f"the training held out other samples, and has seen most of these: `{settings}` takes its own"
    else:
        return
    print(plain(f"warning: {text}"), file=sys.stderr)


def _without_training(job: JobSpec) -> JobSpec:
    """Returns the job without what only a training needs: its checkpoints, promises and initial weights; the account of
    a training's memory; a global batch that the ranks can divide.
    """
    layout = Report().collect(lay_out(job))
    each = layout.sizes["data"] * layout.microbatches if layout else 1
    batch = max(each, job.data.batch // each * each)
    return replace(
        job,
        model=replace(job.model, weights=_needed_weights(job)),
        data=replace(job.data, batch=batch),
        train=replace(job.train, compile=False, on_spike=None),
        memory=replace(job.memory, limit=_UNLIMITED, recompute="none"),
        checkpoint=CheckpointSpec(),
        expect=(),
        sweep={},
    )


def _needed_weights(job: JobSpec) -> str | Call | None:
    """Returns how a checkpoint holds the weights; reads their file only if the loss refers to the start."""
    start, loss = job.model.start, job.model.loss
    if isinstance(loss, ReferencedLoss) and loss.reference in REFERENCES:
        return job.model.weights
    if start is None or start.quantize is None:
        return None
    return Pretrained(path="", quantize=start.quantize, span=start.span)


@contextlib.contextmanager
def run_inference(made: Ready, beside: str | None = None) -> Iterator[str]:
    """Yields the folder with the results of the ranks, which exists while the context lasts.

    Raises CommandFailedError.
    """
    command = "predict" if isinstance(made.program.mode, PredictMode) else "evaluate"
    folder, failed = tempfile.mkdtemp(prefix=f".dslc-{command}-", dir=beside), False
    try:
        outcome = launch_quietly(made.program, made.places, folder)
        failed = outcome.failure is not None
        if failed:
            show_failure(outcome, what=f"`{command}`")
            raise CommandFailedError(status=TRAINING_FAILED)
        yield folder
    finally:
        if not failed:  # its logs are to be read
            shutil.rmtree(folder)


def metrics(made: Ready) -> dict[str, Any]:
    """Evaluates, and returns the metrics over the validation split by name. Raises CommandFailedError."""
    from dslc.runtime.loop.tasks import EVALUATION

    with run_inference(made) as folder, open(os.path.join(folder, EVALUATION), encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found
