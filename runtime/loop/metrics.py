"""Metrics over a whole split: sums over samples (or tokens) on each rank, one reduction, one division at the end.

Model: each metric has a sum and a count, side by side in one float64 vector. So the metrics of a split are one
all-reduce (SUM) of `sums` over the data ranks, and `results` of it. They do not depend on how the split was cut into
batches or shares.

Contract: `update` reads nothing back from the device. Ignored targets count nowhere. A metric of nothing is nan.

Limits: within one batch the losses are summed in float32, as in training; across batches in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dslc.compiler.ir.program import LossStep, MetricStep
from dslc.compiler.ir.steps import PREFERENCES
from dslc.compiler.trace.structures import Structure
from dslc.runtime.model.custom_losses import OwnSum
from dslc.runtime.model.losses import (
    AnswerPieces,
    PairLosses,
    classes_last,
    count,
    loss_sum,
    match_target,
    pair_losses,
    wide,
    wide_tensors,
)

SumAndCount: TypeAlias = tuple[Tensor, int | Tensor]
Measure: TypeAlias = Callable[[Structure, Structure], SumAndCount]


class Metrics:
    """The metrics of one pass over a split, on one rank.

    `sums` is float64 of shape (2 * metrics,) on `device`: sum and count of each metric in turn.
    """

    def __init__(
        self,
        steps: Sequence[MetricStep],
        loss: LossStep,
        device: torch.device | str = "cpu",
        pieces: AnswerPieces | None = None,
    ) -> None:
        self._steps = tuple(steps)
        self._measure = _measure_pairs(steps, loss, pieces) if loss.kind in PREFERENCES else _measure_each(steps, loss)
        self.sums = torch.zeros(2 * len(self._steps), dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, output: object, target: object) -> None:
        """Adds one batch: the model's output and the target, as the loss takes them."""
        for place, (total, number) in enumerate(self._measure(output, target)):
            self.sums[2 * place] += total
            self.sums[2 * place + 1] += number

    def reset(self) -> None:
        self.sums.zero_()

    def results(self, sums: Tensor | None = None) -> dict[str, float]:
        """Returns the value of each metric by its name, from `sums` (of all ranks; else this rank's own)."""
        numbers = (self.sums if sums is None else sums).tolist()
        values = {}
        for place, step in enumerate(self._steps):
            total, number = numbers[2 * place : 2 * place + 2]
            mean = total / number if number else math.nan
            values[step.name] = _exponential(mean) if step.kind == "perplexity" else mean
        return values


def _exponential(mean: float) -> float:
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf


def _measure_each(steps: Sequence[MetricStep], loss: LossStep) -> Callable[[Structure, Structure], list[SumAndCount]]:
    measures = [_measure(step, loss) for step in steps]
    return lambda output, target: [measure(output, target) for measure in measures]


def _measure(step: MetricStep, loss: LossStep) -> Measure:
    match step.kind:
        case "loss" if loss.counts == "own":
            user_sum = OwnSum(loss)
            return lambda output, target: user_sum.count_losses(wide_tensors(output), target)[:2]
        case "loss":
            total = loss_sum(loss)
            if loss.kind == "python":
                return lambda output, target: (total(wide_tensors(output), target), count(loss, target))
            return lambda output, target: (total(output, target), count(loss, target))
        case "perplexity":
            return _cross_entropy(loss)
        case "accuracy":
            return _among_likeliest(1, loss)
        case "top_k":
            return _among_likeliest(step.k, loss)
        case "mse":
            return _squared_difference
        case other:
            raise AssertionError(f"`{other}` keeps states")


def _measure_pairs(
    steps: Sequence[MetricStep], loss: LossStep, pieces: AnswerPieces | None
) -> Callable[[Structure, Structure], list[SumAndCount]]:
    """Returns a measure of all metrics of pairs, which computes the losses of a batch once. Of pairs in pieces each
    rank has the whole sums and the whole count.
    """

    def measure(output: Tensor, target: Structure) -> list[SumAndCount]:
        pairs, number = pair_losses(loss, output, target, pieces), count(loss, target)
        return [(_sum_of_pairs(step, pairs), number) for step in steps]

    return measure


def _sum_of_pairs(step: MetricStep, pairs: PairLosses) -> Tensor:
    match step.kind:
        case "loss":
            return pairs.losses.sum()
        case "reward_margin":
            return pairs.margins.sum()
        case "reward_accuracy":
            return (pairs.margins > 0).sum()
        case other:
            raise AssertionError(f"`{other}` does not compare answers")


def _counted_labels(labels: Tensor, loss: LossStep) -> Tensor | None:
    return None if loss.ignore is None else labels != loss.ignore


def _cross_entropy(loss: LossStep) -> Measure:
    """Returns the cross entropy without label smoothing, by which perplexity is defined."""

    def measure(output: Tensor, target: Tensor) -> tuple[Tensor, int | Tensor]:
        if loss.head and output.shape == target.shape:
            return output.sum(), count(loss, target)  # the head has computed the losses
        scores, labels = classes_last(loss, wide(output), target)
        ignore = -100 if loss.ignore is None else loss.ignore
        counted_labels = _counted_labels(labels, loss)
        total = F.cross_entropy(scores, labels, ignore_index=ignore, reduction="sum")
        return total, labels.numel() if counted_labels is None else counted_labels.sum()

    return measure


def _among_likeliest(k: int, loss: LossStep) -> Measure:
    def measure(output: Tensor, target: Tensor) -> tuple[Tensor, int | Tensor]:
        scores, labels = classes_last(loss, output, target)
        if k == 1:
            right = scores.argmax(-1) == labels
        else:
            right = (scores.topk(min(k, scores.shape[-1])).indices == labels[:, None]).any(-1)
        counted_labels = _counted_labels(labels, loss)
        if counted_labels is None:
            return right.sum(), labels.numel()
        return (right & counted_labels).sum(), counted_labels.sum()

    return measure


def _squared_difference(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    output = wide(output)
    return F.mse_loss(output, match_target(output, target), reduction="sum"), target.numel()
