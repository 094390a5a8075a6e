"""Losses, gradients and parameters that are not finite: when they are found, what is said of them, what is never saved.

Model: `train.on_nonfinite` decides. Under `stop` a training ends before the update of a step whose loss is nan or
infinite. The ranks do the forward passes of that step once more, with a hook on every module, and the message names the
first whose output is not finite. Under `skip` the update is left out (precision.py, `Skipping`) and counted. Under both
a state with numbers that are not finite is neither a checkpoint nor weights: the training ends instead. `continue`
looks at nothing.

When `stop` finds a loss, without a wait of the host that was not there:

    on CPUs    of one node, in the step itself: the loss lies in the host's memory. The rank that has it writes the step
               on the board before its backward pass, and the other ranks read that after the exchange of gradients, to
               which it contributed later: all of them end before the same update.
    else       in the next step that is logged, before its update, where the ranks agree on the loss anyway. By then
               the parameters may have taken numbers that are not finite: of these the first is named.

Gradients are looked at where their norm is known (`clip`, on CPUs) and before an update that is saved; parameters
before they are saved, and when a loss is not finite. Where losses are scaled, an overflowing gradient is the scale's
business and no fault.

Limits: the repeated step draws other random numbers. A gradient that is not finite under a loss that is shows in the
next loss, where nothing is clipped or saved in between. That all ranks read in time what is on the board needs that
each of them trains something, of which the compiler sees to the stages of a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dslc.compiler.program import JobProgram, RankPlace, from_json, to_json
from dslc.runtime.assemble import Parts
from dslc.runtime.batches import StepBatch
from dslc.runtime.checkpoint import Checkpoints
from dslc.runtime.context_parallel import piece_of
from dslc.runtime.evaluate import forward
from dslc.runtime.precision import Skipping, autocast
from dslc.runtime.records import note
from dslc.runtime.sampler import micro_batches, steps_per_epoch
from dslc.runtime.stop import Board
from dslc.runtime.weights import named_tensors

_FOLDED = 256  # losses that are kept one by one until a step is logged


class NonFinite(RuntimeError):
    """The training ends. The text is for the user; `told` on the rank whose text it is to be. `module` is the one at
    fault, where there is one."""

    def __init__(self, message: str, *, told: bool, module: str | None = None) -> None:
        super().__init__(message)
        self.told, self.module = told, module


@dataclass(frozen=True, kw_only=True)
class _Culprit:
    """The first module of a rank whose output was not finite, in the repeated step."""

    micro: int
    stage: int
    name: str
    kind: str
    handed: bool  # what it was given was not finite already

    @property
    def words(self) -> str:
        return f"`{self.name}` ({self.kind})" if self.name else f"the model itself ({self.kind})"


@dataclass(kw_only=True)
class _Seen:
    """What one rank has seen of the step that ends the training."""

    rank: int
    steps: tuple[int, ...]  # those of the last ones in which its loss was not finite
    loss: float  # the last that is not finite; 0 where all are
    samples: tuple[str, ...] = ()  # numbers of the batch that are not finite
    parameters: tuple[str, ...] = ()  # not finite, in the model's order
    culprit: _Culprit | None = None
    finite_again: bool = True  # the loss of the repeated step


class Guard:
    """Looks at what one rank computes, and ends the training or counts what is left out. Made by all ranks."""

    def __init__(self, job: JobProgram, place: RankPlace, parts: Parts, board: Board, checkpoints: Checkpoints) -> None:
        self.job, self.place, self.parts, self.board, self.checkpoints = job, place, parts, board, checkpoints
        self.step = 0
        self.stops = job.on_nonfinite == "stop"
        self.at_once = self.stops and job.device == "cpu" and job.world_size == job.processes
        self.hears_in_logs = self.stops and not self.at_once
        self._said = 0  # updates that were left out
        self._totals: list[Tensor] = []  # the losses since the last step that was logged
        self._own = 0.0  # a loss of this rank that is not finite
        self._saved = -1  # the step whose state was looked at last
        # Kept, because a model that has just been evaluated may show whole parameters in the place of its parts.
        tensors = named_tensors(parts.plain)
        self._parameters = {name: each for name, each in tensors.items() if isinstance(each, nn.Parameter)}
        self._statistics: list[tuple[Tensor, Tensor]] = []
        self._skipping = parts.scaler if isinstance(parts.scaler, Skipping) else None
        self._scaled = parts.scaler.is_enabled()
        self.loss: Callable[[Tensor], None] = self._look_at_loss if self.at_once else _nothing_of
        self.norm: Callable[[Tensor], None] = self._look_at_norm if self.at_once and not self._scaled else _nothing_of

    # ----------------------------------------------------------------------------------------------------- in a step

    def enter(self, step: int) -> None:
        """Begins a step. What a skipped step does to statistics is undone, so they are kept."""
        self.step = step
        if self._skipping is not None:
            buffers = [buffer for buffer in self.parts.plain.buffers() if buffer.is_floating_point()]
            self._statistics = [(buffer, buffer.clone()) for buffer in buffers]

    def leave(self) -> None:
        """Ends a step, after its update."""
        if self._skipping is not None:
            for buffer, before in self._statistics:
                buffer.copy_(torch.where(self._skipping.found > 0, before, buffer))

    def _look_at_loss(self, loss: Tensor) -> None:
        """The loss of a micro-batch, before its backward pass."""
        number = loss.item()
        if not math.isfinite(number):
            self._own = number
            self.board.not_finite = self.step

    def _look_at_norm(self, norm: Tensor) -> None:
        """The norm of the gradient, the same on all ranks, before anything is scaled by it."""
        if not math.isfinite(norm.item()):
            self.gradients()

    def passed(self, batch: StepBatch, total: Tensor) -> None:
        """The passes of a step are done, and its update is not. `total` is the sum of this rank's losses."""
        if self.at_once:
            if 0 < self.board.not_finite <= self.step:
                self._end(batch)
        elif self.hears_in_logs:
            self._totals.append(total.detach().reshape(1))
            if len(self._totals) == _FOLDED:
                self._totals = [torch.cat(self._totals)]

    def tells(self) -> Tensor | None:
        """What a logged step tells the other ranks, a number to be added up: how many losses of this rank were not
        finite, or, on rank 0, how many steps were left out. None where there is nothing to tell."""
        if self._skipping is not None:
            return self._skipping.skipped * (self.place.rank == 0)
        if not self.hears_in_logs:
            return None
        return torch.cat(self._totals).isfinite().logical_not().sum()

    def heard(self, batch: StepBatch, number: int) -> None:
        """The sum of what all ranks have told, in a logged step before its update."""
        if number:
            self._end(batch)
        self._totals.clear()

    def skipped(self, run_dir: str, number: int) -> int:
        """Says how many updates were left out, `number` by now, where there are more than when this was said last."""
        more, self._said = number - self._said, number
        if more:
            note(
                run_dir,
                f"by step {self.step} {more} update{'s were' if more > 1 else ' was'} left out, {number} in all",
            )
        return number

    # -------------------------------------------------------------------------------------------- before it is saved

    def gradients(self) -> None:
        """Before an update that is going to be saved: raises NonFinite where a gradient of any rank is not finite."""
        if not self.stops or self._scaled:
            return
        named = [(name, each.grad) for name, each in self._parameters.items() if each.grad is not None]
        found = _broken(named)
        if not self._any(found):
            return
        self.checkpoints.finish()
        stage = self._stage(found[-1]) if found else -1
        told = max(self._gathered((stage, -self.place.rank, found)))
        names = told[2]
        self._raise(
            -told[1],
            f"the loss of step {self.step} is finite, and its gradient is not",
            f"the first parameter whose gradient is not finite, as the backward pass goes, is `{names[-1]}`"
            + _of_so_many(names, len(named)),
        )

    def state(self) -> None:
        """Before parameters are saved: raises NonFinite where one, or a buffer, of any rank is not finite."""
        if self.job.on_nonfinite == "continue" or self._saved == self.step:
            return
        self._saved = self.step
        current = {name: each for name, each in named_tensors(self.parts.plain).items() if name not in self._parameters}
        named = self._parameters | current
        found = _broken(named.items())
        if not self._any(found):
            return
        self.checkpoints.finish()
        told = min(
            (not names, stage, rank, names)
            for stage, rank, names in self._gathered((self._stage(found[0]) if found else 0, self.place.rank, found))
        )
        self._raise(
            told[2],
            f"after step {self.step}, whose loss is finite, what would be saved is not",
            f"the first of the model's tensors that is not finite is `{told[3][0]}`" + _of_so_many(told[3], len(named)),
        )

    def _any(self, found: Sequence[str]) -> bool:
        number = torch.tensor(float(len(found)), device=self.parts.device)
        if self.job.world_size > 1:
            dist.all_reduce(number)
        return number.item() > 0

    # ------------------------------------------------------------------------------------------------------- the end

    def _end(self, batch: StepBatch) -> NoReturn:
        """On all ranks, in the same step."""
        self.checkpoints.finish()
        mine = self._seen(batch)
        seen = self._of_all(mine)
        step = min(number for each in seen for number in each.steps)
        bad = [each for each in seen if step in each.steps]
        lines = [f"the loss of step {step} is {_values(bad)}"]
        if step < self.step:
            lines[0] += f", found in step {self.step}, the next that is logged"
        lines += [f"the batch is not finite: {sample}" for each in bad for sample in each.samples[:1]]
        # Ranks of a later stage come later, so that the first has what is first in the model.
        spoilt, module = next((each.parameters for each in seen if each.parameters), None), None
        if spoilt is not None:
            lines.append(_of_parameters(spoilt, step, self.step))
        else:
            mine.culprit, mine.finite_again = self._repeat(batch)
            module, more = _of_repetition(self._of_all(mine), {each.rank for each in bad})
            lines += more
        self._raise(bad[0].rank, *lines, module=module)

    def _raise(self, rank: int, *lines: str, module: str | None = None) -> NoReturn:
        error = NonFinite("\n".join(lines), told=rank == self.place.rank, module=module)
        newest = self.checkpoints.newest
        if newest:
            error.add_note(f"nothing of it was saved: the last checkpoint is {newest}")
        else:
            error.add_note("nothing of it was saved, and there is no checkpoint to go on from (`checkpoint.every`)")
        if self.stops:
            error.add_note("`train.on_nonfinite = skip` leaves out the update of such a step, `continue` trains on")
        raise error

    def _seen(self, batch: StepBatch) -> _Seen:
        if self.at_once:
            steps: tuple[int, ...] = (self.board.not_finite,) if self._own else ()
            loss = self._own
        else:
            numbers = torch.cat(self._totals).tolist()
            first = self.step - len(numbers) + 1
            found = {first + n: number for n, number in enumerate(numbers) if not math.isfinite(number)}
            steps, loss = tuple(found), next(iter(found.values()), 0.0)
        return _Seen(
            rank=self.place.rank,
            steps=steps,
            loss=loss,
            samples=self._samples(batch),
            parameters=tuple(_broken(self._parameters.items())),
        )

    def _samples(self, batch: StepBatch) -> tuple[str, ...]:
        """The samples of the step that are not finite."""
        data = self.job.data
        indices = micro_batches(data, self.place, self.job.microbatches, *divmod(self.step - 1, steps_per_epoch(data)))
        found = []
        for taken, pair in zip(indices, batch.micro, strict=True):
            for what, tensor in zip(("input", "target"), pair, strict=True):
                if not tensor.is_floating_point():
                    continue
                rows = tensor.reshape(len(tensor), -1).isfinite().all(1).logical_not().nonzero().flatten().tolist()
                found += [f"the {what} of sample {int(taken[row])} of the training data" for row in rows]
        return tuple(found)

    @torch.no_grad()
    def _repeat(self, batch: StepBatch) -> tuple[_Culprit | None, bool]:
        """The forward passes of the step once more: the first module whose output is not finite, and whether the losses
        are this time."""
        if self.job.compiled:
            torch.compiler.set_stance("force_eager")  # a compiled module need not call its parts' hooks
        watch, cut, finite = _Watch(self), piece_of(self.job), True
        for number, (input, target) in enumerate(batch.micro):
            watch.micro = number
            output = forward(self.job, self.parts, cut(input))
            if output is not None:
                with autocast(self.job.precision, self.parts.device):
                    finite &= math.isfinite(self.parts.loss(output, cut(target)).item())
        self.parts.engine.let_go()
        return watch.found, finite

    def _of_all(self, mine: _Seen) -> list[_Seen]:
        """As plain values, which are all that ranks take from each other (unpickling.py)."""
        return [from_json(_Seen, each) for each in self._gathered(to_json(mine))]

    def _gathered(self, mine: Any) -> list[Any]:
        if self.job.world_size == 1:
            return [mine]
        of_all: list[Any] = [None] * self.job.world_size
        dist.all_gather_object(of_all, mine)
        return of_all

    def _stage(self, name: str) -> int:
        """The index of the stage that has a tensor."""
        axis = self.parts.pipeline
        if axis is None:
            return 0
        of_stage = {id(each): index for index, stage in axis.stages.items() for each in stage.parameters()}
        return of_stage.get(id(self._parameters.get(name)), 0)


class _Watch:
    """Hooks on every module: the first whose output is not finite. Taken away with the process."""

    def __init__(self, guard: Guard) -> None:
        self.micro, self.found = 0, None
        axis = guard.parts.pipeline
        stages = {} if axis is None else axis.stages
        of_stage = {id(module): index for index, stage in stages.items() for module in stage.modules()}
        for name, module in guard.parts.plain.named_modules():
            module.register_forward_hook(self._hook(name, of_stage.get(id(module), 0)), with_kwargs=True)

    micro: int
    found: _Culprit | None

    def _hook(self, name: str, stage: int) -> Callable[..., None]:
        def see(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.found is None and not _finite(output):
                handed = not _finite((args, kwargs))
                kind = type(module).__name__.removeprefix("FSDP")
                self.found = _Culprit(micro=self.micro, stage=stage, name=name, kind=kind, handed=handed)

        return see


# ------------------------------------------------------------------------------------------------------------ in words


def _values(bad: Sequence[_Seen]) -> str:
    values = "nan" if any(math.isnan(each.loss) for each in bad) else "infinite"
    ranks = [str(each.rank) for each in bad]
    if len(ranks) == 1:
        return f"{values}, on rank {ranks[0]}"
    shown = ", ".join(ranks[:-1]) if len(ranks) <= 8 else ", ".join(ranks[:6]) + f", {len(ranks) - 7} more"
    return f"{values}, on ranks {shown} and {ranks[-1]}"


def _of_so_many(names: Sequence[str], all: int) -> str:
    return "" if all == 1 else f" ({len(names)} of {all})"


def _of_parameters(names: Sequence[str], step: int, now: int) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    if step < now:
        return f"by now the parameters are not finite: `{names[0]}`{more}"
    return (
        f"the parameters were not finite when it began: `{names[0]}`{more}. If the loss of step {step - 1} was, then "
        "its gradient was not, or its update went too far"
    )


def _of_repetition(seen: Sequence[_Seen], bad: Collection[int]) -> tuple[str | None, list[str]]:
    """The module, and the lines that name it."""
    culprits = [
        ((each.culprit.micro, each.culprit.stage, each.rank not in bad, each.rank), each.culprit)
        for each in seen
        if each.culprit is not None
    ]
    if culprits:
        (_, _, _, rank), culprit = min(culprits, key=lambda pair: pair[0])
        words = f"the first module whose output is not finite is {culprit.words}"
        lines = [words if len(seen) == 1 else f"{words}, on rank {rank}"]
        if culprit.handed and not any(each.samples for each in seen):
            lines.append("what it was given was not finite already: that is made between modules")
        return culprit.name, lines
    if all(each.finite_again for each in seen):
        return None, ["done once more, the step gave a finite loss: its random numbers were others"]
    return None, ["the output of every module is finite: it is the loss that makes of it what is not"]


# --------------------------------------------------------------------------------------------------------- the numbers


def _finite(values: Any) -> bool:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool(_local(tensor).isfinite().all()) for tensor in tensors)


@torch.no_grad()
def _broken(named: Collection[tuple[str, Tensor | None]]) -> list[str]:
    """The names of the tensors that have numbers on this rank which are not finite. Reads one number a device."""
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        local = None if tensor is None else _local(tensor)
        if local is not None and local.is_floating_point() and local.numel():
            by_device.setdefault(local.device, []).append((name, local))
    found = set()
    for pairs in by_device.values():
        largest = torch._foreach_norm([local for _, local in pairs], math.inf)
        fine = torch.stack([each.float() for each in largest]).isfinite()
        if not bool(fine.all()):
            found |= {name for (name, _), good in zip(pairs, fine.tolist(), strict=True) if not good}
    return [name for name, _ in named if name in found]


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    return local


def _nothing_of(number: Tensor) -> None:
    pass
