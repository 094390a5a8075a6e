"""Losses as sums: the loop divides them by the global count of samples or tokens of a step.

Model: the sum of `loss_sum(step)` over the micro-batches and ranks, divided by the sum of `count`, is the mean of the
global batch, whatever the shares.

Contract: for cross entropy outputs have shape (n, …, classes), or (n, classes, …); for `mse`, `l1` and `bce`, which
average over each sample's own numbers, outputs have the shape of the target. Ignored targets add nothing to the sum and
nothing to a count of `kept`, even if a user's own loss gives a number for them. With label smoothing the sum over the
kept targets divided by their number is torch's mean. Losses are computed in float32 at least, under autocast or not.

A loss of pairs has two rows for each sample, the chosen answer and the rejected one. Its targets are the tokens, or a
pair of these and the reference's log-probability of each row. An answer's log-probability is the sum over its tokens.
Ranks that have pieces of a row sum it over the pieces (`AnswerPieces`), and share the losses of its pair equally.

Limits: a target that is not ignored and is no class is an error on the CPU, and an assertion of the kernel on a GPU.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dslc.compiler.ir.program import LossStep
from dslc.compiler.ir.steps import PREFERENCES
from dslc.compiler.trace.private_torch import OperationMode, Operator, fake_store
from dslc.compiler.trace.structures import Structure, map_tensors, tensors
from dslc.runtime.model.cross_sample_losses import WholeSum
from dslc.runtime.model.custom_losses import OwnSum, counts_itself, of_one_number, wide
from dslc.runtime.model.errors import LossError
from dslc.runtime.model.loss_state import load_loss
from dslc.runtime.process.job_line import mark_errors

__all__ = [
    "LossError",
    "LossSum",
    "classes_last",
    "count",
    "loss_sum",
    "match_target",
    "try_out",
    "wide",
    "wide_tensors",
]

LossSum: TypeAlias = Callable[[Structure, Structure], Tensor]

_NONE_IGNORED = -(2**62)  # torch always has an ignored target; no label has this value


def count(step: LossStep, target: Structure) -> int | Tensor:
    """Returns the divisor of the sum of the losses over `target`: samples, tokens, or (an int64 scalar) those kept."""
    assert step.counts != "own", "custom_losses.py counts"
    targets = token_targets(target)
    match step.counts:
        case "samples":
            return targets.shape[0] // step.rows
        case "tokens":
            return targets.numel()
        case "kept":
            assert step.ignore is not None
            return targets.ne(step.ignore).sum()


def try_out(step: LossStep, output: object, target: object) -> bool:
    """Calls the loss on a small batch, within `as_rank_0`. Returns whether it counts by itself; raises as it does."""
    if step.python is not None and not step.together and counts_itself(step, output, target):
        step = replace(step, counts="own")
    loss_sum(step)(output, target)
    return step.counts == "own"


@contextlib.contextmanager
def as_rank_0(ranks: int) -> Iterator[None]:
    """Makes this process rank 0 of `ranks` that do not exist: collectives return their own input."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    saved_values = {name: os.environ.get(name) for name in rank}
    os.environ.update(rank)
    torch.distributed.init_process_group("fake", store=fake_store(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        for name, value in saved_values.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def mixes_samples(step: LossStep, output: Structure, target: Structure) -> bool:
    """True if the loss of a sample depends on the rest of its batch: the losses of a batch differ from the losses of
    its first sample and of the rest. False where samples cannot be told apart, or the loss talks to other ranks. Called
    as `try_out` is.
    """
    all_tensors = tensors((output, target))
    samples = all_tensors[0].shape[0] if all_tensors and all_tensors[0].dim() else 0
    if samples < 2 or any(tensor.dim() == 0 or tensor.shape[0] != samples for tensor in all_tensors):
        return False
    talks: list[bool] = []

    def watch(func: Operator, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        talks.extend([True] * ("c10d" in func.namespace))
        return func(*args, **kwargs)

    def losses(rows: slice) -> tuple[Tensor, Tensor]:
        part = map_tensors(lambda tensor: tensor[rows], (output, target))
        if step.counts == "own":
            total, number = OwnSum(step).count_losses(*part)[:2]
        else:
            total, number = loss_sum(step)(*part), count(step, part[1])
        return total.double(), torch.as_tensor(number).double()

    with OperationMode(watch), torch.no_grad():
        joint, *pieces = (losses(rows) for rows in (slice(None), slice(1), slice(1, None)))
    if talks:
        return False
    pairs = zip(joint, *pieces, strict=True)
    return not all(torch.allclose(all, one + rest, rtol=1e-3, atol=1e-4, equal_nan=True) for all, one, rest in pairs)


def loss_sum(step: LossStep, pieces: AnswerPieces | None = None) -> LossSum:
    """Returns the function (output, target) -> scalar tensor that sums the losses; differentiable in the output.
    `pieces`: of answers that several ranks have.
    """
    mark = mark_errors(step.line)
    if step.kind in PREFERENCES:
        return PairSum(step, pieces)
    if step.together:
        with mark:
            return WholeSum(step)
    with mark:
        loss = _unmarked(step)
    if step.compiled:
        assert not isinstance(loss, OwnSum)
        loss = torch.compile(loss)
    return loss if isinstance(loss, OwnSum) else mark(loss)  # which marks its errors itself


def _unmarked(step: LossStep) -> LossSum:
    match step.kind:
        case "cross_entropy":
            return _cross_entropy(step)
        case "mse":
            return _elementwise(step, F.mse_loss)
        case "l1":
            return _elementwise(step, F.l1_loss)
        case "bce":
            return _elementwise(step, F.binary_cross_entropy_with_logits)
        case "python":
            return _python(step) if step.counts != "own" else OwnSum(step)
        case "own":
            return OwnSum(step)
        case other:
            raise AssertionError(f"`{other}` compares samples or answers")


def classes_last(step: LossStep, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scores as (tokens, classes) and targets as (tokens,)."""
    if _classes_first(step, output, target):
        output = output.movedim(1, -1)
    return output.reshape(-1, output.shape[-1]), target.reshape(-1).long()


def _classes_first(step: LossStep, output: Tensor, target: Tensor) -> bool:
    """True if the classes are the dim after the samples, and not the last. Raises LossError for other scores."""
    comes_first = step.arguments.get("classes") == "first"
    if target.shape != (output.shape[:1] + output.shape[2:] if comes_first else output.shape[:-1]):
        raise LossError(
            f"an output of shape {tuple(output.shape)} is not a set of scores for targets of shape "
            f"{tuple(target.shape)}: the classes come {'first' if comes_first else 'last'}"
        )
    return comes_first


def wide_tensors(output: object) -> object:
    """Converts the tensors of a structure so."""
    return map_tensors(wide, output)


def match_target(output: Tensor, target: Tensor) -> Tensor:
    """Returns the target in the output's shape and dtype; a last dimension of 1 may be missing or extra."""
    if output.shape != target.shape:
        if output.shape[:1] != target.shape[:1] or output.numel() != target.numel():
            raise LossError(f"an output of shape {tuple(output.shape)} and a target of {tuple(target.shape)}")
        target = target.reshape(output.shape)
    return target.to(output.dtype)


def _cross_entropy(step: LossStep) -> LossSum:
    ignore = _NONE_IGNORED if step.ignore is None else step.ignore
    smoothing = float(step.arguments.get("label_smoothing", 0.0))

    def total(output: Tensor, target: Tensor) -> Tensor:
        if step.head and output.shape == target.shape:
            return output.sum()  # the head has computed the losses (chunked_head.py)
        if _classes_first(step, output, target):
            scores, labels = wide(output), target.long()  # torch takes them so, without a copy
        else:
            scores, labels = classes_last(step, wide(output), target)
        summed = F.cross_entropy(scores, labels, ignore_index=ignore, reduction="sum", label_smoothing=smoothing)
        # If ranks have shares of the scores (parallel/tensor_parallel.py) every rank gets the sum.
        return summed.to_local() if hasattr(summed, "to_local") else summed

    return total


# ------------------------------------------------------------------------------------------------- losses of pairs


class PairLosses(NamedTuple):
    """The loss of each pair, and how far the reward of the chosen answer is above the rejected answer's."""

    losses: Tensor
    margins: Tensor


class AnswerPieces(NamedTuple):
    """The ranks that have pieces of each row: `sum` sums a tensor over them. Its gradient is that of the sum of their
    losses, as each of them has an equal share of the losses.
    """

    ranks: int
    sum: Callable[[Tensor], Tensor]


def token_targets(target: Structure) -> Tensor:
    """Returns the tokens of a target, which may have the reference's log-probabilities beside them."""
    tokens: Tensor = target[0] if isinstance(target, tuple) else target
    return tokens


def row_log_probabilities(step: LossStep, output: Tensor, targets: Tensor) -> Tensor:
    """Returns the sum of the log-probabilities of each row's targets, in float32 at least."""
    if step.head and output.shape == targets.shape:
        return -output.sum(1)  # the head has computed the losses
    assert step.ignore is not None
    scores, labels = classes_last(step, wide(output), targets)
    losses = F.cross_entropy(scores, labels, ignore_index=step.ignore, reduction="none")
    return -losses.view(targets.shape).sum(1)


def pair_losses(step: LossStep, output: Tensor, target: Structure, pieces: AnswerPieces | None = None) -> PairLosses:
    """Returns the losses and the reward margins of a batch of pairs, whole on each rank that has a piece of it."""
    assert step.kind in PREFERENCES
    targets = token_targets(target)
    sums, beta = row_log_probabilities(step, output, targets), float(step.arguments["beta"])
    by_token = step.kind != "dpo"
    counts = targets.ne(-100 if step.ignore is None else step.ignore).sum(1) if by_token else None
    if pieces is not None and counts is None:
        sums = pieces.sum(sums)
    elif pieces is not None and counts is not None:
        sums, counts = pieces.sum(torch.stack((sums, counts.to(sums.dtype)))).unbind(0)
    if isinstance(target, tuple):
        sums = sums - target[1].to(sums.dtype)
    if counts is not None:
        sums = sums / counts
    chosen, rejected = sums.view(-1, 2).unbind(1)
    lead = chosen - rejected
    match step.kind:
        case "dpo":
            losses = -F.logsigmoid(beta * lead)
        case "ipo":
            losses = (lead - 1 / (2 * beta)).square()
        case "simpo":
            losses = -F.logsigmoid(beta * lead - float(step.arguments["gamma"]))
        case _:
            log_odds = lead - (_log1mexp(chosen) - _log1mexp(rejected))
            losses = -chosen - beta * F.logsigmoid(log_odds)
    return PairLosses(losses, beta * lead.detach())


class PairSum:
    """The sum of the losses of a batch of pairs, differentiable. `take_rewards` returns the sums of what the rewards
    tell since it was called, by name. Of pairs in pieces each rank has an equal share of the sums.
    """

    def __init__(self, step: LossStep, pieces: AnswerPieces | None = None) -> None:
        self._step, self._pieces = step, pieces
        self._ranks = pieces.ranks if pieces is not None else 1
        self._margin, self._right = torch.zeros(()), torch.zeros(())

    def __call__(self, output: Tensor, target: Structure) -> Tensor:
        with mark_errors(self._step.line):
            losses, margins = pair_losses(self._step, output, target, self._pieces)
        self._margin = self._margin.to(margins.device) + margins.sum()
        self._right = self._right.to(margins.device) + (margins > 0).sum()
        return losses.sum() / self._ranks

    def take_rewards(self) -> dict[str, Tensor]:
        """Returns and resets the sums."""
        rewards = {"reward_margin": self._margin / self._ranks, "reward_accuracy": self._right / self._ranks}
        self._margin, self._right = torch.zeros(()), torch.zeros(())
        return rewards


def _log1mexp(x: Tensor) -> Tensor:
    """Returns log(1 - exp(x)) of negative numbers."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def _elementwise(step: LossStep, function: Callable[..., Tensor]) -> LossSum:
    def total(output: Tensor, target: Tensor) -> Tensor:
        output = wide(output)
        summed = function(output, match_target(output, target), reduction="sum")
        numbers = output[0].numel() if len(output) else 1
        return summed / numbers if numbers != 1 else summed

    return total


def _python(step: LossStep) -> LossSum:
    assert step.python is not None
    named = step.python
    function = load_loss(named)
    ignore = step.ignore if step.counts == "kept" else None
    what = "target" if step.counts == "kept" else step.counts.removesuffix("s")

    def total(output: Tensor, target: Tensor) -> Tensor:
        losses = function(output, target)
        expected = target.shape[0] if step.counts == "samples" else target.numel()
        if not isinstance(losses, Tensor) or losses.numel() != expected:
            shape_text = f"{losses.numel()}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            raise LossError(
                f"{step.line or named.line}: `{named.function}` has to give one loss for each {what} ({expected}), "
                f"and it gave {shape_text}",
                remedy=of_one_number(named.function) if shape_text == "1" else "",
            )
        if ignore is not None:
            losses = losses.reshape(-1).masked_fill(target.reshape(-1).eq(ignore), 0)
        return losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))

    return total
