"""Local SGD: every rank steps alone, and weights are averaged every few steps.

Rule: after a step whose number is a multiple of `period`, the weights of all members are set to their mean. The
optimizer's state stays each rank's own. With SGD without momentum and a period of 1 it is `allreduce()`.

Source: Stich 2018, arXiv:1805.09767.
"""

from __future__ import annotations

import torch

from dslc.runtime.exchange.base import WeightExchange


class LocalSGD(WeightExchange):
    @torch.no_grad()
    def after_update(self) -> None:
        if self.due:
            self.average_buckets()
