"""The training loop of one rank.

Model: a step works through the rank's micro-batches, and `optimizer.step()` closes it. The gradient of a step is that
of (the sum of all losses over all ranks) / (the global count of samples or tokens): the summed loss of each micro-batch
is multiplied by `ranks / count`, where `ranks` undoes the mean that DDP takes.

Contract: between the data and torch there is nothing that a hand-written loop would not have, and the host reads no
number back from the device but in the steps that are logged: the first, the last, and every `log_every`. The loss that
is logged is the mean over the global batch before the step's update. On rank 0 records go to metrics.jsonl.

Limits: where targets may be ignored (`counts` is `kept`) the ranks agree on the count of each step by an all-reduce of
one number, which runs beside the forward pass of the first micro-batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dslc.compiler.program import JobProgram, RankPlace
from dslc.runtime import ddp, dynamo, weights
from dslc.runtime.assemble import Parts
from dslc.runtime.batches import StepBatch, batches
from dslc.runtime.evaluate import evaluate
from dslc.runtime.learning_rate import set_learning_rate
from dslc.runtime.losses import count
from dslc.runtime.precision import autocast
from dslc.runtime.records import Records
from dslc.runtime.sources import Splits
from dslc.runtime.stop import Board


@dataclass(frozen=True, kw_only=True)
class End:
    """How far a training came. `stopped_at` is the step after which all ranks left on request."""

    steps: int
    stopped_at: int | None = None


def train(job: JobProgram, place: RankPlace, parts: Parts, splits: Splits, board: Board, run_dir: str) -> End:
    """Trains for `job.steps` steps, evaluates, and leaves metrics.jsonl and the weights in `run_dir` (rank 0).

    Ends early, after a step that is the same on all ranks, where the board says so.
    """
    records = Records(run_dir) if place.rank == 0 else None
    work = stepper(job, place, parts)
    rate = 0.0
    seen, step, began = 0, 0, time.monotonic()
    for batch in batches(job.data, splits, place, job.microbatches, 0, job.steps, parts.device):
        step += 1
        board.enter(place.rank, step)
        if place.rank == 0:
            board.answer(_next_wait(job, step))
        rate = set_learning_rate(parts.optimizer, job.learning_rate, step - 1)
        total, number = work(batch)
        seen += batch.samples
        stopped = step < job.steps and _waits(job, step) and board.stop_at == step
        if _logged(job, step) or stopped:
            loss = _global_mean(total, number, place)
            if step == 1:
                board.units = _units(job, batch)
            if records is not None:
                passed = time.monotonic() - began
                records.write(
                    {"step": step, "split": "train", "loss": loss, "lr": rate, "samples": seen, "seconds": passed}
                )
        if stopped:
            break
        if job.data.validation_samples and _evaluated(job, step):
            found = evaluate(job, place, parts, splits)
            if records is not None:
                passed = time.monotonic() - began
                records.write({"step": step, "split": "validation", **found, "samples": seen, "seconds": passed})
    if records is not None:
        records.close()
        weights.save_weights(parts.plain, run_dir)
    return End(steps=step, stopped_at=step if step < job.steps else None)


def stepper(job: JobProgram, place: RankPlace, parts: Parts) -> Callable[[StepBatch], tuple[Tensor, int | Tensor]]:
    """The function that does one step: it gives the sum of this rank's losses, and the global count."""
    model, loss_sum, optimizer, scaler = parts.model, parts.loss, parts.optimizer, parts.scaler
    precision, device, clip, scaled = job.precision, parts.device, job.clip, job.precision.scaled
    update = dynamo.plain_step(optimizer)
    parameters = [parameter for parameter in parts.plain.parameters() if parameter.requires_grad]
    without_exchange, ranks = ddp.without_exchange(model), ddp.undo_mean(model)

    def forward(input: Tensor, target: Tensor) -> Tensor:
        with autocast(precision, device):
            return loss_sum(model(input), target)

    def backward(loss: Tensor, number: int | Tensor) -> Tensor:
        # Not by an argument of `backward`: torch loads sympy to compare its shape, 0.3 s.
        scale = ranks / (number.clamp(min=1) if isinstance(number, Tensor) else number)
        scaler.scale(loss * scale).backward()
        return loss.detach()

    def step(batch: StepBatch) -> tuple[Tensor, int | Tensor]:
        number, agreed = _global_count(job, place, batch, parts.device)
        *others, (input, target) = batch.micro
        total: Tensor | None = None
        for other_input, other_target in others:
            with without_exchange():
                loss = forward(other_input, other_target)
                agreed()
                total = _sum(total, backward(loss, number))
        loss = forward(input, target)
        agreed()
        total = _sum(total, backward(loss, number))
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            update()
        optimizer.zero_grad(set_to_none=True)
        return total, number

    return step


def _global_count(
    job: JobProgram, place: RankPlace, batch: StepBatch, device: torch.device
) -> tuple[int | Tensor, Callable[[], None]]:
    """What the losses of a step are divided by, and what has to be called before it is used."""
    match job.loss.counts:
        case "samples":
            return batch.samples, _nothing
        case "tokens":
            return batch.samples * _per_sample(batch), _nothing
        case "kept":
            number = torch.zeros((), dtype=torch.int64, device=device)
            for _, target in batch.micro:
                number += count(job.loss, target)
            if place.data_ranks == 1:
                return number, _nothing
            pending = dist.all_reduce(number, async_op=True)

            def agreed() -> None:
                nonlocal pending
                if pending is not None:
                    pending.wait()
                    pending = None

            return number, agreed


def _nothing() -> None:
    pass


def _sum(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def _per_sample(batch: StepBatch) -> int:
    return math.prod(batch.micro[0][1].shape[1:])


def _units(job: JobProgram, batch: StepBatch) -> int:
    return 1 if job.loss.counts == "samples" else _per_sample(batch)


def _global_mean(total: Tensor, number: int | Tensor, place: RankPlace) -> float:
    """The mean loss over the global batch; waits for the device, and on the CPU for the other ranks."""
    total = total.double()
    if place.data_ranks > 1:
        dist.all_reduce(total)
    return float(total) / max(1.0, float(number))


def _logged(job: JobProgram, step: int) -> bool:
    return step % job.log_every == 0 or step == 1 or step == job.steps


def _waits(job: JobProgram, step: int) -> bool:
    """Whether the host waits, in this step, for a collective that rank 0 takes part in (see stop.py)."""
    return job.device == "cpu" or _logged(job, step)


def _next_wait(job: JobProgram, step: int) -> int:
    if _waits(job, step):
        return step
    return min(job.steps, step + job.log_every - step % job.log_every)


def _evaluated(job: JobProgram, step: int) -> bool:
    return step == job.steps or (job.evaluate_every > 0 and step % job.evaluate_every == 0)
