"""Warns of a training whose steps `torch.compile` makes slower.

Model: before the second step of a process the passes of its batch run `EAGER` times without compiled code, and their
gradients are dropped. Of the compiled steps that follow, the passes of `COMPILED` are timed, after `WARM_UP` steps that
compile. Of each kind the fastest counts, over batches of one shape: other work on the machine only makes passes slower.
In the first step ranks compare what they do (runtime/measure/order_check.py).

Contract: the training stays as it is: no update, the state of the model and of random generators as before, and each
step runs compiled code, whatever the times. All ranks do equally many passes. Rank 0 warns once. Afterwards a step
calls one function more.

Limits: these are not timed: GPUs, where passes without compiled code may take more memory than there is; pipelines,
whose ranks have other stages; exchanges other than the exact sum; steps of the user's own; large networks of the user's
own; optimizers with a closure. Nor are runs that are profiled or observed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dslc.compiler.ir.number_text import time_text
from dslc.compiler.ir.program import JobProgram, RankPlace, TrainMode
from dslc.compiler.trace.structures import tensors
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.process import random_numbers
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.step.model_state import is_small, preserve_model
from dslc.runtime.step.stepper import UNSEEN, Passes, StepCallbacks

EAGER = 3  # runs without compiled code; the first counts for nothing
WARM_UP, COMPILED = 2, 8  # compiled steps that count for nothing, and that are timed
SLOWER = 1.05  # times the passes without compiled code, from which on compiling is called slower

PassWrapper = Callable[[Passes], Passes]


def compile_timing(
    job: JobProgram,
    place: RankPlace,
    parts: TrainingComponents,
    looks: StepCallbacks,
    notify: Callable[[str], None],
) -> PassWrapper | None:
    """Returns the function that wraps the passes of a step; None if they are not timed. `notify` takes the warning."""
    timed = bool(job.compiled) and job.mode == TrainMode() and job.observation is None and parts.exchange is None
    if not timed or job.own_step is not None or job.optimizer.closure:
        return None
    if parts.device.type != "cpu" or job.pipeline is not None:
        return None
    if job.model.python is not None and not is_small(parts):
        return None
    preserve = preserve_model if job.model.python is not None else _preserve_buffers
    report = notify if place.rank == 0 else None
    return lambda passes: _TimedPasses(passes, parts, looks, preserve, report).run


def slower_text(eager: float, compiled: float) -> str:
    """Returns the warning for the fastest passes of a step, in seconds; "" if compiling does not make them slower."""
    if compiled <= SLOWER * eager:
        return ""
    return (
        f"`train.compile` makes steps slower: the forward and backward pass takes {time_text(compiled)} at best, and "
        f"{time_text(eager)} without: leave it out"
    )


class _TimedPasses:
    """The passes of a rank's steps, timed in the first steps of a process."""

    def __init__(
        self,
        passes: Passes,
        parts: TrainingComponents,
        looks: StepCallbacks,
        preserve: Callable[[TrainingComponents], contextlib.AbstractContextManager[None]],
        report: Callable[[str], None] | None,
    ) -> None:
        self._passes, self._parts, self._looks = passes, parts, looks
        self._preserve, self._report = preserve, report
        self._work: Passes = self._run_first_step
        self._eager, self._steps = 0.0, 0
        self._shapes: list[torch.Size] = []
        self._compiled: list[float] = []

    def run(self, batch: StepBatch, seen: Callable[[Tensor], None]) -> tuple[Tensor, int | Tensor]:
        return self._work(batch, seen)

    def _run_first_step(self, batch: StepBatch, seen: Callable[[Tensor], None]) -> tuple[Tensor, int | Tensor]:
        self._work = self._run_second_step
        return self._passes(batch, seen)

    def _run_second_step(self, batch: StepBatch, seen: Callable[[Tensor], None]) -> tuple[Tensor, int | Tensor]:
        self._eager, self._shapes = self._run_eagerly(batch), _shapes(batch)
        self._work = self._timed
        return self._timed(batch, seen)

    def _run_eagerly(self, batch: StepBatch) -> float:
        """Returns the seconds of the fastest passes without compiled code, and restores the training."""
        parts, seconds = self._parts, []
        eager = torch.compiler.set_stance("force_eager")
        with eager, self._looks.later(), self._preserve(parts):
            for _ in range(EAGER):
                begin = time.perf_counter()
                self._passes(batch, UNSEEN.loss)
                seconds.append(time.perf_counter() - begin)
                parts.optimizer.zero_grad()
        return min(seconds[1:])

    def _timed(self, batch: StepBatch, seen: Callable[[Tensor], None]) -> tuple[Tensor, int | Tensor]:
        begin = time.perf_counter()
        result = self._passes(batch, seen)
        seconds = time.perf_counter() - begin
        self._steps += 1
        if self._steps > WARM_UP and _shapes(batch) == self._shapes:
            self._compiled.append(seconds)
        if self._steps == WARM_UP + COMPILED:
            self._work = self._passes
            text = slower_text(self._eager, min(self._compiled, default=0.0))
            if text and self._report is not None:
                self._report(text)
        return result


def _shapes(batch: StepBatch) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors(batch.micro)]


@contextlib.contextmanager
def _preserve_buffers(parts: TrainingComponents) -> Iterator[None]:
    """Restores on leaving what a forward pass of library modules may change."""
    generators = random_numbers.state(parts.device)
    buffers = [(buffer, buffer.detach().clone()) for buffer in parts.plain.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    random_numbers.restore(generators, parts.device)
