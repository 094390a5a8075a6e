"""A step of an optimizer that takes a closure, as torch's LBFGS: it evaluates the loss and the gradients by itself.

Contract: every rank gets the same loss and the same gradients, so that a line search decides alike on all ranks. Each
evaluation of a step begins with the same random numbers. The loss of the step is the loss of its first evaluation,
which is at the parameters before the update.

Limits: each rank holds all gradients (one process, or the data axis with `zero = 0`). Buffers that a forward pass
changes, such as running statistics, change in every evaluation, as they do in a loop by hand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.parallel.custom_optimizer import OptimizerError, OwnOptimizer
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.process import random_numbers
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.step.stepper import UNSEEN, StepCallbacks, StepResult, clipper, passes


def stepper(
    job: JobProgram, place: RankPlace, parts: TrainingComponents, looks: StepCallbacks = UNSEEN
) -> Callable[[StepBatch], StepResult]:
    """Returns the function that does one step."""
    optimizer = parts.optimizer
    assert isinstance(optimizer, OwnOptimizer) and not parts.scaler.is_enabled() and parts.exchange is None
    run_passes, clip = passes(job, place, parts), clipper(job, parts)
    group = mesh_of(job).group("data") if job.world_size > 1 else None

    def first_evaluation(batch: StepBatch) -> StepResult:
        total, number = run_passes(batch, looks.loss)
        looks.between(batch, total, number)
        return StepResult(total, number, clip(looks.norm))

    def later_evaluation(batch: StepBatch, noise: dict[str, Tensor]) -> StepResult:
        """Leaves the random numbers and the further losses of the step as they are."""
        current, further = random_numbers.state(parts.device), dict(parts.further)
        random_numbers.restore(noise, parts.device)
        with looks.later():
            total, number = run_passes(batch, UNSEEN.loss)
            looks.evaluated(batch, total, number)
            norm = clip(UNSEEN.norm)
        random_numbers.restore(current, parts.device)
        parts.further.clear()
        parts.further.update(further)
        return StepResult(total, number, norm)

    def global_loss(evaluation: StepResult) -> Tensor:
        total = evaluation.total.to(torch.float64, copy=True)  # that of the rank stays its own
        if group is not None:
            with looks.later():
                dist.all_reduce(total, group=group)
        number = evaluation.number
        divisor = number.clamp(min=1) if isinstance(number, Tensor) else number
        return (total / divisor).to(evaluation.total.dtype)

    def step(batch: StepBatch) -> StepResult:
        first: StepResult | None = None
        noise = random_numbers.state(parts.device)

        @torch.enable_grad()
        def closure() -> Tensor:
            nonlocal first
            optimizer.zero_grad(set_to_none=True)
            if first is None:
                first = evaluation = first_evaluation(batch)
            else:
                evaluation = later_evaluation(batch, noise)
            return global_loss(evaluation)

        optimizer.step(closure)
        optimizer.zero_grad(set_to_none=True)
        if parts.experts is not None:
            parts.experts.update()
        if first is None:
            with mark_errors(job.optimizer.line):
                raise OptimizerError("its `step` has not called the closure, so that the step has no loss")
        return first

    return step
