"""Gradients in 8 bits: `bytegrad()`.

Rule: each member cuts the bucket in as many rows as there are members, compresses each row (quantization.py) and sends
it to its owner. The owner takes the mean of what it has received, compresses that, and all gather it.

Source: Bagua (Gan et al. 2021, arXiv:2107.01499), `ByteGrad`.

Model: a code depends on the other numbers in its row, and DistributedDataParallel lays its buckets out anew after the
first steps of a process. So gradients are copied to buckets in an order that follows from their names: a resumed
training then goes on to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import ExchangeStep, JobProgram
from dslc.compiler.placement.buckets import in_buckets, names_in_backward_order
from dslc.runtime.exchange.base import GradientExchange
from dslc.runtime.exchange.exchange_groups import ExchangeGroups, PendingWork
from dslc.runtime.exchange.quantization import compress, restore
from dslc.runtime.model.tensor_names import named_tensors


class ByteGrad(GradientExchange):
    """Gradients as codes between minimum and maximum. A number that is not finite makes its row nan on all ranks."""

    spreads = True

    def __init__(self, job: JobProgram, step: ExchangeStep, model: nn.Module) -> None:
        super().__init__(job, step, model)
        named = {name: each for name, each in named_tensors(model).items() if each.requires_grad}
        order = names_in_backward_order(named)
        self._buckets = [order[bucket.start : bucket.stop] for bucket in in_buckets(named[n].numel() for n in order)]
        self._bucket_of = {name: index for index, names in enumerate(self._buckets) for name in names}
        self._arrived: list[dict[str, Tensor]] = [{} for _ in self._buckets]  # this step's gradients, by name

    def hook(self, bucket: dist.GradBucket) -> None:
        self.look(bucket)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self.names[id(parameter)]
            index = self._bucket_of[name]
            arrived = self._arrived[index]
            arrived[name] = gradient
            if len(arrived) == len(self._buckets[index]):
                self._arrived[index] = {}
                self.going.begin(self._exchange_bucket(index, [arrived[name] for name in self._buckets[index]]))

    def _exchange_bucket(self, index: int, gradients: list[Tensor]) -> Iterator[PendingWork]:
        """Goes through the rule with the gradients of a bucket of its own."""
        sizes = [gradient.numel() for gradient in gradients]
        numbers = gradients[0].new_empty(sum(sizes))
        for gradient, part in zip(gradients, numbers.split(sizes), strict=True):
            part.view(gradient.shape).copy_(gradient)
        yield from self.through(numbers, index)
        for gradient, part in zip(gradients, numbers.split(sizes), strict=True):
            gradient.copy_(part.view(gradient.shape))

    def rule(self, bucket: Tensor, index: int) -> Iterator[PendingWork]:
        return by_codes(bucket, self.where)


def by_codes(numbers: Tensor, where: ExchangeGroups) -> Iterator[PendingWork]:
    """Makes numbers the mean over the members, as codes tell it, in place."""
    far, members, count = where.far, where.members, numbers.numel()
    sent = compress(nn.functional.pad(numbers, (0, -count % members)).view(members, -1))
    received = sent.new_empty(sent.shape)
    yield dist.all_to_all_single(received, sent, group=far, async_op=True)
    del sent
    agreed = compress(restore(received).mean(dim=0, keepdim=True))
    # Each row is as long as the owner's.
    yield dist.all_gather_single(received, agreed, group=far, async_op=True)
    numbers.copy_(restore(received).view(-1)[:count])
