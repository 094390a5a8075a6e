"""Losses that count by themselves: a user's own that gives sums, and those that a model returns.

Model: for each micro-batch such a loss gives one of

    one number for each sample, or each token    their sum and their number, without targets that do not count
    a pair (sum, count)                          just that
    one number, of a model alone                 the mean of its samples, or of a part of the batch (`mean_of`)

A model gives it as `loss` in its output, or alone, or in a tuple as the one number without dims, as in (logits, loss).

And, in a pair with any of them, a dict of further losses: one number, a mean of the samples, or one for each sample.
`OwnSum` gives the sum, and adds up the counts until they are taken: they are known when the backward passes of a step
have begun, and its gradients are divided afterwards (step/stepper.py).

Limits: the samples of a batch are counted by the first dim of its first tensor, where one number is their mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dslc.compiler.ir.program import LossStep
from dslc.compiler.trace.structures import Structure, tensors
from dslc.runtime.model.errors import LossError
from dslc.runtime.model.loss_state import load_loss
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.process.records import name_fault
from dslc.runtime.process.user_code import load_function


class LossCounts(NamedTuple):
    """The sum of a batch's losses and their number, and the sums of its further losses over its samples, by name."""

    total: Tensor
    number: int | Tensor
    further: dict[str, Tensor]


_OF_A_TUPLE = (
    "let `forward` return the loss alone, in a tuple in which no other part is one number, such as (logits, loss), or "
    'in a dict as `loss`: `{"logits": logits, "loss": loss}`, `{"loss": (sum, count)}`; `own(mean_of = …)` says what '
    "the loss is a mean of, if not of the samples"
)


def of_one_number(function: str) -> str:
    """Returns the remedy for a user's loss that gives one number for a whole batch."""
    return (
        'of a mean, the losses themselves (`reduction="none"`), or a pair (sum, count); of a loss of the batch as a '
        f'whole, as dice is, `python("{function}", over = all)`; a network may return a mean: `own(mean_of = …)`'
    )


def counts_itself(step: LossStep, output: object, target: object) -> bool:
    """True if a user's loss gives a pair, or one number for each sample of several targets: it counts by itself."""
    assert step.python is not None
    with mark_errors(step.python.line):
        result = load_function(step.python)(output, target)
    if step.counts != "kept" or not isinstance(result, Tensor) or not isinstance(target, Tensor):
        return isinstance(result, tuple | list)
    return result.numel() == target.shape[0] != target.numel()


class OwnSum:
    """The sum of the losses of a batch, differentiable. `take_counts` returns the counts since it was called."""

    def __init__(self, step: LossStep) -> None:
        self._step = step
        self._own = load_loss(step.python) if step.python is not None else None
        self._line = step.line or (step.python.line if step.python else "")
        self._number: int | Tensor = 0
        self._further: dict[str, Tensor] = {}

    def __call__(self, output: Structure, target: Structure) -> Tensor:
        counts = self.count_losses(output, target)
        number = counts.number
        self._number += number.detach().double() if isinstance(number, Tensor) else number
        for name, value in counts.further.items():
            self._further[name] = self._further[name] + value if name in self._further else value
        return counts.total

    def take_counts(self) -> tuple[int | Tensor, dict[str, Tensor]]:
        """Returns and resets the number of losses (float64 if a tensor) and the sums of the further ones."""
        number, further = self._number, self._further
        self._number, self._further = 0, {}
        return number, further

    def count_losses(self, output: Structure, target: Structure) -> LossCounts:
        """Returns what a batch gives. Raises LossError."""
        with mark_errors(self._line):
            result = self._own(output, target) if self._own is not None else _of_model(output)
        return self.interpret(result, target)

    def interpret(self, result: Structure, target: Structure) -> LossCounts:
        """Returns the meaning of what a loss gave. Raises LossError."""
        further: Mapping[str, Structure] = {}
        if isinstance(result, tuple | list) and len(result) in (2, 3) and isinstance(result[-1], Mapping):
            *parts, further = result
            result = parts[0] if len(parts) == 1 else tuple(parts)
        total, number = self._sum(result, target)
        return LossCounts(total, number, {self._named(n): _over_samples(value, target) for n, value in further.items()})

    def _named(self, name: object) -> str:
        """Returns the name of a further loss in a record."""
        if fault := name_fault(str(name)):
            raise LossError(f"{self._line}: the further loss {name!r} needs another name: {fault}")
        return str(name)

    def _sum(self, result: Structure, target: Structure) -> tuple[Tensor, int | Tensor]:
        if isinstance(result, tuple | list) and len(result) == 2:
            total, number = result
            if isinstance(total, Tensor) and total.numel() == 1 and _numbers(number) == 1:
                return in_float32(total.reshape(())), torch.as_tensor(number, device=total.device).reshape(())
        elif isinstance(result, Tensor) and result.dim() and (mask := self._counted_mask(target, result)) is not None:
            return in_float32(result.reshape(-1).masked_fill(~mask, 0).sum()), mask.sum()
        elif isinstance(result, Tensor) and result.numel() != 1:
            return in_float32(result.sum()), result.numel()
        elif isinstance(result, Tensor) and self._step.kind == "own":
            number = self._number_of(target)
            return in_float32(result.reshape(())) * number, number
        elif isinstance(result, Tensor) and samples_of(target) == 1:
            return in_float32(result.reshape(())), 1
        self._refuse(result)
        raise AssertionError

    def _number_of(self, target: Structure) -> int | Tensor:
        """Returns the number of what a mean is of."""
        arguments = self._step.arguments
        name, ignore, shift = arguments["mean_of"], arguments["ignore"], arguments["shift"]
        if name is None:
            return samples_of(target)
        number: Tensor = _part(target, name, shift).ne(ignore).sum()
        return number

    def _counted_mask(self, target: Structure, losses: Tensor) -> Tensor | None:
        """Returns which of the losses count, by the target of each; None if all do."""
        arguments, ignore = self._step.arguments, self._step.ignore
        if self._step.kind == "own" and arguments["mean_of"] is not None:
            target, ignore = _part(target, arguments["mean_of"], arguments["shift"]), arguments["ignore"]
        fits = isinstance(target, Tensor) and not target.is_floating_point() and target.numel() == losses.numel()
        return target.reshape(-1).ne(ignore) if fits and ignore is not None else None

    def _refuse(self, result: object) -> None:
        named = self._step.python
        what = f"`{named.function}`" if named is not None else "the model"
        got = "one number" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise LossError(
            f"{self._line}: {what} has to give one loss for each sample or token, or a pair (sum, count), and it gave "
            f"{got}",
            remedy=of_one_number(named.function) if named is not None else _OF_A_TUPLE,
        )


def _part(batch: Structure, name: str, shift: int) -> Structure:
    if isinstance(batch, Mapping):
        part = batch[name]
    elif isinstance(batch, tuple | list) and name.isdecimal() and int(name) < len(batch):
        part = batch[int(name)]
    else:
        part = getattr(batch, name)
    return part[:, shift:] if shift else part


def _of_model(output: object) -> object:
    """Returns the loss in a model's output: its `loss`, the one number in a tuple, or itself."""
    if isinstance(output, Mapping):
        if output.get("loss") is None:
            keys = [f"`{key}`" for key in output]
            raise LossError(
                f"the model returns a dict without `loss`, which `own()` takes from it: its keys are {', '.join(keys)}",
                remedy="let `forward` add the losses up, with their weights, and return the sum as `loss` in the dict",
            )
        return output["loss"]
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list):
        return _loss_in_tuple(output)
    return output if loss is None else loss


def _loss_in_tuple(output: Sequence[object]) -> object:
    """Returns the loss of a tuple: of (logits, loss) or (loss, logits, …) the one number without dims; (sum, count) as
    it is. A dict of further losses stays beside it.

    Raises LossError where two readings are possible. A loss has a gradient in training, and a count has none.
    """
    *parts, further = output if output and isinstance(output[-1], Mapping) else (*output, None)
    numbers = [part for part in parts if _is_number(part)]
    losses = [part for part in numbers if isinstance(part, Tensor) and part.is_floating_point()]
    if len(parts) < 2 or not losses:
        return output
    other_parts = [part for part in parts if part is not losses[0]]
    if len(numbers) == len(parts) == 2 and losses[0] is parts[0] and not _has_gradient(other_parts[0]):
        return output  # (sum, count)
    if len(numbers) > 1:
        raise LossError(f"{len(numbers)} parts of what the model returns may be the loss", _OF_A_TUPLE)
    if torch.is_grad_enabled() and any(map(_has_gradient, parts)):
        if not _has_gradient(losses[0]):
            raise LossError("the one number in the tuple that the model returns has no gradient", _OF_A_TUPLE)
        if len(other_parts) == 1 and losses[0] is parts[0] and _may_be_a_count(other_parts[0]):
            raise LossError("the second part that the model returns may be a count, and has dims", _OF_A_TUPLE)
    return losses[0] if further is None else (losses[0], further)


def _is_number(part: object) -> bool:
    """True for a number, or a tensor of one number without dims."""
    return part.dim() == 0 if isinstance(part, Tensor) else type(part) in (int, float)


def _numbers(part: object) -> int:
    return part.numel() if isinstance(part, Tensor) else 1


def _may_be_a_count(part: object) -> bool:
    return isinstance(part, Tensor) and part.numel() == 1 and not part.requires_grad


def _has_gradient(part: object) -> bool:
    return isinstance(part, Tensor) and part.requires_grad


def samples_of(batch: Structure, default: int = 1) -> int:
    """Returns the samples of a batch or an output, by its first tensor; `default` if that has no dim."""
    batch_tensors = tensors(batch)
    return batch_tensors[0].shape[0] if batch_tensors and batch_tensors[0].dim() else default


def _over_samples(value: object, target: object) -> Tensor:
    """Returns the sum of a further loss over the samples."""
    numbers = torch.as_tensor(value).detach().double()
    return numbers.sum() if numbers.numel() > 1 else numbers.reshape(()) * samples_of(target)


def in_float32(total: Tensor) -> Tensor:
    """Converts numbers to float32 at least."""
    if total.dtype is torch.float32:  # two calls of torch fewer in each step
        return total
    return total.to(torch.promote_types(total.dtype, torch.float32))


def wide(output: Tensor) -> Tensor:
    """Converts 16-bit numbers to float32 and leaves other numbers as they are."""
    return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
