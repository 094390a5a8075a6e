"""The weights that a user's optimizer evaluates, where they differ from the weights that it trains.

Model: an optimizer with `train()` and `eval()`, as schedule-free ones have (Defazio et al. 2024, arXiv:2405.15682),
keeps the parameters at one point while it trains, and puts another into them in `eval()`. It trains from the first
step on. `eval()` comes before an evaluation, and before weights are saved; `train()` comes after. The parameters then
get back the very numbers that they had, so a training does not depend on how often it is evaluated.

Contract: as in technique/ema.py. A checkpoint has the weights that train as `model.…`, to go on from. It has the
weights of `eval()` as averages, which are evaluated, exported and predicted with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from dslc.runtime.parallel.custom_optimizer import OptimizerError, OwnOptimizer
from dslc.runtime.technique.ema import Average, WeightsInPlace


def weights_in_place(
    average: Average | None, model: nn.Module, optimizer: torch.optim.Optimizer
) -> WeightsInPlace | None:
    """Returns what puts the weights of an evaluation into a model: `average`, or an optimizer with `train()` and
    `eval()`; None if there is neither. Raises OptimizerError for both, and for an optimizer that has some of the
    parameters alone.
    """
    own = getattr(optimizer, "optim", optimizer)
    if not isinstance(own, OwnOptimizer) or not own.has_modes:
        return average
    if average is not None or own is not optimizer:
        what = "`train.ema`" if average is not None else "`parallelism.zero = 1`"
        raise OptimizerError(f"it has `train()` and `eval()`, which do not go together with {what}")
    return EvaluationWeights(own, model)


class EvaluationWeights(WeightsInPlace):
    """The weights of a plain model, or of a rank's part of it, after the optimizer's `eval()`."""

    def __init__(self, optimizer: OwnOptimizer, model: nn.Module) -> None:
        super().__init__(model)
        self._optimizer = optimizer

    def update(self, step: int) -> None:
        """Does nothing: the optimizer keeps its average itself."""

    @torch.no_grad()
    def refresh(self) -> None:
        with self.in_place():
            self.begin()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        weights, _ = self.local_parts()
        before = [weight.clone() for weight in weights]
        self._optimizer.evaluates(True)
        try:
            yield
        finally:
            self._optimizer.evaluates(False)
            with torch.no_grad():
                for weight, value in zip(weights, before, strict=True):
                    weight.copy_(value)
