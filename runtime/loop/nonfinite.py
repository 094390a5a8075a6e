"""Finds losses, gradients and parameters that are not finite, and keeps them out of checkpoints.

Model: `train.on_nonfinite` decides. With `stop` a training ends before the update of a step whose loss is nan or
infinite, and the message names its cause (nonfinite_cause.py). With `skip` the update is skipped
(technique/precision.py, `StepSkipper`) and counted. With both, a state with numbers that are not finite is never saved
as a checkpoint or as weights: the training ends instead. `continue` checks nothing.

When `stop` finds a loss, without a new wait of the host:

    on CPUs    whose ranks share one board, in the step itself: the loss is in the host's memory. The rank that has it
               writes the step on the board before its backward pass. The other ranks read the board after the exchange
               of gradients, to which the rank contributed later. So all of them end before the same update.
    else       in the next step that is logged, before its update, where the ranks exchange the loss anyway. By then
               parameters may have become not finite: the first of these is named. The same holds on CPUs if each rank
               has a gradient of its own (exchange/), as nothing then holds a rank up in each step.

Gradients are checked when their norm is known (`clip`, on CPUs) and before an update that is saved; parameters before
they are saved, and when a loss is not finite. With loss scaling an overflowing gradient is no fault. An exchange that
makes other numbers nan by one (exchange/) finds the gradients at fault itself, on CPUs, before a weight changes.

Limits: a gradient that is not finite under a finite loss shows in the next loss, unless it is clipped or saved first.
All ranks read the board in time only if each of them trains something, which the compiler ensures for the stages of a
pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.codec import from_json, to_json
from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.runtime.checkpoint.checkpoint import Checkpoints
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.exchange.base import GradientExchange
from dslc.runtime.exchange.compressed_momentum import MomentumExchange
from dslc.runtime.loop.nonfinite_cause import (
    NonFiniteObservation,
    non_finite_names,
    parameters_text,
    repeat,
    samples_of,
    share_text,
    told_by_repetition,
    values_text,
)
from dslc.runtime.model.tensor_names import named_tensors
from dslc.runtime.process.records import note
from dslc.runtime.process.stop import RunControl
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.technique.precision import StepSkipper

Report = TypeVar("Report")
_FOLDED = 256  # losses kept one by one until a step is logged


class NonFinite(RuntimeError):
    """Ends the training. `told` on the rank that reports the text; `module` is the one at fault, if known."""

    def __init__(self, message: str, *, is_reported: bool, module: str | None = None) -> None:
        super().__init__(message)
        self.told, self.module = is_reported, module


class NonFiniteGuard:
    """Checks what one rank computes, and ends the training or counts skipped updates. Made by all ranks."""

    def __init__(
        self, job: JobProgram, place: RankPlace, parts: TrainingComponents, board: RunControl, checkpoints: Checkpoints
    ) -> None:
        self.job, self.place, self.parts, self.board, self.checkpoints = job, place, parts, board, checkpoints
        self.step = 0
        self.stops = job.on_nonfinite == "stop"
        in_step = job.device == "cpu" and job.gradients.kind != "local"  # these sum nothing between passes and update
        self.at_once = self.stops and in_step and job.world_size == len(board.ranks)
        self.hears_in_logs = self.stops and not self.at_once
        self._totals: list[Tensor] = []  # the losses since the last step that was logged
        self._own = 0.0  # a loss of this rank that is not finite
        self._saved = -1  # the step whose state was checked last
        # Kept, because a model that has just been evaluated may show whole parameters instead of its parts.
        tensors = named_tensors(parts.plain)
        self._parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
        self._statistics: list[tuple[Tensor, Tensor]] = []
        self._skipping = parts.scaler if isinstance(parts.scaler, StepSkipper) else None
        self._said = int(self._skipping.skipped) if self._skipping else 0  # skipped updates
        self._scaled = parts.scaler.is_enabled()
        self.loss: Callable[[Tensor], None] = self._look_at_loss if self.at_once else _ignore_number
        exchange = parts.exchange
        self._exchange = exchange if isinstance(exchange, GradientExchange) else None
        if self._exchange is not None:
            self._exchange.watched = self.at_once and not self._scaled
        if isinstance(exchange, MomentumExchange) and self.stops and job.device == "cpu" and not self._scaled:
            exchange.found = self.gradients  # in the exchange itself, which all ranks come to
        self.norm: Callable[[Tensor], None] = (
            self._look_at_norm if self.at_once and not self._scaled else _ignore_number
        )

    # ----------------------------------------------------------------------------------------------------- in a step

    def enter(self, step: int) -> None:
        """Begins a step. Keeps the statistics, so that a skipped step can restore them."""
        self.step = step
        if self._skipping is not None:
            buffers = [buffer for buffer in self.parts.plain.buffers() if buffer.is_floating_point()]
            self._statistics = [(buffer, buffer.clone()) for buffer in buffers]

    def leave(self) -> None:
        """Ends a step, after its update."""
        if self._skipping is not None:
            for buffer, saved_buffer in self._statistics:
                buffer.copy_(torch.where(self._skipping.found > 0, saved_buffer, buffer))

    def _look_at_loss(self, loss: Tensor) -> None:
        """Checks the loss of a micro-batch, before its backward pass."""
        number = loss.item()
        if not math.isfinite(number):
            self._own = number
            self.board.not_finite = self.step

    def _look_at_norm(self, norm: Tensor) -> None:
        """Checks the norm of the gradient, the same on all ranks, before anything is scaled by it."""
        if not math.isfinite(norm.item()):
            self.gradients()

    def passed(self, batch: StepBatch, total: Tensor) -> None:
        """Checks a step between its passes and its update. `total` is the sum of this rank's losses."""
        if self.at_once:
            if 0 < self.board.not_finite <= self.step:
                self._end(batch)
            if self._exchange is not None and self._exchange.unsound:
                self.gradients()
        elif self.hears_in_logs:
            self._totals.append(total.detach().reshape(1))
            if len(self._totals) == _FOLDED:
                self._totals = [torch.cat(self._totals)]

    def tells(self) -> Tensor | None:
        """Returns this rank's non-finite losses, or rank 0's skipped steps, for the sum of a logged step; None if
        neither.
        """
        if self._skipping is not None:
            return self._skipping.skipped * (self.place.rank == 0)
        if not self.hears_in_logs:
            return None
        return torch.cat(self._totals).isfinite().logical_not().sum()

    def check_total(self, batch: StepBatch, number: int) -> None:
        """Takes the sum of all ranks' numbers, in a logged step before its update."""
        if number:
            self._end(batch)
        self._totals.clear()

    def note_skipped(self, run_dir: str, number: int) -> int:
        """Notes how many updates were skipped, `number` by now, if there are more than in the last note."""
        more, self._said = number - self._said, number
        if more:
            note(
                run_dir,
                f"by step {self.step} {more} update{'s were' if more > 1 else ' was'} left out, {number} in all",
            )
        return number

    # -------------------------------------------------------------------------------------------- before it is saved

    def gradients(self) -> None:
        """Raises NonFinite, before an update that will be saved, if a gradient of any rank is not finite."""
        if not self.stops or self._scaled:
            return
        named = [(name, parameter.grad) for name, parameter in self._parameters.items() if parameter.grad is not None]
        non_finite = non_finite_names(named)
        if self._exchange is not None and self._exchange.unsound:  # others are nan by now
            non_finite = [name for name, _ in named if name in self._exchange.broken]
        if not self._any(non_finite):
            return
        self.checkpoints.finish()
        stage = self._stage(non_finite[-1]) if non_finite else -1
        report = max(self._gathered((stage, -self.place.rank, non_finite)))
        names = report[2]
        self._raise(
            -report[1],
            f"the loss of step {self.step} is finite, and its gradient is not",
            f"the first parameter whose gradient is not finite, as the backward pass goes, is `{names[-1]}`"
            + share_text(names, len(named)),
        )

    def state(self) -> None:
        """Raises NonFinite, before parameters are saved, if one, or a buffer, of any rank is not finite."""
        if self.job.on_nonfinite == "continue" or self._saved == self.step:
            return
        self._saved = self.step
        current = {
            name: tensor for name, tensor in named_tensors(self.parts.plain).items() if name not in self._parameters
        }
        named = self._parameters | current
        non_finite = non_finite_names(named.items())
        if not self._any(non_finite):
            return
        self.checkpoints.finish()
        report = min(
            (not names, stage, rank, names)
            for stage, rank, names in self._gathered(
                (self._stage(non_finite[0]) if non_finite else 0, self.place.rank, non_finite)
            )
        )
        self._raise(
            report[2],
            f"after step {self.step}, whose loss is finite, what would be saved is not",
            f"the first of the model's tensors that is not finite is `{report[3][0]}`"
            + share_text(report[3], len(named)),
        )

    def _any(self, non_finite: Sequence[str]) -> bool:
        number = torch.tensor(float(len(non_finite)), device=self.parts.device)
        if self.job.world_size > 1:
            dist.all_reduce(number)
        return number.item() > 0

    # ------------------------------------------------------------------------------------------------------- the end

    def _end(self, batch: StepBatch) -> NoReturn:
        """Ends the training, on all ranks in the same step."""
        self.checkpoints.finish()
        mine = self._observe(batch)
        observations = self._of_all(mine)
        step = min(number for observation in observations for number in observation.steps)
        culprits = [observation for observation in observations if step in observation.steps]
        lines = [f"the loss of step {step} is {values_text(culprits)}"]
        if step < self.step:
            lines[0] += f", found in step {self.step}, the next that is logged"
        lines += [
            f"the batch is not finite: {sample}" for observation in culprits for sample in observation.samples[:1]
        ]
        # Ranks of a later stage come later, so that the first found is the first in the model.
        spoilt, module = (
            next((observation.parameters for observation in observations if observation.parameters), None),
            None,
        )
        if spoilt is not None:
            lines.append(parameters_text(spoilt, step, self.step))
        else:
            repeat(self.job, self.parts, batch, mine)
            module, more = told_by_repetition(self._of_all(mine), {observation.rank for observation in culprits})
            lines += more
        self._raise(culprits[0].rank, *lines, module=module)

    def _raise(self, rank: int, *lines: str, module: str | None = None) -> NoReturn:
        error = NonFinite("\n".join(lines), is_reported=rank == self.place.rank, module=module)
        newest = self.checkpoints.newest
        if newest:
            error.add_note(f"nothing of it was saved: the last checkpoint is {newest}")
        else:
            error.add_note("nothing of it was saved, and there is no checkpoint to resume from (`checkpoint.every`)")
        if self.stops:
            error.add_note("`train.on_nonfinite = skip` leaves out the update of such a step, `continue` trains on")
        raise error

    def _observe(self, batch: StepBatch) -> NonFiniteObservation:
        if self.at_once:
            steps: tuple[int, ...] = (self.board.not_finite,) if self._own else ()
            loss = self._own
        else:
            numbers = torch.cat(self._totals).tolist()
            first_step = self.step - len(numbers) + 1
            non_finite = {first_step + n: number for n, number in enumerate(numbers) if not math.isfinite(number)}
            steps, loss = tuple(non_finite), next(iter(non_finite.values()), 0.0)
        return NonFiniteObservation(
            rank=self.place.rank,
            steps=steps,
            loss=loss,
            samples=samples_of(self.job, self.place, self.step, batch),
            parameters=tuple(non_finite_names(self._parameters.items())),
        )

    def _of_all(self, mine: NonFiniteObservation) -> list[NonFiniteObservation]:
        """Gathers the observations of all ranks, as the plain values that transport/unpickling.py accepts."""
        return [from_json(NonFiniteObservation, observation) for observation in self._gathered(to_json(mine))]

    def _gathered(self, mine: Report) -> list[Report]:
        of_all = [mine] * self.job.world_size
        if self.job.world_size == 1:
            return of_all
        dist.all_gather_object(of_all, mine)
        return of_all

    def _stage(self, name: str) -> int:
        """Returns the index of the stage that has a tensor."""
        axis = self.parts.pipeline
        if axis is None:
            return 0
        of_stage = {id(parameter): index for index, stage in axis.stages.items() for parameter in stage.parameters()}
        return of_stage.get(id(self._parameters.get(name)), 0)


def _ignore_number(number: Tensor) -> None:
    pass
