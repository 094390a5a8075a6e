"""Decentralized averages: weights are averaged with peers while a step computes.

Rule: let x_i be the weights of member i before a step, and g_i the gradient that it computes with them meanwhile. In a
step whose number is a multiple of `interval`, x_i becomes the average of the x_j of its peers and itself, to which the
optimizer applies g_i. Other steps apply g_i alone. The peers of the s-th such step, from 0, among n members: all
others; or with `shift_one`, n even, member i < n / 2 meets n / 2 + (s + i) mod n / 2.

Source: Bagua (Gan et al. 2021, arXiv:2107.01499), `DecentralizedAlgorithm`.

Model: a step begins with a copy of the weights. The average of the copies is under way during the passes; the update
waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import ExchangeStep, JobProgram
from dslc.runtime.exchange.base import Bucket, WeightExchange
from dslc.runtime.exchange.exchange_groups import BucketQueue, PendingWork, in_turn, mean


class Decentralized(WeightExchange):
    def __init__(self, job: JobProgram, step: ExchangeStep, model: nn.Module) -> None:
        super().__init__(job, step, model)
        self._pairs = step.arguments["peers"] == "shift_one"
        self._copies = [torch.empty_like(self.piece(bucket.numbers)) for bucket in self.buckets]
        self._received = [torch.empty_like(copy) for copy in self._copies] if self._pairs else []
        self.held = [*self._copies, *self._received]
        self._ahead = BucketQueue()

    @torch.no_grad()
    def begin(self) -> None:
        super().begin()
        if self.due:
            for index, (bucket, copy) in enumerate(zip(self.buckets, self._copies, strict=True)):
                copy.copy_(self.piece(bucket.numbers))
                self._ahead.also(self._averaged_into(bucket, copy, index))

    @torch.no_grad()
    def before_update(self) -> None:
        self._ahead.finish()

    def _averaged_into(self, bucket: Bucket, copy: Tensor, index: int) -> Iterator[PendingWork]:
        """Puts the average of the copies in the place of the weights."""
        where = self.where
        yield from self._with_one(copy, self._received[index]) if self._pairs else mean(copy, where.far, where.members)
        if where.near is None:
            bucket.numbers.copy_(copy)
        else:
            yield dist.all_gather_single(bucket.numbers, copy, group=where.near, async_op=True)

    def _with_one(self, copy: Tensor, received: Tensor) -> Iterator[PendingWork]:
        far = self.where.far
        other = peer(self.where.member, self.where.members, self.step // self.how.every - 1)
        yield in_turn((dist.isend, copy, other), (dist.irecv, received, other), group=far)
        copy.add_(received).mul_(0.5)


def peer(member: int, members: int, turn: int) -> int:
    """Returns the peers of a member in a turn, counted from 0."""
    half = members // 2
    return half + (turn + member) % half if member < half else (member - half - turn) % half
