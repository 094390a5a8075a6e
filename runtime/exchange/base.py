"""The interface between a step and an exchange, and the two kinds that share most: of gradients, and of weights.

Model: the loss is multiplied by the number of ranks, so that the mean of the ranks' gradients is the gradient of the
global batch. A rank that steps by itself so takes a step as long as the step of all ranks would be.

Contract: what an exchange keeps from step to step is by name in `own`, which differs from rank to rank, or in `shared`;
a checkpoint has both, and fills them in place. What follows from the first weights is set in the first `begin`: before
it ranks may still be given rank 0's weights. `held` is further memory that it keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from dslc.compiler.ir.program import ExchangeStep, JobProgram
from dslc.compiler.placement.buckets import in_buckets
from dslc.runtime.exchange.exchange_groups import (
    BucketQueue,
    ExchangeGroups,
    PendingWork,
    Rule,
    between_nodes,
    make_exchange_groups,
    mean,
)
from dslc.runtime.model.tensor_names import named_tensors

MARK = "dslc: exchange"


class Exchange:
    """One way for a rank to agree with the others; does nothing by itself. `step`, from 1, is under way or was last."""

    differ = False

    def __init__(self, job: JobProgram, step: ExchangeStep) -> None:
        self.job, self.how, self.step = job, step, 0
        self.where: ExchangeGroups = make_exchange_groups(job, step)
        self.going = BucketQueue()
        self.own: dict[str, Tensor] = {}
        self.shared: dict[str, Tensor] = {}
        self.held: list[Tensor] = []
        self.ready = False  # `own` and `shared` are set: by a checkpoint, or in the first `begin`

    @property
    def waits_never(self) -> bool:
        """True in a step that waits for no other rank, and so divides losses by a count of this rank's own."""
        return False

    def begin(self) -> None:
        self.step += 1

    def gradients(self) -> None:
        """Follows the last backward pass of the step."""

    def before_update(self) -> None:
        """Comes before the optimizer's step, once gradients are clipped."""

    def after_update(self) -> None:
        """Comes after it."""

    def measure(self) -> None:
        """Marks what the exchange does in the recordings of torch's profiler, as `MARK`."""
        self.going.around = lambda: record_function(MARK)

    def close(self) -> None:
        """Ends the exchange after the last step, on all ranks."""

    def abandon(self) -> None:
        """Ends it on this rank alone, whose training fails."""

    def after_load(self) -> None:
        """Follows a checkpoint that has filled `own` and `shared`."""

    def settle(self) -> None:
        """Completes what is under way, on all ranks after the same step."""

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Puts the mean over the ranks in the place of what differs, while the context lasts."""
        yield


class GradientExchange(Exchange):
    """An exchange of gradients in DistributedDataParallel's buckets, by the rule of a subclass, or in its own. The
    first collective of a bucket begins as soon as the backward pass has filled it, and `gradients` waits for the last.

    `spreads`: by the rule, a number that is not finite makes others nan, on all ranks. If the exchange is then
    `watched`, `unsound` is true after `gradients` if it happened, and `broken` names the parameters whose gradients on
    this rank were not finite before. `scaler` is the scaler of the loss.
    """

    spreads: ClassVar[bool] = False

    def __init__(self, job: JobProgram, step: ExchangeStep, model: nn.Module) -> None:
        super().__init__(job, step)
        self.names = {id(tensor): name for name, tensor in named_tensors(model).items()}
        self.scaler: torch.amp.GradScaler | None = None
        self.watched = self.unsound = False
        self.broken: list[str] = []
        self._watching: list[Tensor] = []

    def begin(self) -> None:
        super().begin()
        self.unsound, self.broken = False, []

    def rule(self, bucket: Tensor, index: int) -> Iterator[PendingWork]:
        """Makes `bucket` what all members agree on, in place: their mean, as the exchange sends it."""
        raise NotImplementedError

    def hook(self, bucket: dist.GradBucket) -> None:
        """Takes a bucket of gradients that is complete (parallel/ddp.py)."""
        self.look(bucket)
        self.going.begin(self.through(bucket.buffer(), bucket.index()))

    def look(self, bucket: dist.GradBucket) -> None:
        """Looks whether a bucket is finite, if the exchange is watched."""
        if not (self.watched and self.spreads):
            return
        self._watching.append(bucket.buffer())
        if has_non_finite(bucket.buffer()):
            found = zip(bucket.parameters(), bucket.gradients(), strict=True)
            self.broken += [self.names[id(parameter)] for parameter, gradient in found if has_non_finite(gradient)]

    def through(self, numbers: Tensor, index: int) -> Iterator[PendingWork]:
        """Goes through the rule with a bucket, filled up to equal pieces."""
        rule: Rule = between_nodes(self.rule, self.where, alike=False)
        left = -numbers.numel() % self.where.pieces
        bucket = nn.functional.pad(numbers, (0, left)) if left else numbers
        yield from rule(bucket, index)
        if left:
            numbers.copy_(bucket[: numbers.numel()])

    @torch.no_grad()
    def gradients(self) -> None:
        self.going.finish()
        self.unsound = any(has_non_finite(each) for each in self._watching)
        self._watching.clear()


def has_non_finite(numbers: Tensor) -> bool:
    """True if a number is not finite; of numbers on a CPU."""
    return not (numbers.sum().isfinite() or numbers.isfinite().all())


class Bucket:
    """Parameters that are exchanged together: `numbers` is their memory, filled up to `pieces` equal parts; the first
    `size` are the parameters'.
    """

    @torch.no_grad()
    def __init__(self, parameters: Sequence[nn.Parameter], pieces: int) -> None:
        self.parameters = parameters
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.size = flat.numel()
        self.numbers = nn.functional.pad(flat, (0, -flat.numel() % pieces))
        for parameter, part in zip(parameters, self.cut(self.numbers), strict=True):
            parameter.data = part

    def cut(self, numbers: Tensor) -> Iterator[Tensor]:
        """Yields each parameter's part of a tensor that has as many numbers as the bucket."""
        start = 0
        for parameter in self.parameters:
            yield numbers[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()

    def gradients(self) -> Tensor:
        """Returns a copy of the gradients, laid out as `numbers` is; 0 where there is none."""
        found = torch.zeros_like(self.numbers)
        for parameter, part in zip(self.parameters, self.cut(found), strict=True):
            if parameter.grad is not None:
                part.copy_(parameter.grad)
        return found

    def set_gradients(self, numbers: Tensor) -> None:
        for parameter, part in zip(self.parameters, self.cut(numbers), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(part)


class LocalExchange(Exchange):
    """An exchange of momenta or weights: each rank, or node, has a gradient of its own after the first `alone` steps.
    Parameters lie in `buckets`, by name.
    """

    def __init__(self, job: JobProgram, step: ExchangeStep, model: nn.Module) -> None:
        super().__init__(job, step)
        self.model = model
        unused = set(job.gradients.unused)
        named = {name: each for name, each in named_tensors(model).items() if isinstance(each, nn.Parameter)}
        order = [named[name] for name in sorted(named) if named[name].requires_grad and name not in unused]
        places = in_buckets(each.numel() for each in order)
        self.buckets = [Bucket(order[place.start : place.stop], self.where.pieces) for place in places]

    @property
    def sums_exactly(self) -> bool:
        return self.step <= self.how.alone

    @torch.no_grad()
    def gradients(self) -> None:
        where = self.where
        if self.sums_exactly:
            self._mean_of_gradients(where.everyone, where.ranks)
        elif where.near is not None:
            self._mean_of_gradients(where.near, where.pieces)

    def _mean_of_gradients(self, group: dist.ProcessGroup, ranks: int) -> None:
        taken = [bucket.gradients() for bucket in self.buckets]
        for each in taken:
            self.going.begin(mean(each, group, ranks))
        self.going.finish()
        for bucket, each in zip(self.buckets, taken, strict=True):
            bucket.set_gradients(each)

    def exchanged(self, rule: Rule, numbers: Sequence[Tensor]) -> None:
        """Puts numbers, one tensor for each bucket, through a rule, in place."""
        whole = between_nodes(rule, self.where, alike=True)
        for index, each in enumerate(numbers):
            self.going.begin(whole(each, index))
        self.going.finish()


class WeightExchange(LocalExchange):
    """An exchange of weights, which differ from rank to rank until it has taken place."""

    differ = True

    @property
    def due(self) -> bool:
        return not self.sums_exactly and self.how.every > 0 and self.step % self.how.every == 0

    def average_buckets(self) -> None:
        """Sets what the buckets hold to its mean over the members."""
        self.exchanged(self._mean_rule, [bucket.numbers for bucket in self.buckets])

    def _mean_rule(self, numbers: Tensor, index: int) -> Iterator[PendingWork]:
        return mean(numbers, self.where.far, self.where.members)

    def piece(self, numbers: Tensor) -> Tensor:
        """Returns this rank's piece of a bucket's numbers, in place."""
        return numbers.view(self.where.pieces, -1)[self.where.piece]

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        self.settle()
        with in_place_of(self._differing(), self.where):
            yield

    def _differing(self) -> Mapping[str, Tensor]:
        """Returns the weights and the statistics of this rank, by name."""
        weights = {f"weights.{n}": bucket.numbers for n, bucket in enumerate(self.buckets)}
        return weights | {name: each for name, each in self.model.named_buffers() if each.is_floating_point()}


@contextlib.contextmanager
@torch.no_grad()
def in_place_of(tensors: Mapping[str, Tensor], where: ExchangeGroups) -> Iterator[None]:
    """Puts the mean over all ranks in the place of tensors that differ, while the context lasts."""
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    going = BucketQueue()
    for tensor in tensors.values():
        going.begin(mean(tensor, where.everyone, where.ranks))
    going.finish()
    try:
        yield
    finally:
        for name, tensor in tensors.items():
            tensor.copy_(kept[name])
