"""One step of the optimizer on a rank of a pipeline: the passes of the program's table, and the update after them.

Model: as in stepper.py. The losses are on the ranks with the last stage; the other ranks have none, and their sum is 0.
Gradients of tied weights are summed before anything uses them. The loss scale, the norm of the gradient and the
overflow flag are the same on all ranks.

Limits: if targets may be ignored, the ranks of a data axis sum the count by an all-reduce. Each pipeline coordinate
does so for itself, as all of them get the targets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.trace.structures import named as named_leaves
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.data.sampler import share_of
from dslc.runtime.model import documents
from dslc.runtime.model.errors import LossError
from dslc.runtime.model.losses import PairSum
from dslc.runtime.model.tensor_names import named_tensors
from dslc.runtime.parallel.context_parallel import piece_of
from dslc.runtime.parallel.unused_parameters import graph_nodes
from dslc.runtime.pipeline.pipeline import ScheduleRun
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.step.forward_ahead import StepBalanceLoss
from dslc.runtime.step.stepper import (
    UNSEEN,
    Passes,
    StepCallbacks,
    StepResult,
    connected,
    global_count,
    own_count,
    share_of_mean,
    step_with,
)
from dslc.runtime.technique.chunked_head import set_targets
from dslc.runtime.technique.precision import autocast
from dslc.runtime.technique.sample_draws import SampleDraws


def stepper(
    job: JobProgram, place: RankPlace, parts: TrainingComponents, looks: StepCallbacks = UNSEEN
) -> Callable[[StepBatch], StepResult]:
    """Returns the function that does one step."""
    return step_with(passes(job, place, parts), job, parts, looks)


def passes(job: JobProgram, place: RankPlace, parts: TrainingComponents) -> Passes:
    """Returns the function that runs the passes of a step, as `stepper.passes` does."""
    axis, engine, loss_sum, scaler = parts.pipeline, parts.engine, parts.loss, parts.scaler
    assert axis is not None
    precision, device = job.precision, parts.device
    named, counted, parameters = named_tensors(parts.plain), own_count(job, parts), list(parts.plain.parameters())
    cut = piece_of(job)
    scaler.scale(torch.zeros((), device=device))  # gives a rank that never scales a loss its scale

    agreed: Callable[[], None]
    see_loss: Callable[[Tensor], None]
    number: int | Tensor = 1
    totals: list[Tensor] = []

    def loss(output: object, target: object) -> Tensor:
        with autocast(precision, device), draws.in_loss():
            summed = loss_sum(output, target)
        if not isinstance(output, Tensor):
            summed = _over_all_parts(summed, output, job)
        see_loss(summed)
        totals.append(summed.detach())
        agreed()
        return scaler.scale(share_of_mean(summed, engine.scale, number))

    start, stop = share_of(job.data, place, job.data.batch)
    samples = (stop - start) // job.microbatches * job.loss.rows
    draws = SampleDraws(job, place)
    balance = StepBalanceLoss(parts, lambda loss: scaler.scale(loss * engine.scale))
    schedule = ScheduleRun(axis, samples, job.microbatches, loss)

    def run(batch: StepBatch, seen: Callable[[Tensor], None]) -> tuple[Tensor, int | Tensor]:
        nonlocal agreed, number, see_loss
        see_loss = seen
        engine.begin_step()
        if parts.experts is not None:
            parts.experts.begin()
        number, agreed = global_count(job, place, batch, device)
        totals.clear()
        draws.begin(batch)
        balance.begin()
        micro = [(cut(input), cut(target)) for input, target in batch.micro]

        def enter(number: int) -> None:
            draws.enter(number)
            documents.see(parts.plain, batch.micro[number][0])
            set_targets(parts.plain, job.loss, micro[number][1])

        schedule.run(micro, enter, balance.before_backward)
        draws.leave()
        set_targets(parts.plain, job.loss, None)
        agreed()
        engine.complete()
        axis.add_up_shared(named)
        if counted is not None:
            number = counted(batch.samples, parameters, False)
        if isinstance(loss_sum, PairSum):
            parts.further.update(loss_sum.take_rewards())
        total = torch.stack(totals).sum() if totals else torch.zeros((), device=device)
        return balance.added_to(total, number, batch.samples), number

    return run


def _over_all_parts(loss: Tensor, output: object, job: JobProgram) -> Tensor:
    """Returns a loss of an output that is a structure. A loss that nothing of the batch counts for may be a constant.

    Raises LossError if parameters or tensors of earlier stages have a gradient by a part of the output alone that a
    user's loss leaves out: in one process they have none, and stages wait for one.
    """
    parts = {name: tensor for name, tensor in named_leaves(output).items() if tensor.requires_grad}
    if not parts:
        return loss
    if not loss.requires_grad:
        return connected(loss, next(iter(parts.values())))
    if job.loss.kind != "python":
        return loss
    reached = set(graph_nodes(loss))
    for name, tensor in parts.items():
        if any(hasattr(node, "variable") for node in set(graph_nodes(tensor)) - reached):
            raise LossError(
                f"{job.loss.line}: the loss leaves out `{name}` of the output, whose gradient the stages of a pipeline "
                "wait for",
                remedy=f"let the loss take `{name}`, or the network leave it out in training; or use the data axis",
            )
    return loss
