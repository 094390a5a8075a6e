"""Explains, after the failure, why a user's own loss, or a metric beside it, failed on targets that are not classes.

Model: targets of `cross_entropy` are checked against the classes as they are fetched (data/samples.py). A user's loss
may use whole numbers in any way, so nothing is refused beforehand. If it fails with an index error, the targets of this
rank in the step are fetched again and searched; this needs no GPU, whose kernels assert without a message. The finding
is added to the exception as a note.

Contract: nothing here raises, and a training that does not fail pays nothing.

Limits: if a data set makes its targets anew each time (W0610) they may differ from those that failed.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

from torch import Tensor

from dslc.compiler.ir.program import DataStep, JobProgram, RankPlace
from dslc.runtime.data.sampler import micro_batches, split_indices, steps_per_epoch
from dslc.runtime.data.samples import Splits, first_out_of_range
from dslc.runtime.data.splits import sample_name
from dslc.runtime.loop import evaluate
from dslc.runtime.process.error_text import causes, error_text

_INDEX = re.compile(r"out of (bounds|range)|device-side assert|[Cc]lass values|invalid for input of size", re.ASCII)


def explain(error: BaseException, job: JobProgram, place: RankPlace, splits: Splits, step: int) -> None:
    """Adds to `error`, which ended `step` (from 1), the first target that is no class, if it may be the cause."""
    split = next(
        (
            str(frame.f_locals["split"])
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_globals is vars(evaluate) and "split" in frame.f_locals
        ),
        "",
    )
    *_, error = causes(error)
    outputs, about = job.data.arguments.get("outputs"), isinstance(error, IndexError | RuntimeError)
    if outputs is None or step == 0 or not about or not _INDEX.search(error_text(error)):
        return
    if job.data.stream is not None and not split:  # which would be read again from its beginning
        return
    batches_seen = _evaluation(job.data, split, place) if split else _training(job, place, step)
    samples = splits.samples_of_split(split) if split else splits.train
    with contextlib.suppress(Exception):  # any kind: the user's code runs again, and only the first error counts
        for indices, epoch in batches_seen:
            out_of_range = first_out_of_range(samples.batch(indices, epoch)[1], outputs, job.loss.ignore)
            if out_of_range is not None:
                position, number = out_of_range
                name = sample_name(job.data, split.partition("/")[0] or "train", int(indices[position]))
                error.add_note(
                    f"{name} has the target {number}, and the network gives {outputs} numbers: where these are "
                    f"classes, they are 0 to {outputs - 1}"
                )
                return


def _training(job: JobProgram, place: RankPlace, step: int) -> Iterator[tuple[Tensor, int]]:
    """Yields the samples of this rank in a step: indices, and the epoch."""
    epoch, k = divmod(step - 1, steps_per_epoch(job.data))
    for indices in micro_batches(job.data, place, job.microbatches, epoch, k):
        yield indices, epoch


def _evaluation(step: DataStep, split: str, place: RankPlace) -> Iterator[tuple[Tensor, int]]:
    for indices in split_indices(step, split, place).split(step.batch):
        yield indices, 0
