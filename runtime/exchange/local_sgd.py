"""Local SGD: every rank steps alone, and weights are averaged every few steps.

Rule: after a step whose number is a multiple of `period`, the weights of all members are set to their mean. The
optimizer's state stays each rank's own. With SGD without momentum and a period of 1 it is `allreduce()`.

Source: Stich 2018, arXiv:1805.09767.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dslc.runtime.exchange.base import WeightExchange
from dslc.runtime.exchange.exchange_groups import PendingWork, mean


class LocalSGD(WeightExchange):
    @torch.no_grad()
    def after_update(self) -> None:
        if self.due:
            self.exchanged(self._mean, [bucket.numbers for bucket in self.buckets])

    def _mean(self, numbers: Tensor, index: int) -> Iterator[PendingWork]:
        return mean(numbers, self.where.far, self.where.members)
