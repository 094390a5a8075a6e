"""One step of the optimizer on a rank of a pipeline: the passes of the program's table, and the update after them.

Model: that of stepper.py. The losses are on the ranks with the last stage; the others have none, and their sum is 0.
Gradients of tied weights are summed before anything uses them. The loss scale, the norm of the gradient and the
overflow flag are the same on all ranks.

Limits: if targets may be ignored, the ranks of a data axis sum the count by an all-reduce, each pipeline coordinate for
itself, as all of them get the targets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.model.names import named_tensors
from dslc.runtime.parallel.context_parallel import piece_of
from dslc.runtime.pipeline.pipeline import Schedule
from dslc.runtime.step.assemble import Parts
from dslc.runtime.step.stepper import UNSEEN, Done, Looks, global_count, share_of_mean, updater
from dslc.runtime.technique.precision import autocast


def stepper(job: JobProgram, place: RankPlace, parts: Parts, looks: Looks = UNSEEN) -> Callable[[StepBatch], Done]:
    """Returns the function that does one step."""
    axis, engine, loss_sum, scaler = parts.pipeline, parts.engine, parts.loss, parts.scaler
    assert axis is not None
    precision, device, update = job.precision, parts.device, updater(job, parts, looks)
    tensors = named_tensors(parts.plain)
    cut = piece_of(job)
    scaler.scale(torch.zeros((), device=device))  # gives a rank that never scales a loss its scale

    agreed: Callable[[], None]
    number: int | Tensor = 1
    totals: list[Tensor] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        with autocast(precision, device):
            summed = loss_sum(output, target)
        looks.loss(summed)
        totals.append(summed.detach())
        agreed()
        return scaler.scale(share_of_mean(summed, engine.scale, number))

    samples = job.data.batch // (place.data_ranks * job.microbatches)
    schedule = Schedule(axis, samples, job.microbatches, loss)

    def step(batch: StepBatch) -> Done:
        nonlocal agreed, number
        engine.begin_step()
        number, agreed = global_count(job, place, batch, device)
        totals.clear()
        schedule.run([(cut(input), cut(target)) for input, target in batch.micro])
        agreed()
        engine.complete()
        axis.add_up_shared(tensors)
        total = torch.stack(totals).sum() if totals else torch.zeros((), device=device)
        looks.between(batch, total, number)
        return Done(total, number, update())

    return step
