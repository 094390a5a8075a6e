"""Watches the first steps of a user's own step that no trial has seen, and tells what is drawn there.

Model: the form of the samples was not known before the training, so that nothing tells how the draws grow with them.
The shape of a draw tells it where a dim has as many rows as the rank has samples, and where no dim can
(technique/sample_pass.py). A line for whoever watches the training says so, with the line of the code; another says why
torch draws what cannot be given by sample.

Limits: Python's and numpy's random numbers are not seen here, as the thread that loads samples may seed them. A dim
that has the size of the samples by chance is taken for theirs. Draws that begin after the first steps are by shape too,
and not told of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from dslc.compiler.ir.program import JobProgram
from dslc.compiler.ir.steps import OUTSIDE
from dslc.compiler.trace.draws import PERMUTATION, Draw, draw_at, is_draw
from dslc.compiler.trace.private_torch import Arguments, OperationMode, Operator, Options
from dslc.runtime.technique.sample_pass import ACTIVE, dim_of_shape

_STEPS = 3


class UntriedDraws:
    """The first steps of a step on `model`; `notify` gets the lines. Does nothing on one rank, or after a trial."""

    def __init__(self, job: JobProgram, model: nn.Module, notify: Callable[[str], object]) -> None:
        self._ranks, self._model, self._notify = job.world_size, model, notify
        is_untried = job.draws is not None and job.draws.untried
        self._steps = _STEPS if is_untried and job.world_size > 1 else 0
        self._told = {True: False, False: False}  # of draws by sample, and of others

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watches a step."""
        if not self._steps:
            yield
            return
        self._steps -= 1
        draws: list[Draw] = []

        def run_operation(func: Operator, args: Arguments, kwargs: Options) -> object:
            result = func(*args, **kwargs)
            if ACTIVE.samples is not None and is_draw(func):
                draws.append(draw_at(sys._getframe(1), self._model, [], func, args, kwargs, result, outside=OUTSIDE))
            return result

        with OperationMode(run_operation):
            samples = ACTIVE.samples.samples if ACTIVE.samples is not None else 1
            yield
        for draw in draws:
            if draw.fault or dim_of_shape(draw.shape, samples) is not None:  # else the kernel notes it
                self._tell(draw, samples)

    def _tell(self, draw: Draw, samples: int) -> None:
        reason = draw.fault
        if draw.operation == PERMUTATION and draw.shape == (samples,):
            reason = "it orders the samples of a batch, of which no rank has all"
        if self._told[not reason]:
            return
        self._told[not reason] = True
        line = f" ({draw.place.line})" if draw.place.line else ""
        if reason:
            self._notify(
                f"the step draws random numbers{line}, which are others on each of {self._ranks} ranks than in one "
                f"process: {reason}"
            )
        else:
            self._notify(
                f"the step draws random numbers{line} that no trial has seen: in shapes with {samples}, the samples of "
                "this rank, they are taken to follow from the sample, and in others to be the same for all"
            )
