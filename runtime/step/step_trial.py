"""Tries a user's own step in this process, and tells which random numbers it draws, itself and by the network.

Model: the step runs on few samples and on more, on copies of one network, and updates nothing. How its draws grow tells
which of their dims goes by samples (compiler/trace/draws.py). If a draw has several rows for each sample, the losses of
a batch are compared with the sums over its halves: they are equal if the samples are found in the right places
(draw_layout.py).

Limits: the draws of its first step count. A step whose losses compare samples is not tried in halves.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dslc.compiler.ir.network_facts import NetworkFacts
from dslc.compiler.ir.program import LossStep, PythonFunction
from dslc.compiler.trace.code_place import HostDraws
from dslc.compiler.trace.draws import Draw, classify, draw_at, running_modules
from dslc.compiler.trace.private_torch import Arguments, OperationMode, Operator, Options
from dslc.compiler.trace.structures import Structure, map_tensors, tensors
from dslc.runtime.process import random_numbers
from dslc.runtime.step.custom_step import try_out
from dslc.runtime.step.draw_layout import drawing_by_sample, find_layout
from dslc.runtime.step.network_trial import with_fixed_statistics

_SEED = 20_086
_TOLERANCE = 1e-4  # of a loss in float32, whose samples are added in another order


@dataclass
class StepTrial:
    """A step that is tried on a network, with batches of two samples and of four."""

    step: PythonFunction
    loss: LossStep
    model: nn.Module
    batches: Mapping[int, Structure]
    _losses: list[Tensor] = field(init=False, default_factory=list)

    def draws(self) -> NetworkFacts:
        """Returns the draws of the step, and nothing else of the network. Raises as the step does."""
        with random_numbers.preserve_generators():
            few, more = sorted(self.batches)
            host_draws = HostDraws(self.model)
            random_numbers.seed_host(_SEED)  # as each run does
            with host_draws.watch():
                small = self._recorded(few)
            facts = NetworkFacts(**classify(small, self._recorded(more), few, more))
            if host_draws.source:
                random_numbers.seed_host(_SEED)
                with host_draws.line_of() as places:
                    self._run(copy.deepcopy(self.model), self.batches[few], few)
                return replace(
                    facts,
                    uncontrolled_draw=places[0] if places else None,
                    uncontrolled_because=f"it draws from {host_draws.source}, which know no samples",
                )
            if facts.joined_draw is not None and facts.uncontrolled_draw is None and self._adds_up():
                facts = find_layout(facts, self._draws_by_sample)
        return facts

    def _recorded(self, samples: int) -> list[Draw]:
        """Returns the draws of a step."""
        draws: list[Draw] = []
        model = copy.deepcopy(self.model)

        def run_operation(func: Operator, args: Arguments, kwargs: Options) -> object:
            result = func(*args, **kwargs)
            if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func):
                frame = sys._getframe(1)
                draws.append(draw_at(frame, model, running, func, args, kwargs, result, is_step=True))
            return result

        with ExitStack() as stack:
            running = stack.enter_context(running_modules(model))
            stack.enter_context(OperationMode(run_operation))
            self._run(model, self.batches[samples], samples)
        return draws

    def _run(self, model: nn.Module, batch: Structure, samples: int) -> Tensor:
        """Does a step; returns the sums of its updates' losses, and of the losses that it returns."""
        random_numbers.seed_host(_SEED)
        losses: list[Tensor] = []
        total = try_out(self.step, self.loss, model, batch, samples, losses.append)
        return torch.stack([each.double() for each in (*losses, total)])

    def _rows(self, *rows: int) -> Structure:
        return map_tensors(lambda tensor: tensor[list(rows)], self.batches[max(self.batches)])

    def _fresh(self) -> nn.Module:
        return with_fixed_statistics(copy.deepcopy(self.model).train())

    def _adds_up(self) -> bool:
        """True if the losses are sums over samples, each with the numbers that are drawn at its place."""
        samples = max(self.batches)
        if any(leaf.dim() == 0 or leaf.shape[0] != samples for leaf in tensors(self.batches[samples])):
            return False
        pairs = [(0, 1), (1, 0), (0, 0), (1, 1)]
        a, b, c, d = (self._run(self._fresh(), self._rows(*pair), len(pair)) for pair in pairs)
        return _is_close(a + b, c + d)

    def _draws_by_sample(self, facts: NetworkFacts) -> bool:
        """True if the losses of a batch, drawn by sample, are the sums over its halves."""
        losses = []
        for first, rows in ((0, (0, 1, 2, 3)), (0, (0, 1)), (2, (2, 3))):
            model = self._fresh()
            with drawing_by_sample(model, facts, first, len(rows)):
                losses.append(self._run(model, self._rows(*rows), len(rows)))
        whole, *halves = losses
        return _is_close(whole, sum(halves[1:], start=halves[0]))


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
