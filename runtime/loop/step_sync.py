"""Has the ranks agree on a step, between its passes or after it: on its loss, and whether they leave.

Model: only logged steps read a number back from the device. They reduce all values that the host needs in one sum over
the ranks.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from dslc.compiler.ir.program import JobProgram, RankPlace, StepPhases
from dslc.runtime.checkpoint.checkpoint import Checkpoints
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.loop.best_metric import Goals
from dslc.runtime.loop.nonfinite import NonFiniteGuard
from dslc.runtime.measure import collectives
from dslc.runtime.measure.phases import PhaseClock, phases_of_ranks
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.process.stop import RunControl
from dslc.runtime.step.assemble import TrainingComponents


class StepReduction:
    """The values of a step that all ranks share. `stopped`: they leave after it. `late`: a checkpoint is due by rank
    0's clock. A logged step also has its mean loss, the guards' sum and the `phases` of each rank.
    """

    def __init__(
        self,
        job: JobProgram,
        place: RankPlace,
        parts: TrainingComponents,
        board: RunControl,
        guard: NonFiniteGuard,
        checkpoints: Checkpoints,
        goals: Goals,
        phases: PhaseClock,
    ) -> None:
        self._job, self._place, self._parts, self._clock = job, place, parts, phases
        self._board, self._guard, self._checkpoints, self._goals = board, guard, checkpoints, goals
        self._samples = 1
        self._always_waits = _waits_always(job)
        self._may_save = checkpoints.on or goals.some
        self.enter(0)

    def enter(self, step: int) -> None:
        self._step, self.stopped, self.late, self.guarded = step, False, False, 0
        self.loss: float | None = None
        self.further: dict[str, float] = {}
        self.phases: list[StepPhases] = []

    def reduce(self, batch: StepBatch, total: Tensor, number: int | Tensor) -> None:
        """Exchanges it between the passes of the step and its update."""
        job, guard, step = self._job, self._guard, self._step
        self._samples = batch.samples
        guard.passed(batch, total)
        if guard.hears_in_logs:
            with collectives.exclude_collectives():
                self.agree(total, number)
            if self.loss is not None:
                guard.check_total(batch, self.guarded)
        if guard.stops and (step == job.steps or self._stops() or (self._may_save and self._may_be_saved())):
            with collectives.exclude_collectives():
                guard.gradients()

    def agree(self, total: Tensor, number: int | Tensor) -> None:
        """Waits, if the step is logged or the last, for the device, and on the CPU for the other ranks. Once."""
        if self.loss is not None:
            return
        job, self.stopped = self._job, self._stops()
        if not _logged(job, self._step) and not self.stopped:
            return
        sums = [total.double() * mesh_of(job).leads if job.world_size > 1 else total.double()]
        if job.checkpoint.seconds:
            sums.append(sums[0].new_full((), float(self._checkpoints.is_due_by_time and self._place.rank == 0)))
        if (guarded := self._guard.tells()) is not None:
            sums.append(guarded.double())
        exchange = self._parts.exchange
        by_itself = exchange is not None and exchange.waits_never
        if by_itself:  # the ranks' own counts, each times the ranks
            sums.append(sums[0].new_tensor(float(number) / job.world_size))
        further = sorted(self._parts.further)  # the same names on all ranks
        sums += [self._parts.further[name].to(sums[0].device) * mesh_of(job).leads for name in further]
        self._parts.further.clear()
        experts = self._parts.experts
        counts = sums[0].new_zeros(0) if experts is None else experts.counts().to(sums[0].device) * mesh_of(job).leads
        vector = torch.cat([torch.stack(sums), counts, self._clock.share(self._clock.finish_lap(), sums[0])])
        with self._clock.rank_wait():
            if job.world_size > 1:
                dist.all_reduce(vector)
            numbers = vector.tolist()
        summed, *rank_sums = numbers[: len(sums)]
        phases = len(sums) + len(counts)
        self.phases = phases_of_ranks(numbers[phases:])
        self.stopped = self._stops()  # rank 0 has answered before it took part (process/stop.py)
        self.late = bool(job.checkpoint.seconds and rank_sums.pop(0))
        self.guarded = int(rank_sums.pop(0)) if guarded is not None else 0
        target_count = rank_sums.pop(0) if by_itself else float(number)
        self.loss = summed / target_count if target_count else math.nan
        self.further = {name: value / self._samples for name, value in zip(further, rank_sums, strict=True)}
        if experts is not None:
            self.further |= experts.loads(numbers[len(sums) : phases])

    def mean_loss(self, total: Tensor, number: int | Tensor) -> float:
        """Returns the mean loss of a step's global batch, which all ranks compute alike."""
        if self.loss is not None:
            return self.loss
        summed = total.detach().double() * mesh_of(self._job).leads if self._job.world_size > 1 else total.double()
        if self._job.world_size > 1:
            summed = summed.clone()
            with collectives.exclude_collectives():
                dist.all_reduce(summed)
        return summed.item() / float(number) if float(number) else math.nan

    def skip(self) -> None:
        """Agrees on whether the ranks leave, in a step without passes: all have to come to it first."""
        arrivals = torch.zeros((), device=self._parts.device)
        if self._job.world_size > 1:
            with collectives.exclude_collectives():
                dist.all_reduce(arrivals)
        arrivals.item()
        self.stopped = self._stops()

    def _may_be_saved(self) -> bool:
        return self._checkpoints.due(self._step, self.late) or (
            self._goals.some and is_evaluated(self._job, self._step)
        )

    def _stops(self) -> bool:
        job, step = self._job, self._step
        return step < job.steps and (self._always_waits or _logged(job, step)) and self._board.leaves(step)


def _logged(job: JobProgram, step: int) -> bool:
    return step % job.log_every == 0 or step == 1 or step == job.steps


def _waits(job: JobProgram, step: int) -> bool:
    """True if the host waits in this step for a collective that rank 0 takes part in (process/stop.py)."""
    return _waits_always(job) or _logged(job, step)


def _waits_always(job: JobProgram) -> bool:
    return job.device == "cpu" and job.gradients.kind != "local"


def next_wait(job: JobProgram, step: int) -> int:
    """Returns the first step, from `step` on, in which the host waits as `_waits` says."""
    if _waits(job, step):
        return step
    return min(job.steps, step + job.log_every - step % job.log_every)


def is_evaluated(job: JobProgram, step: int) -> bool:
    """True if the plan evaluates after this step, counted from 1."""
    return step == job.steps or (job.evaluate_every > 0 and step % job.evaluate_every == 0)
