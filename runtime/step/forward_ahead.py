"""Forward passes ahead: over all micro-batches of a step, without autograd, before those that have a backward pass.

Model: a loss that compares samples takes the outputs (full_batch.py), a balance loss the tokens of each expert.

Contract: a micro-batch draws the same random numbers in both of its passes, and finds the same buffers.

Limits: a forward pass gives the same output twice. Forward passes that gather or exchange do so twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from dslc.compiler.trace.structures import Structure
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.process import random_numbers
from dslc.runtime.step.assemble import TrainingComponents

Forward = Callable[[Structure, Structure], Structure]
Pass = TypeVar("Pass", bound=Callable[[Structure, Structure], Tensor])


class PassesAhead:
    """The passes ahead of a step by `forward`, of an input and its target; `enter` is called before each."""

    def __init__(self, parts: TrainingComponents, forward: Forward, enter: Callable[[int], None]) -> None:
        self._plain, self._device, self._experts = parts.plain, parts.device, parts.experts
        self._forward, self._enter = forward, enter
        self._drawn: list[dict[str, Tensor]] = []

    def wrap(self, work: Pass) -> Pass:
        """Returns the pass of a micro-batch, which draws again what it drew ahead."""

        def redraw(input: Structure, target: Structure) -> Tensor:
            if self._drawn:
                random_numbers.restore(self._drawn.pop(0), self._device)
            return work(input, target)

        return cast("Pass", redraw)

    @torch.no_grad()
    def run(self, batch: StepBatch, take: Callable[[Structure], None]) -> None:
        """Gives `take` the output of each micro-batch, and leaves the buffers as they were."""
        before: dict[str, Tensor] = {}
        self._drawn = []

        def keep(module: nn.Module, given: object) -> None:  # when the ranks have agreed on them
            if not before:
                before.update({name: buffer.clone() for name, buffer in module.named_buffers()})

        if self._experts is not None:
            self._experts.begin_ahead()
        hook = self._plain.register_forward_pre_hook(keep)
        try:
            for number, (input, target) in enumerate(batch.micro):
                self._enter(number)
                self._drawn.append(random_numbers.state(self._device))
                take(self._forward(input, target))
        finally:
            hook.remove()
        for name, buffer in self._plain.named_buffers():
            if name in before:
                buffer.copy_(before[name])


class StepBalanceLoss:
    """The balance loss of experts in a step: `begin` comes first, `before_backward` before each backward pass, and
    `added_to` adds the loss of the step to the task's.

    Model: the forward passes that precede the first backward pass count the tokens of each expert. Several
    micro-batches without a pipeline run passes ahead for that. `scaled` multiplies a loss as the backward pass of the
    task's loss does.
    """

    def __init__(self, parts: TrainingComponents, scaled: Callable[[Tensor], Tensor]) -> None:
        has_loss = parts.experts is not None and parts.experts.has_loss
        self._experts = parts.experts if has_loss else None
        self._parts, self._scaled = parts, scaled
        self._is_ready = False

    def begin(self) -> None:
        self._is_ready = False

    def count_ahead(self, batch: StepBatch, ahead: PassesAhead | None) -> None:
        """Counts the tokens of several micro-batches by passes `ahead`; None if the task's loss has run these."""
        if self._experts is not None and len(batch.micro) > 1:
            if ahead is not None:
                ahead.run(batch, _drop)
            self.before_backward()

    def before_backward(self) -> None:
        if self._experts is not None and not self._is_ready:
            self._experts.set_gradients(self._scaled)
            self._is_ready = True

    def added_to(self, total: Tensor, number: int | Tensor, samples: int) -> Tensor:
        """Returns the sum of this rank's losses with its part of the balance loss, and logs that."""
        if self._experts is None:
            return total
        loss = self._experts.balance_loss()
        self._parts.further["balance_loss"] = loss * samples
        return total + loss * number


def _drop(output: object) -> None:
    pass
