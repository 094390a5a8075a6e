"""Why a loss of a user's own failed, where its targets are no classes: said after the fact.

Model: `cross_entropy` has its targets held against the classes as they are fetched (samples.py). A user's loss may take
whole numbers for anything, so that nothing is refused beforehand. Where it fails over an index, the targets that this
rank had in the step are fetched once more and looked through; on a GPU, too, whose kernels assert without a word, as
that needs none. What is found is a note on the exception.

Contract: nothing here raises, and nothing is done in a training that does not fail.

Limits: targets that a data set makes anew each time (W0610) may be others than those that failed.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

from torch import Tensor

from dslc.compiler.ir.program import DataStep, JobProgram, RankPlace
from dslc.runtime.data.sampler import held_out, micro_batches, steps_per_epoch, validation_indices
from dslc.runtime.data.samples import Splits, beyond
from dslc.runtime.loop import evaluate

_INDEX = re.compile(r"out of (bounds|range)|device-side assert|[Cc]lass values", re.ASCII)


def explain(error: BaseException, job: JobProgram, place: RankPlace, splits: Splits, step: int) -> None:
    """Adds to `error`, which ended `step` (from 1), the first target that is no class, if it is about such things."""
    evaluated = any(frame.f_globals is vars(evaluate) for frame, _ in traceback.walk_tb(error.__traceback__))
    while error.__cause__ is not None:
        error = error.__cause__
    outputs, about = job.data.arguments.get("outputs"), isinstance(error, IndexError | RuntimeError)
    if outputs is None or step == 0 or not about or not _INDEX.search(str(error)):
        return
    seen = _validation(job.data, place) if evaluated else _training(job, place, step)
    samples = splits.validation if evaluated else splits.train
    with contextlib.suppress(Exception):  # of any kind: the user's code runs again, and the first error is what counts
        for indices, epoch in seen:
            found = beyond(samples.batch(indices, epoch)[1], outputs, job.loss.ignore)
            if found is not None:
                at, number = found
                error.add_note(
                    f"{_name(job.data, int(indices[at]), evaluated)} has the target {number}, and the network gives "
                    f"{outputs} numbers: where these are classes, they are 0 to {outputs - 1}"
                )
                return


def _training(job: JobProgram, place: RankPlace, step: int) -> Iterator[tuple[Tensor, int]]:
    """What this rank saw in a step: indices, and the epoch."""
    epoch, k = divmod(step - 1, steps_per_epoch(job.data))
    for indices in micro_batches(job.data, place, job.microbatches, epoch, k):
        yield indices, epoch


def _validation(step: DataStep, place: RankPlace) -> Iterator[tuple[Tensor, int]]:
    for indices in validation_indices(step, place).split(step.batch):
        yield indices, 0


def _name(step: DataStep, index: int, validation: bool) -> str:
    if step.split == "random":  # both are parts of one data set
        return f"sample {int(held_out(step)[validation][index])}"
    return f"{'validation ' if validation else ''}sample {index}"
