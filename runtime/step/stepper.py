"""One step of the optimizer: the micro-batches of a rank, and the update that closes them.

Model: a step takes the gradient of (the sum of all losses over all ranks) / (the global count of samples or tokens).
The summed loss of each micro-batch is multiplied by `scale / count`, where `scale` undoes the mean that an engine takes
over the ranks. The norm of the gradient is over all parameters and all ranks.

Contract: between the data and torch nothing runs that a hand-written loop would lack, and the host reads no number back
from the device.

Limits: if targets may be ignored (`counts` is `kept`) an all-reduce of the count overlaps with the first forward pass.
A loss that counts by itself (`own`) is divided by the samples, and its gradients are corrected by the count later.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.placement.axes import AXES
from dslc.compiler.trace.private_torch import lower_all, raise_all, run_engine, scale_all
from dslc.compiler.trace.structures import Structure, call
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.model.custom_losses import OwnSum
from dslc.runtime.model.losses import PairSum, count
from dslc.runtime.parallel import context_parallel
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.parallel.unused_parameters import Varying
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.step.forward_ahead import PassesAhead, StepBalanceLoss
from dslc.runtime.step.full_batch import WholeBatch
from dslc.runtime.technique import dynamo, offload
from dslc.runtime.technique.chunked_head import computes_losses
from dslc.runtime.technique.precision import autocast, has_autocast
from dslc.runtime.technique.sample_draws import SampleDraws


class StepResult(NamedTuple):
    """The sum of this rank's losses, the divisor of all ranks' losses, and the unclipped norm if asked for."""

    total: Tensor
    number: int | Tensor
    norm: Tensor | None = None


def _unseen(*seen: object) -> None:
    pass


Between = Callable[[StepBatch, Tensor, int | Tensor], None]
Passes = Callable[[StepBatch, Callable[[Tensor], None]], tuple[Tensor, int | Tensor]]


def _unwrapped(passes: Passes) -> Passes:
    return passes


@dataclass(frozen=True, kw_only=True)
class StepCallbacks:
    """Callbacks within a step: each loss before its backward pass; between the passes and the update the batch, the sum
    of this rank's losses and its divisor; the norm of the gradient before it is clipped.

    These see the first evaluation of a step. An optimizer with a closure evaluates more often: `evaluated` is called
    after each later evaluation, which runs in the context `later`, as other additional passes do. `passes` wraps the
    passes of a step without a closure. `notify` gets a line for whoever watches the training.
    """

    loss: Callable[[Tensor], None] = _unseen
    between: Between = _unseen
    norm: Callable[[Tensor], None] = _unseen
    evaluated: Between = _unseen
    later: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    notify: Callable[[str], object] = _unseen
    passes: Callable[[Passes], Passes] = _unwrapped


UNSEEN = StepCallbacks()


def stepper(
    job: JobProgram, place: RankPlace, parts: TrainingComponents, looks: StepCallbacks = UNSEEN
) -> Callable[[StepBatch], StepResult]:
    """Returns the function that does one step."""
    return step_with(passes(job, place, parts), job, parts, looks)


def step_with(
    own_passes: Passes, job: JobProgram, parts: TrainingComponents, looks: StepCallbacks
) -> Callable[[StepBatch], StepResult]:
    """Returns the function that does one step: these passes, and the update."""
    run_passes, update = looks.passes(own_passes), updater(job, parts, looks)

    def step(batch: StepBatch) -> StepResult:
        total, number = run_passes(batch, looks.loss)
        looks.between(batch, total, number)
        return StepResult(total, number, update())

    return step


@dataclass(frozen=True)
class _MicroBatchForward:
    """The forward pass of a micro-batch up to its loss, and the forward passes that come `ahead` of it.

    `together` is the batch of a loss that compares samples, `varying` finds the parameters that a step did not use.
    """

    run: Callable[[Structure, Structure], Tensor]
    ahead: PassesAhead
    together: WholeBatch | None
    varying: Varying | None


def _forward_pass(
    job: JobProgram, place: RankPlace, parts: TrainingComponents, draws: SampleDraws
) -> _MicroBatchForward:
    model, loss_sum, precision, device = parts.engine.model, parts.loss, job.precision, parts.device
    cut, cut_input = context_parallel.piece_of(job), context_parallel.input_piece_of(job, parts.plain)
    run_model = functools.partial(call, model, parts.plain.forward) if job.data.structured else model
    aside, nothing = offload.activations(job, device), contextlib.nullcontext()
    in_loss = draws.in_loss if job.loss.draws is not None and not job.loss.together else contextlib.nullcontext

    def output_of(input: Structure, target: Structure) -> Structure:
        with aside(), autocast(precision, device), computes_losses(parts.plain, job.loss, cut(target)):
            return run_model(cut_input(input))

    ahead = PassesAhead(parts, output_of, draws.enter)
    together: WholeBatch | None = None
    if job.loss.together:  # the loss compares samples
        together = WholeBatch(job, place, parts, ahead, draws)
        loss_sum = together.loss
    varying: Varying | None = None
    if job.gradients.search and not job.gradients.unused:
        varying = Varying(parts.plain, device, mesh_of(job).group("data") if job.world_size > 1 else None)

    def forward(input: Structure, target: Structure) -> Tensor:
        own_target = cut(target)
        with computes_losses(parts.plain, job.loss, own_target) if job.loss.head else nothing:
            output = run_model(cut_input(input))
        with in_loss():
            loss = loss_sum(output, own_target)
        loss = connected(loss, output)
        return loss if varying is None else varying.touched(loss, output)

    def forward_in_contexts(input: Structure, target: Structure) -> Tensor:
        with aside(), autocast(precision, device):
            return forward(input, target)

    has_contexts = has_autocast(precision) or "activations" in job.offload
    return _MicroBatchForward(ahead.wrap(forward_in_contexts if has_contexts else forward), ahead, together, varying)


def passes(job: JobProgram, place: RankPlace, parts: TrainingComponents) -> Passes:
    """Returns the function that runs the forward and backward passes of a step over all its micro-batches. It takes the
    batch, and a function that is called with each loss before its backward pass. It returns the sum of this rank's
    losses, and the divisor of the losses of all ranks.
    """
    engine, scaler = parts.engine, parts.scaler
    held, ranks = engine.held, engine.scale
    draws = SampleDraws(job, place)
    forward = _forward_pass(job, place, parts, draws)
    run_forward, ahead, together, varying = forward.run, forward.ahead, forward.together, forward.varying
    counted, parameters = own_count(job, parts), list(parts.plain.parameters())
    exchange, experts = parts.exchange, parts.experts
    begin = exchange.begin if exchange is not None else _do_nothing
    begin_counts = experts.begin if experts is not None else _do_nothing
    balance = StepBalanceLoss(parts, lambda loss: scaler.scale(loss * ranks))
    run_backward = MeanBackward(ranks, scaler).run
    # A structure's loss may be a constant, where nothing of a batch counts: no parameter is used then.
    always = job.gradients.kind != "none" or not job.data.structured

    def backward(loss: Tensor, number: int | Tensor) -> Tensor:
        if loss.requires_grad or always:
            run_backward(loss, number)
        return loss.detach()

    def run(batch: StepBatch, seen: Callable[[Tensor], None]) -> tuple[Tensor, int | Tensor]:
        begin()
        begin_counts()
        engine.begin_step()
        by_itself = exchange is not None and exchange.waits_never
        number, agreed = global_count(job, place, batch, parts.device, by_itself=by_itself)
        draws.begin(batch)
        if together is not None:
            together.begin(batch)
        balance.begin()
        balance.count_ahead(batch, None if together is not None else ahead)
        *others, (input, target) = batch.micro
        total: Tensor | None = None
        for micro, (other_input, other_target) in enumerate(others):
            draws.enter(micro)
            with held():
                loss = run_forward(other_input, other_target)
                agreed()
                seen(loss)
                balance.before_backward()
                total = _sum(total, backward(loss, number))
        draws.enter(len(others))
        loss = run_forward(input, target)
        agreed()
        seen(loss)
        balance.before_backward()
        total = balance.added_to(_sum(total, backward(loss, number)), number, batch.samples)
        draws.leave()
        engine.complete()
        if varying is not None:
            varying.drop()
        if counted is not None:
            number = counted(batch.samples, parameters, by_itself)
        if isinstance(parts.loss, PairSum):
            parts.further.update(parts.loss.take_rewards())
        return total, number

    return run


def connected(loss: Tensor, output: object) -> Tensor:
    """Returns a loss that depends on the output, so that every rank takes part in the backward pass."""
    if loss.requires_grad or not isinstance(output, Tensor) or not output.requires_grad:
        return loss
    return loss + 0 * output.reshape(-1)[:1].sum()


def own_count(
    job: JobProgram, parts: TrainingComponents
) -> Callable[[int, Sequence[Tensor], bool], int | Tensor] | None:
    """Returns, for a loss that counts by itself, the function that returns the number of all ranks' losses in a step;
    else None. The function first divides the gradients by this number, which were divided by a number of samples
    before. The function's last argument is true in a step in which the rank takes its own number, times the ranks.
    """
    if job.loss.counts != "own":
        return None
    assert isinstance(parts.loss, OwnSum)
    loss, axis, mesh = parts.loss, parts.pipeline, mesh_of(job)
    # Of a pipeline only the ranks with the last stage have losses, and of sequences each rank those of a piece.
    everywhere = axis is not None or job.axes["context"] > 1
    group = mesh.group(*(AXES if everywhere else ("data",))) if job.world_size > 1 else None

    def count_losses(samples: int, parameters: Sequence[Tensor], by_itself: bool) -> int | Tensor:
        number, further = loss.take_counts()
        if everywhere:
            number = number * mesh.leads
        if axis is not None:
            further = axis.further_losses(further)
        parts.further.update(further)
        if group is None and isinstance(number, int) and number == samples:
            return number
        with torch.no_grad():
            number = torch.as_tensor(number, dtype=torch.float64, device=parts.device)
            if by_itself:
                number *= job.world_size
            elif group is not None:
                dist.all_reduce(number, group=group)
            if rows := _rows(parameters):
                wide = torch.promote_types(rows[0].dtype, torch.float32)
                scale_all(rows, (samples / number.clamp(min=1)).to(wide))
        return number

    return count_losses


def updater(job: JobProgram, parts: TrainingComponents, looks: StepCallbacks) -> Callable[[], Tensor | None]:
    """Returns the function that clips, updates and drops the gradient, and returns its norm if asked for."""
    optimizer, scaler, clip = parts.optimizer, parts.scaler, clipper(job, parts)
    scaled, plain_step, zero_grad = scaler.is_enabled(), dynamo.plain_step(optimizer), dynamo.plain_zero_grad(optimizer)
    if scaled:
        vars(optimizer)["step"] = plain_step  # which the scaler calls by this name
    exchange = parts.exchange
    before, after = (
        (exchange.before_update, exchange.after_update) if exchange is not None else (_do_nothing, _do_nothing)
    )

    balance = parts.experts.update if parts.experts is not None else _do_nothing

    def update() -> Tensor | None:
        norm = clip(looks.norm)
        before()
        balance()
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            plain_step()
        zero_grad()
        after()
        return norm

    return update


def clipper(job: JobProgram, parts: TrainingComponents) -> Callable[[Callable[[Tensor], None]], Tensor | None]:
    """Returns the function that clips the gradient and returns its norm if asked for; its argument sees the norm."""
    engine, optimizer, scaler, limit, most = parts.engine, parts.optimizer, parts.scaler, job.clip, job.clip_value
    parameters = [parameter for parameter in parts.plain.parameters() if parameter.requires_grad]
    counted = [engine.counts(parameter) for parameter in parameters]
    measured = limit is not None or job.observation is not None

    def clip(seen: Callable[[Tensor], None]) -> Tensor | None:
        norm = None
        if measured or most is not None:
            scaler.unscale_(optimizer)
        if measured:
            norm = clipped(parameters, counted, limit, engine.shards, seen)
        if most is not None:
            cut_off(parameters, most)
        return norm

    return clip


@torch.no_grad()
def cut_off(parameters: Sequence[Tensor], most: float) -> None:
    """Limits each number of the gradients to [-most, most], in place: of this rank's rows, each for itself."""
    if rows := _rows(parameters):
        raise_all(rows, -most)
        lower_all(rows, most)


def _rows(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the rows of the gradients that are this rank's."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]


@torch.no_grad()
def clipped(
    parameters: Sequence[Tensor],
    counted: Sequence[bool],
    limit: float | None,
    shards: dist.ProcessGroup | None,
    seen: Callable[[Tensor], None] = _unseen,
) -> Tensor:
    """Returns the norm of the whole gradient, after scaling it down in place to `limit` if it is larger; calls `seen`
    with the norm first.

    Works on this rank's rows, and counts the rows of the `counted` parameters: one number is exchanged, and no
    operation is dispatched over a mesh.
    """
    rows = _rows(parameters)
    own = [count for parameter, count in zip(parameters, counted, strict=True) if parameter.grad is not None]
    mine = list(itertools.compress(rows, own))
    norm = torch.nn.utils.get_total_norm(mine) if mine or not rows else rows[0].new_zeros(())
    if shards is not None:
        norm = norm.square()
        dist.all_reduce(norm, group=shards)
        norm = norm.sqrt()
    seen(norm)
    if limit is not None:
        scale_all(rows, (limit / (norm + 1e-6)).clamp(max=1.0))  # as torch.nn.utils does
    return norm


def share_of_mean(summed: Tensor, ranks: int, number: int | Tensor) -> Tensor:
    """Returns a sum of losses as its share of the mean over `number`, times `ranks`, as the engine takes a mean over
    them.

    A number that is a tensor divides the sum, in the sum's precision: its inverse would be float32.
    """
    return summed * ranks / number.clamp(min=1) if isinstance(number, Tensor) else summed * (ranks / number)


class MeanBackward:
    """Backward passes of sums of losses, each as its share of a mean, times `ranks`."""

    def __init__(self, ranks: int, scaler: torch.amp.GradScaler) -> None:
        self._ranks, self._scaler, self._number = ranks, scaler, 0
        self._factor: Tensor | None = None

    def run(self, summed: Tensor, number: int | Tensor) -> None:
        """Runs the backward pass of a share. Of a plain sum over a known number the pass begins with the factor, which
        stays for later passes, so that no node multiplies by it: 20 us less for each pass. torch's own
        `backward(factor)` would load sympy to compare shapes, 0.3 s.
        """
        if self._scaler.is_enabled() or isinstance(number, Tensor) or type(summed) is not Tensor or summed.dim():
            self._scaler.scale(share_of_mean(summed, self._ranks, number)).backward()
            return
        factor = self._factor
        if factor is None or number != self._number or (factor.dtype, factor.device) != (summed.dtype, summed.device):
            self._number, one = number, torch.ones((), dtype=summed.dtype, device=summed.device)
            factor = self._factor = share_of_mean(one, self._ranks, number)
        run_engine((summed,), (factor,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def global_count(
    job: JobProgram, place: RankPlace, batch: StepBatch, device: torch.device, *, by_itself: bool = False
) -> tuple[int | Tensor, Callable[[], None]]:
    """Returns the divisor of a step's losses, and a function to call before its use. `by_itself`: the rank takes its
    own part times the ranks, where it would be a sum over them.
    """
    match job.loss.counts:
        case "samples" | "own":
            return batch.samples, _do_nothing
        case "tokens":
            return batch.samples * per_sample(batch), _do_nothing
        case "kept":
            number = torch.zeros((), dtype=torch.int64, device=device)
            for _, target in batch.micro:
                number += count(job.loss, target)
            if place.data_ranks == 1 or by_itself:
                return number * place.data_ranks, _do_nothing
            pending = dist.all_reduce(number, group=mesh_of(job).group("data"), async_op=True)

            def complete_pending() -> None:
                nonlocal pending
                if pending is not None:
                    pending.wait()
                    pending = None

            return number, complete_pending


def _do_nothing() -> None:
    pass


def _sum(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def per_sample(batch: StepBatch) -> int:
    return math.prod(batch.micro[0][1].shape[1:])
