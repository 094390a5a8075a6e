"""Cross entropy with the head, the network's last dense layer, in chunks of tokens: no logits of a whole micro-batch.

Model: while the head has targets (`computes_losses`) its forward pass returns the loss of each token, float32 in the
targets' shape, in place of logits. Forward, the logits of one chunk exist at a time, and of each token the logarithm of
the sum of its exponentials stays. Backward, each chunk's logits are computed again, and become their own gradient in
place. One more product of the head is the price. Gradients made forward would save it, but each micro-batch that a
schedule holds would keep one of the whole weight: the divisor and the loss scale are known only later.

The head runs in its place in the network, where `fully_shard` has gathered its weight. If the tensor axis cuts it, each
rank has the logits of some classes: of each token the ranks reduce the largest logit, the sum of the exponentials, and
the target's logit (Shoeybi et al. 2019, arXiv:1909.08053), chunk by chunk.

Contract: losses and gradients equal those of `torch.nn.functional.cross_entropy` within rounding. Products have the
precision of autocast; softmax, losses, and the sum of the weight's gradients over the chunks have float32 at least. A
target that is ignored has the loss 0. One that is no class is an error on the CPU, and an assertion of the kernel on a
GPU. Without targets the head gives logits, as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from dslc.compiler.ir.program import LossStep
from dslc.compiler.placement.shares import largest, piece
from dslc.runtime.model.errors import LossError
from dslc.runtime.model.losses import token_targets

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ChunkedHead(nn.Linear):
    """A dense layer that computes the losses of its outputs, while it has targets."""

    step: LossStep
    targets: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Returns logits, or with targets the loss of each."""
        if self.targets is None:
            return F.linear(input, self.weight, self.bias)
        if self.targets.shape != input.shape[:-1]:
            raise LossError(
                f"the head of the network has inputs of shape {tuple(input.shape)}, and the targets are of shape "
                f"{tuple(self.targets.shape)}: the loss is computed in chunks of tokens that have one target each"
            )
        if hasattr(self.weight, "device_mesh"):
            return self._sharded_losses(input, self.targets)  # type: ignore[arg-type]
        return compute_in_chunks(self.step, input, self.weight, self.bias, self.targets)

    def _sharded_losses(self, input: DTensor, targets: Tensor) -> Tensor:
        """Returns the losses on ranks that have some classes each: the same on all of them."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        weight, bias = self.weight, self.bias
        assert isinstance(weight, DTensor) and (bias is None or isinstance(bias, DTensor))
        mesh, classes = weight.device_mesh, weight.to_local()
        losses = compute_in_chunks(
            self.step,
            input.to_local(grad_placements=[Partial()]),  # of each rank's classes
            classes,
            bias.to_local() if bias is not None else None,
            targets,
            first=mesh.get_local_rank() * len(classes),
            group=mesh.get_group(),
        )
        return DTensor.from_local(losses, mesh, [Replicate()], run_check=False)


def apply(step: LossStep, model: nn.Module, *, is_whole: bool = True, compiles: bool = False) -> None:
    """Makes the head of the model compute losses in chunks; a model that is not whole may lack it. `compiles`:
    torch.compile takes the head's surroundings, and leaves the head out.
    """
    head = _head(model, step) if step.head else None
    if head is None:
        assert not step.head or not is_whole, f"the model has no `{step.head}`"
        return
    assert type(head) is nn.Linear, "the compiler admits a dense layer alone"
    head.__class__ = ChunkedHead
    assert isinstance(head, ChunkedHead)
    head.step = step
    if compiles:
        head.forward = torch.compiler.disable(head.forward)  # type: ignore[method-assign]


def set_targets(model: nn.Module, step: LossStep, targets: object) -> None:
    """Lets the model's forward passes return the losses of these targets, if its head computes losses; None: logits."""
    if step.head and (head := _head(model, step)) is not None:
        targets = None if targets is None else token_targets(targets)
        assert isinstance(head, ChunkedHead) and (targets is None or isinstance(targets, Tensor))
        head.targets = targets


@contextlib.contextmanager
def computes_losses(model: nn.Module, step: LossStep, targets: object) -> Iterator[None]:
    """Does so while the context lasts."""
    set_targets(model, step, targets)
    try:
        yield
    finally:
        set_targets(model, step, None)


def _head(model: nn.Module, step: LossStep) -> nn.Module | None:
    """Returns the head; None for a part of a model that lacks it."""
    try:
        return model.get_submodule(step.head)
    except AttributeError:
        return None


def compute_in_chunks(
    step: LossStep,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Returns the losses of targets; of a `group` this rank has the classes from `first` on."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        input = input.to(torch.get_autocast_dtype(kind))
    settings = _ChunkSettings(
        chunks=step.chunks,
        ignore=step.ignore,
        smoothing=float(step.arguments.get("label_smoothing", 0.0)),
        classes=len(weight) * (1 if group is None else group.size()),
        first=first,
        group=group,
    )
    losses: Tensor = _ChunkedLoss.apply(input, weight, bias, targets, settings)  # type: ignore[no-untyped-call]
    return losses


@dataclass(frozen=True, kw_only=True)
class _ChunkSettings:
    """`classes` is their number over all ranks, `first` this rank's first, and `group` the ranks with the others."""

    chunks: int
    ignore: int | None
    smoothing: float
    classes: int
    first: int = 0
    group: dist.ProcessGroup | None = None

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduces a number of each token over the ranks with shares of the classes, in place."""
        if self.group is not None:
            dist.all_reduce(values, op, group=self.group)
        return values

    def mask_targets(self, targets: Tensor) -> Tensor | None:
        """Returns which targets count; None if all do."""
        return None if self.ignore is None else targets != self.ignore

    def own_classes(self, targets: Tensor, mask: Tensor | None, classes: int) -> tuple[Tensor, Tensor | None]:
        """Returns the place of each target among this rank's classes, or any place, and which targets are there. A
        target that is no class has no place on any rank.
        """
        own, place = mask, targets
        if self.group is not None:
            place = targets - self.first
            here = (place >= 0) & (place < classes)
            place = place.masked_fill((targets >= 0) & (targets < self.classes) & ~here, 0)
            own = here if mask is None else here & mask
        return (place if mask is None else place.masked_fill(~mask, 0)).unsqueeze(1), own


class _ChunkedLossContext(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]  # input, weight, bias, targets, sums
    needs_input_grad: tuple[bool, ...]
    settings: _ChunkSettings

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _ChunkedLoss(torch.autograd.Function):
    """(…, width), (classes, width), (classes), (…) -> (…)."""

    @staticmethod
    def forward(
        ctx: _ChunkedLossContext,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: _ChunkSettings,
    ) -> Tensor:
        shape, input, targets = targets.shape, input.reshape(-1, input.shape[-1]), targets.reshape(-1).long()
        logits_of = _Logits(input, weight, bias, settings.chunks)
        all_losses = torch.empty(shape, dtype=logits_of.wide, device=input.device)
        losses, sums = all_losses.view(-1), torch.empty_like(all_losses).view(-1)
        for rows in logits_of.chunks:
            logits = logits_of.compute(rows)
            mask = settings.mask_targets(targets[rows])
            place, own = settings.own_classes(targets[rows], mask, logits.shape[1])
            of_target = logits.gather(1, place).squeeze(1)
            if own is not None:
                of_target.masked_fill_(~own, 0)
            of_all = logits.sum(1) if settings.smoothing else None
            largest = settings.reduce(logits.amax(1), dist.ReduceOp.MAX)
            total = settings.reduce(logits.sub_(largest.unsqueeze(1)).exp_().sum(1))
            torch.add(total.log_(), largest, out=sums[rows])
            loss = torch.sub(sums[rows], settings.reduce(of_target).mul_(1 - settings.smoothing), out=losses[rows])
            if of_all is not None:
                loss.sub_(settings.reduce(of_all), alpha=settings.smoothing / settings.classes)
            if mask is not None:
                loss.masked_fill_(~mask, 0)
        ctx.save_for_backward(input, weight, bias, targets, sums)
        ctx.settings = settings
        return all_losses

    @staticmethod
    def backward(ctx: _ChunkedLossContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, targets, sums = ctx.saved_tensors
        settings = ctx.settings
        shape, gradient = gradient.shape, gradient.reshape(-1)
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        logits_of = _Logits(input, weight, bias, settings.chunks)
        of_input = torch.empty_like(input) if needs_input else None
        of_weight = _GradientSum(weight, logits_of.wide) if needs_weight else None
        of_bias = torch.zeros_like(bias, dtype=logits_of.wide) if needs_bias and bias is not None else None
        for rows in logits_of.chunks:
            logits = logits_of.compute(rows)
            mask = settings.mask_targets(targets[rows])
            place, own = settings.own_classes(targets[rows], mask, logits.shape[1])
            logits.sub_(sums[rows].unsqueeze(1)).exp_()  # probabilities, and from here on their gradients
            if settings.smoothing:
                logits.sub_(settings.smoothing / settings.classes)
            share = logits.new_full(place.shape, settings.smoothing - 1)
            logits.scatter_add_(1, place, share if own is None else share.masked_fill_(~own.unsqueeze(1), 0))
            scale = gradient[rows].to(logits.dtype)
            logits.mul_((scale if mask is None else scale.masked_fill(~mask, 0)).unsqueeze(1))
            if of_bias is not None:
                of_bias += logits.sum(0)
            logits = logits_of.round(logits)
            if of_input is not None:
                torch.mm(logits, logits_of.weight, out=of_input[rows])
            if of_weight is not None:
                of_weight.add(logits, input[rows])
        return (
            of_input.view(*shape, -1) if of_input is not None else None,
            of_weight.rounded() if of_weight is not None else None,
            of_bias.to(weight.dtype if bias is None else bias.dtype) if of_bias is not None else None,
            None,
            None,
        )


class _Logits:
    """Computes the logits of one chunk after another in the same memory. `wide` is the dtype of softmax and losses."""

    def __init__(self, input: Tensor, weight: Tensor, bias: Tensor | None, chunks: int) -> None:
        self._input, self.weight = input, weight.to(input.dtype)
        self._bias = bias.to(input.dtype) if bias is not None else None
        self.wide = torch.promote_types(input.dtype, torch.float32)
        tokens = len(input)
        pieces = (piece(tokens, chunks, chunk) for chunk in range(chunks))
        self.chunks = [slice(start, stop) for start, stop in pieces if start < stop]
        self._products = input.new_empty(largest(tokens, chunks), len(weight))
        self._widened = self._products
        if self.wide != input.dtype:
            self._widened = torch.empty_like(self._products, dtype=self.wide)

    def compute(self, rows: slice) -> Tensor:
        """Returns the logits of these tokens, in `wide`; the caller may change them."""
        count = rows.stop - rows.start
        products = self._products[:count]
        # Autocast rounds each operation's inputs once more, and these are rounded already.
        with torch.autocast(self._input.device.type, enabled=False):
            if self._bias is None:
                torch.mm(self._input[rows], self.weight.t(), out=products)
            else:
                torch.addmm(self._bias, self._input[rows], self.weight.t(), out=products)
        if self._widened is self._products:
            return products
        return self._widened[:count].copy_(products)

    def round(self, gradients: Tensor) -> Tensor:
        """Returns gradients of logits in the dtype of the products."""
        return gradients if self._widened is self._products else self._products[: len(gradients)].copy_(gradients)


class _GradientSum:
    """The gradient of the weight, summed over chunks in float32 at least."""

    def __init__(self, weight: Tensor, wide: torch.dtype) -> None:
        self._dtype, self._sum = weight.dtype, torch.zeros_like(weight, dtype=wide)

    def add(self, gradients: Tensor, input: Tensor) -> None:
        """Adds the product of the gradients of a chunk's logits and of its inputs."""
        if input.dtype == self._sum.dtype:
            self._sum.addmm_(gradients.t(), input)
        else:
            self._sum += gradients.t() @ input

    def rounded(self) -> Tensor:
        return self._sum.to(self._dtype)
