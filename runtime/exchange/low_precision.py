"""Low-precision decentralized averages: neighbours in a ring send each other differences of weights in 8 bits.

Rule: a member knows of itself and of both neighbours the weights x, l and r that all of them knew after the last
exchange. x' are the weights after the update. After a step whose number is a multiple of `interval`, a rank sends both
neighbours the difference d = x' + l / 3 + r / 3 - 5 x / 3. It is coded as MinMaxUInt8 (quantization.py). Each of x, l
and r advances by the restored difference of its member, and the weights become x: (x + l + r) / 3 + (x' - x), except
for the rounding of codes. Replicas follow what was restored, so that rounding never sets them apart from the weights
that they stand for.

Source: Bagua (Gan et al. 2021, arXiv:2107.01499), `LowPrecisionDecentralizedAlgorithm`, after Tang et al. 2018,
arXiv:1803.06443.

With n members the deviation from the mean shrinks by |1 + 2 cos(2 pi k / n)| / 3 < 1 with each exchange.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import ExchangeStep, JobProgram
from dslc.runtime.exchange.base import WeightExchange
from dslc.runtime.exchange.exchange_groups import PendingWork, in_turn
from dslc.runtime.exchange.quantization import compress, restore

_REPLICAS = ("replica_of_own", "replica_of_left", "replica_of_right")


class LowPrecisionDecentralized(WeightExchange):
    def __init__(self, job: JobProgram, step: ExchangeStep, model: nn.Module) -> None:
        super().__init__(job, step, model)
        for n, bucket in enumerate(self.buckets):
            piece = self.piece(bucket.numbers)
            self.own |= {f"{name}.{n}": torch.empty_like(piece) for name in _REPLICAS}

    @torch.no_grad()
    def begin(self) -> None:
        super().begin()
        if not self.ready:  # all members begin with the same weights
            self.ready = True
            for n, bucket in enumerate(self.buckets):
                for replica in self._replicas(n):
                    replica.copy_(self.piece(bucket.numbers))

    def _replicas(self, index: int) -> list[Tensor]:
        return [self.own[f"{name}.{index}"] for name in _REPLICAS]

    @torch.no_grad()
    def after_update(self) -> None:
        if self.due:
            self.exchanged(self._differences, [bucket.numbers for bucket in self.buckets])

    def _differences(self, numbers: Tensor, index: int) -> Iterator[PendingWork]:
        known, left, right = self._replicas(index)
        difference = torch.add(left, right).div_(3).add_(numbers).sub_(known, alpha=5 / 3)
        own = compress(difference.view(1, -1))
        del difference
        of_left, of_right = torch.empty_like(own), torch.empty_like(own)
        where = self.where
        after, before = (where.member + 1) % where.members, (where.member - 1) % where.members
        # With two members both ways go to the same, whose messages are in this order too.
        to_right, to_left = ((dist.isend, own, each) for each in (after, before))
        yield in_turn(to_right, (dist.irecv, of_left, before), to_left, (dist.irecv, of_right, after), group=where.far)
        for replica, codes in ((known, own), (left, of_left), (right, of_right)):
            replica.add_(restore(codes).view(-1))
        numbers.copy_(known)
