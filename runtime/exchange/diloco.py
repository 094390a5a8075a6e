"""DiLoCo: ranks step alone, and every few steps what they changed is the gradient of an outer step.

Rule: x_i are the weights of member i, and y the outer weights. After a step whose number is a multiple of `period`, y
takes a step of `torch.optim.SGD(lr, momentum, nesterov=True)` by the mean of (y - x_i), and x_i <- y. At the beginning
y are the weights, and the momentum is 0. The inner optimizer's state stays each rank's own.

Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1.

Model: y and the momentum are alike on all ranks, and have the layout of the model alone, so that a training goes on
with them on any number of ranks. The differences take the place of the weights while they are exchanged.
"""

from __future__ import annotations

import torch
from torch import nn

from dslc.compiler.ir.program import ExchangeStep, JobProgram
from dslc.runtime.exchange.base import WeightExchange


class DiLoCo(WeightExchange):
    """Takes an outer step with Nesterov's momentum every `interval` steps."""

    def __init__(self, job: JobProgram, step: ExchangeStep, model: nn.Module) -> None:
        super().__init__(job, step, model)
        self._lr, self._momentum = float(step.arguments["lr"]), float(step.arguments["momentum"])
        for n, bucket in enumerate(self.buckets):
            self.shared[f"outer_weights.{n}"] = bucket.numbers.new_empty(bucket.size)
            self.shared[f"outer_momentum.{n}"] = bucket.numbers.new_empty(bucket.size)

    @torch.no_grad()
    def begin(self) -> None:
        super().begin()
        if not self.ready:
            self.ready = True
            for n, bucket in enumerate(self.buckets):
                self.shared[f"outer_weights.{n}"].copy_(bucket.numbers[: bucket.size])
                self.shared[f"outer_momentum.{n}"].zero_()

    @torch.no_grad()
    def after_update(self) -> None:
        if not self.due:
            return
        for n, bucket in enumerate(self.buckets):
            changed = bucket.numbers[: bucket.size]
            torch.sub(self.shared[f"outer_weights.{n}"], changed, out=changed)
        self.average_buckets()
        for n, bucket in enumerate(self.buckets):
            outer, momentum = self.shared[f"outer_weights.{n}"], self.shared[f"outer_momentum.{n}"]
            numbers = bucket.numbers[: bucket.size]
            momentum.mul_(self._momentum).add_(numbers)
            outer.sub_(numbers.add_(momentum, alpha=self._momentum), alpha=self._lr)
            numbers.copy_(outer)
