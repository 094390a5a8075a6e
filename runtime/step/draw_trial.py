"""Tries a user's own step or loss in this process, and tells which random numbers it draws; a step also by the network.

Model: it runs on few samples and on more, on copies of one network, and updates nothing. How its draws grow tells which
of their dims goes by samples (compiler/trace/draws.py). Then the losses of a batch, drawn by sample, are compared with
the sums over its halves: they are equal if the samples are found in the right places (draw_layout.py). A loss is also
tried on halves of the positions, as ranks of the context axis have them.

Limits: the draws of the first step count. Losses that compare samples are not tried in halves: if a draw has one row
for each sample, the rows are taken to be in the order of the samples; of several rows nothing tells the order.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from dslc.compiler.ir.network_facts import NetworkFacts
from dslc.compiler.ir.program import LossStep, PythonFunction
from dslc.compiler.ir.steps import LOSS, OUTSIDE, DrawDims
from dslc.compiler.trace.code_place import HostDraws
from dslc.compiler.trace.draws import Draw, classify, draw_at, is_draw, running_modules
from dslc.compiler.trace.private_torch import Arguments, OperationMode, Operator, Options
from dslc.compiler.trace.structures import Structure, map_tensors, tensors
from dslc.runtime.model.custom_losses import OwnSum
from dslc.runtime.model.losses import count, loss_sum
from dslc.runtime.process import random_numbers
from dslc.runtime.step.custom_step import try_out
from dslc.runtime.step.draw_layout import drawing_by_sample, find_layout
from dslc.runtime.step.network_trial import with_fixed_statistics

_SEED = 20_086
_FEW, _MORE = 2, 4  # samples
_TOLERANCE = 1e-4  # of a loss in float32, whose samples are added in another order

Sums = Callable[[nn.Module, Structure, int], Sequence[Tensor]]  # of losses, of a model, a batch and its samples


def draws_of_step(
    step: PythonFunction,
    loss: LossStep,
    model: nn.Module,
    batches: Mapping[int, Structure],
    real_batch: Structure | None = None,
) -> NetworkFacts:
    """Returns what a step draws, and whether its losses compare samples. The samples of a batch may be equal; those in
    `real_batch` differ. Raises as the step does.
    """

    def sums(model: nn.Module, batch: Structure, samples: int) -> list[Tensor]:
        losses: list[Tensor] = []
        return [try_out(step, loss, model, batch, samples, losses.append), *losses]

    distinct = batches[_MORE] if real_batch is None else real_batch
    return _DrawTrial(OUTSIDE, sums, model, batches, _repeated(distinct, _MORE)).facts()


def draws_of_loss(step: LossStep, output: Structure, target: Structure) -> NetworkFacts:
    """Returns what a loss draws of a batch, and whether it compares samples. Raises as the loss does."""
    batch = (output, target)
    batches = {size: _repeated(batch, size) for size in (_FEW, _MORE)}

    def sums(model: nn.Module, batch: Structure, samples: int) -> list[Tensor]:
        if step.counts == "own":
            counted = OwnSum(step).count_losses(*batch)
            return [counted.total.detach(), torch.as_tensor(counted.number)]
        number = torch.tensor(samples) if step.together else torch.as_tensor(count(step, batch[1]))
        return [loss_sum(step)(*batch).detach(), number]

    return _DrawTrial(LOSS, sums, nn.Identity(), batches, batches[_MORE]).facts()


@dataclass
class _DrawTrial:
    """A function that is tried on a network, with batches of few samples and of more, and with rows of four `distinct`
    samples; None if a batch cannot be taken apart. What the function draws outside of modules has the layer `outside`.
    """

    outside: str
    sums: Sums
    model: nn.Module
    batches: Mapping[int, Structure]
    distinct: Structure | None

    def facts(self) -> NetworkFacts:
        with random_numbers.preserve_generators():
            few, more = min(self.batches), max(self.batches)
            host_draws = HostDraws(self.model)
            random_numbers.seed_host(_SEED)  # as each run does
            with host_draws.watch():
                small = self._recorded(few)
            if host_draws.source:
                random_numbers.seed_host(_SEED)
                with host_draws.line_of() as places:
                    self._run(copy.deepcopy(self.model), self.batches[few], few)
                return NetworkFacts(
                    torch_draws=small[0].place if small else None,
                    uncontrolled_draw=places[0] if places else None,
                    uncontrolled_because=f"it draws from {host_draws.source}, which know no samples",
                )
            facts = NetworkFacts(**classify(small, self._recorded(more), few, more))
            if facts.uncontrolled_because or self.distinct is None:
                return facts
            if not self._adds_up:
                return replace(facts, loss_mixes=self._repeats())
            found = find_layout(facts, self._draws_by_sample) if facts.draws else facts
            return found if self.outside != LOSS or found.uncontrolled_because else self._with_positions(found)

    def _with_positions(self, facts: NetworkFacts) -> NetworkFacts:
        """Returns the facts of a loss with its draws that go by positions, if its losses add up over pieces of them."""
        lengths = {tensor.shape[1] if tensor.dim() > 1 else 1 for tensor in tensors(self.distinct)}
        if len(lengths) != 1 or min(lengths) % 2:
            return facts
        dims = next(iter(facts.draw_dims), DrawDims(module=LOSS, dims=()))
        halves = [_half_of_positions(self.distinct, number) for number in range(2)]
        try:
            whole, half = (self._recorded(_MORE, batch) for batch in (self.distinct, halves[0]))
        except Exception:  # any kind: the user's code may refuse a part of a sample
            return facts
        by_position = tuple(
            n for n, (one, other) in enumerate(zip(whole, half, strict=False)) if one.shape != other.shape
        )
        found = replace(facts, draw_dims=(replace(dims, by_position=by_position),))
        runs = [_TrialRun(self.distinct), *(_TrialRun(batch, piece=(number, 2)) for number, batch in enumerate(halves))]
        return found if len(whole) == len(half) and self._add_up(found, runs) else facts

    def _recorded(self, samples: int, batch: Structure | None = None) -> list[Draw]:
        """Returns the draws of a run, over a batch of these samples."""
        draws: list[Draw] = []
        model = copy.deepcopy(self.model)

        def run_operation(func: Operator, args: Arguments, kwargs: Options) -> object:
            result = func(*args, **kwargs)
            if is_draw(func):
                frame = sys._getframe(1)
                draws.append(draw_at(frame, model, running, func, args, kwargs, result, outside=self.outside))
            return result

        with ExitStack() as stack:
            running = stack.enter_context(running_modules(model))
            stack.enter_context(OperationMode(run_operation))
            self._run(model, self.batches[samples] if batch is None else batch, samples)
        return draws

    def _run(self, model: nn.Module, batch: Structure, samples: int) -> Tensor:
        random_numbers.seed_host(_SEED)
        return torch.stack([each.double() for each in self.sums(model, batch, samples)])

    def _run_rows(self, *rows: int) -> Tensor:
        return self._run(self._fresh(), _rows_of(self.distinct, rows), len(rows))

    def _fresh(self) -> nn.Module:
        return with_fixed_statistics(copy.deepcopy(self.model).train())

    @cached_property
    def _adds_up(self) -> bool:
        """True if the losses are sums over samples, each with the numbers that are drawn at its place."""
        for one, other in ((0, 1), (2, 3)):
            both = self._run_rows(one, other) + self._run_rows(other, one)
            if not _is_close(both, self._run_rows(one, one) + self._run_rows(other, other)):
                return False
        return True

    def _repeats(self) -> bool:
        """True if two runs give the same losses."""
        return _is_close(self._run_rows(0, 1), self._run_rows(0, 1))

    def _draws_by_sample(self, facts: NetworkFacts) -> bool:
        """True if the losses of a batch, drawn by sample, are the sums over its halves, or their means."""
        halves = [_TrialRun(_rows_of(self.distinct, rows), samples=2, first=rows[0]) for rows in ((0, 1), (2, 3))]
        return self._add_up(facts, [_TrialRun(self.distinct), *halves])

    def _add_up(self, facts: NetworkFacts, runs: Sequence[_TrialRun]) -> bool:
        """True if the losses of the first run are those of the two others together, or their means."""
        losses = []
        for run in runs:
            model = self._fresh()
            with drawing_by_sample(model, facts, run.first, run.samples, self.outside, run.piece):
                losses.append(self._run(model, run.batch, run.samples))
        whole, one, other = losses
        both = one + other
        return whole.shape == both.shape and all(
            _is_close(a, b) or _is_close(a, b / 2) for a, b in zip(whole, both, strict=True)
        )


@dataclass(frozen=True)
class _TrialRun:
    """A batch of some samples, from sample `first` on: of each sample all, or a `piece`, its number and how many."""

    batch: Structure | None
    samples: int = _MORE
    first: int = 0
    piece: tuple[int, int] = (0, 1)


def _rows_of(batch: Structure, rows: Sequence[int]) -> Structure:
    return map_tensors(lambda tensor: tensor[list(rows)], batch)


def _half_of_positions(batch: Structure, number: int) -> Structure:
    return map_tensors(lambda tensor: tensor.chunk(2, 1)[number], batch)


def _repeated(batch: Structure, samples: int) -> Structure | None:
    """Returns a batch of `samples` from the rows of another; None if its tensors do not begin with samples."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors(batch)}
    if len(sizes) != 1 or 0 in sizes:
        return None
    rows = sizes.pop()
    return _rows_of(batch, [row % rows for row in range(samples)])


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
