"""The exponential moving average of the weights.

Model: after every `every` steps, average = decay * average + (1 - decay) * weights, by torch's own function; the first
time the average is set to the weights. Each rank averages what it holds of the parameters, so that the average is
sharded as they are, and needs no exchange.

Contract: the average of each parameter that trains, in the parameter's dtype and on its device; all else (buffers,
frozen parameters) is the model's. `in_place` exchanges the numbers of both, in place, one tensor at a time.

Source: https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema; the warm-up follows TensorFlow's
ExponentialMovingAverage with `num_updates`; the warm-up with `power` is https://github.com/lucidrains/ema-pytorch,
`EMA.get_current_decay`, whose `step` is one less.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from dslc.compiler.ir.program import AverageStep
from dslc.compiler.trace.private_torch import local_part
from dslc.runtime.model.tensor_names import named_tensors
from dslc.runtime.technique import offload


def decay_of(how: AverageStep, step: int, n: int) -> float:
    """Returns the decay after `step`, counted from 1, which is the n-th update of the average, counted from 0."""
    decay = min(how.decay, (1 + n) / (10 + n)) if how.warmup else how.decay
    if how.power is None:
        return decay
    rising: float = 1 - (1 + (step - 1 - how.after) / how.inv_gamma) ** -how.power
    return min(decay, max(how.min_decay, rising))


class WeightsInPlace(ABC):
    """Other weights of a plain model, or of a rank's part of it, that are evaluated and exported in place of those that
    train; to be made before the first step. `tensors` has them by parameter, sharded as it is, after `refresh`.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        # Kept, because a model that has just been evaluated may show whole parameters instead of its parts.
        self._weights = {
            name: each
            for name, each in named_tensors(model).items()
            if isinstance(each, nn.Parameter) and each.requires_grad and each.is_floating_point()
        }
        self.tensors = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @abstractmethod
    def update(self, step: int) -> None:
        """Follows each step, counted from 1."""

    @abstractmethod
    def refresh(self) -> None:
        """Brings `tensors` up to date with the last step."""

    @abstractmethod
    def in_place(self) -> contextlib.AbstractContextManager[None]:
        """Puts these weights in the place of those that train, while the context lasts."""

    @torch.no_grad()
    def begin(self, names: set[str] | None = None) -> None:
        """Sets these weights, or only the weights of the parameters `names`, to the weights that train."""
        for name, average in self.tensors.items():
            if names is None or name in names:
                local_part(average).copy_(local_part(self._weights[name]))

    def local_parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns this rank's parts of the weights that train, and of these."""
        weights = [local_part(weight) for weight in self._weights.values()]
        return weights, [local_part(average) for average in self.tensors.values()]


class Average(WeightsInPlace):
    def __init__(self, step: AverageStep, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model)
        self._step, self._optimizer = step, optimizer

    def update(self, step: int) -> None:
        """Takes the weights after `step` (from 1) into the average, if it is their turn."""
        updates, left = divmod(step, self._step.every)
        if left:
            return
        offload.settle(self._optimizer)
        weights, averages = self.local_parts()
        if updates == 1 or step <= self._step.after + 1:
            self.begin()
        elif weights:
            n = updates - 1
            get_ema_multi_avg_fn(decay_of(self._step, step, n))(averages, weights, n)

    def refresh(self) -> None:
        """Does nothing: `update` has done it."""

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        offload.settle(self._optimizer)
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for weight, average in zip(*self.local_parts(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
