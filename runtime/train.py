"""The training loop of one rank.

Model: each step of the data's order is one call of the stepper (step/stepper.py); around it are the learning rate,
records, evaluation and checkpoints.

Contract: the host reads a number back from the device only in the steps that are logged: the first, the last, and every
`log_every`. The logged loss is the mean over the global batch before the step's update. Rank 0 writes records to
metrics.jsonl. If no target of the batch counts, there is no loss (nan, null in the file), as in an evaluation. Such a
step updates all the same, with a gradient of 0: momentum and weight decay act as always.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dslc.compiler.common.units import time_text
from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.runtime.checkpoint import weights
from dslc.runtime.checkpoint.checkpoint import Checkpoints
from dslc.runtime.data.batches import StepBatch, batches
from dslc.runtime.data.sources import Splits
from dslc.runtime.loop.evaluate import evaluate
from dslc.runtime.loop.goals import Goals
from dslc.runtime.loop.hooks import Hooks, Loggers
from dslc.runtime.loop.learning_rate import schedule, set_learning_rate
from dslc.runtime.loop.nonfinite import Guard
from dslc.runtime.measure import collectives
from dslc.runtime.measure.observe import Observer
from dslc.runtime.measure.report import Measure
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.process.records import Records
from dslc.runtime.process.stop import Board
from dslc.runtime.step import own_step, pipeline_step
from dslc.runtime.step.assemble import Parts
from dslc.runtime.step.stepper import Done, Looks, per_sample, stepper


@dataclass(frozen=True, kw_only=True)
class End:
    """The progress of a training. `stopped_at` is the step after which all ranks left on request; `early` says why it
    ended before its last step by itself.
    """

    steps: int
    stopped_at: int | None = None
    early: str = ""


def train(job: JobProgram, place: RankPlace, parts: Parts, splits: Splits, board: Board, run_dir: str) -> End:
    """Trains for `job.steps` steps, evaluates, and leaves metrics.jsonl and the weights in `run_dir` (rank 0).

    Ends early if the board or a goal says so, after a step that is the same on all ranks. If the job's time has passed,
    that step is evaluated and saved as the last one is.
    """
    hooks = Hooks(job, place, parts, run_dir) if job.hooks else None
    loggers = Loggers(job.loggers) if job.loggers and place.rank == 0 else None
    try:
        end = _train(job, place, parts, splits, board, run_dir, hooks, loggers)
        if hooks is not None:
            hooks.end()
    except BaseException as error:
        if hooks is not None:
            hooks.failed(error)
        if loggers is not None:
            loggers.failed()
        raise
    if loggers is not None:
        loggers.close()
    return end


def _train(
    job: JobProgram,
    place: RankPlace,
    parts: Parts,
    splits: Splits,
    board: Board,
    run_dir: str,
    hooks: Hooks | None,
    loggers: Loggers | None,
) -> End:
    checkpoints = Checkpoints(job, place, parts, run_dir, hooks)
    start = checkpoints.resume()
    if hooks is not None:
        hooks.start(start.step)
    records = Records(run_dir, start.step, loggers.log if loggers else None) if place.rank == 0 else None
    if records is not None:
        board.records = records.begin
    average = parts.average
    averaged = average.in_place if average is not None else contextlib.nullcontext
    guard = Guard(job, place, parts, board, checkpoints)
    goals = Goals(job, parts.device, start.goals)
    told = _Told(job, place, parts, board, guard, checkpoints, goals)
    measure = Measure(job, place, parts, start.step)
    between = told.between if hooks is None else hooks.between(told.between)
    looks = Looks(loss=guard.loss, between=between, norm=guard.norm)
    work = measure.around(_stepper(job)(job, place, parts, looks))
    factor = schedule(job.learning_rate)
    observer: Observer | None = None
    if job.observe:
        observer = Observer(job, place, parts.plain, parts.optimizer, parts.device, run_dir, start.step)
        work = observer.around(work)
    seen, step, began = start.samples, start.step, time.monotonic() - start.seconds
    timed = job.max_time is not None and start.seconds >= job.max_time
    last = start.step if goals.reason or timed else job.steps  # it had ended early when it was saved
    for batch in batches(job.data, splits, place, job.microbatches, start.step, last, parts.device):
        step += 1
        checkpoints.look()
        board.enter(place.rank, step)
        if place.rank == 0:
            late = job.max_time is not None and time.monotonic() - began >= job.max_time
            board.answer(_next_wait(job, step), timed=late)
        rate = set_learning_rate(parts.optimizer, factor(step - 1) * goals.rate)
        if hooks is not None:
            hooks.before_step(step, rate)
        guard.enter(step)
        told.enter(step)
        done = work(batch)
        guard.leave()
        if average is not None:
            average.update(step)
        told.agree(done.total, done.number)
        seen, stopped = seen + batch.samples, told.stopped
        if told.loss is not None:
            board.units = _units(job, batch)
            if records is not None:
                more = {"skipped": guard.skipped(run_dir, told.guarded)} if job.on_nonfinite == "skip" else {}
                since = {"samples": seen, "seconds": time.monotonic() - began}
                line = {"step": step, "split": "train", "loss": told.loss, "lr": rate}
                records.write({**line, **told.further, **more, **since})
        if hooks is not None:
            hooks.after_step(told.loss)
        timed = stopped and board.timed
        if stopped and not timed and not checkpoints.on:
            break
        if job.data.validation_samples and not job.observe and (timed or _evaluated(job, step)):
            with averaged():
                found = evaluate(job, place, parts, splits)
            goals.hear(step, found)
            if records is not None:
                passed = time.monotonic() - began
                records.write({"step": step, "split": "validation", **found, "samples": seen, "seconds": passed})
            if hooks is not None:
                hooks.evaluated(found)
        ended = stopped or bool(goals.reason)
        if checkpoints.due(step, told.late or ended or goals.is_best(step)):
            guard.state()
            checkpoints.save(step, seen, time.monotonic() - began, goals.progress)
        if ended:
            break
    guard.state()
    measure.leave(run_dir, checkpoints.stalls)
    if observer is not None:
        observer.leave()
    if records is not None:
        records.close()
    with averaged():
        weights.save_weights(parts.plain, run_dir, writes=place.rank == 0, pipeline=parts.pipeline)
    checkpoints.finish()
    if step == job.steps:
        return End(steps=step)
    early = goals.reason or (f"`max_time` has passed, {time_text(job.max_time)}" if timed and job.max_time else "")
    return End(steps=step, early=early) if early else End(steps=step, stopped_at=step)


def _stepper(job: JobProgram) -> Callable[[JobProgram, RankPlace, Parts, Looks], Callable[[StepBatch], Done]]:
    if job.own_step is not None:
        return own_step.stepper
    return pipeline_step.stepper if job.pipeline else stepper


def _units(job: JobProgram, batch: StepBatch) -> int:
    return per_sample(batch) if job.loss.counts in ("tokens", "kept") else 1


class _Told:
    """The knowledge that all ranks share of a step: whether they leave after it (`stopped`) and, if it is logged, the
    mean loss over the global batch, whether a checkpoint is due by rank 0's clock (`late`), and the sum of the guards'
    numbers.
    """

    def __init__(
        self,
        job: JobProgram,
        place: RankPlace,
        parts: Parts,
        board: Board,
        guard: Guard,
        checkpoints: Checkpoints,
        goals: Goals,
    ) -> None:
        self._job, self._place, self._parts = job, place, parts
        self._board, self._guard, self._checkpoints, self._goals = board, guard, checkpoints, goals
        self._samples = 1
        self.enter(0)

    def enter(self, step: int) -> None:
        self._step, self.stopped, self.late, self.guarded = step, False, False, 0
        self.loss: float | None = None
        self.further: dict[str, float] = {}

    def between(self, batch: StepBatch, total: Tensor, number: int | Tensor) -> None:
        """Exchanges it between the passes of the step and its update."""
        job, guard, step = self._job, self._guard, self._step
        self._samples = batch.samples
        guard.passed(batch, total)
        if guard.hears_in_logs:
            with collectives.aside():
                self.agree(total, number)
            if self.loss is not None:
                guard.heard(batch, self.guarded)
        if guard.stops and (step == job.steps or self._stops() or self._may_be_saved()):
            with collectives.aside():
                guard.gradients()

    def agree(self, total: Tensor, number: int | Tensor) -> None:
        """Waits, if the step is logged or the last, for the device, and on the CPU for the other ranks. Once."""
        if self.loss is not None:
            return
        job, self.stopped = self._job, self._stops()
        if not _logged(job, self._step) and not self.stopped:
            return
        told = [total.double() * mesh_of(job).leads if job.world_size > 1 else total.double()]
        if job.checkpoint.seconds:
            told.append(told[0].new_full((), float(self._checkpoints.late and self._place.rank == 0)))
        if (guarded := self._guard.tells()) is not None:
            told.append(guarded.double())
        further = sorted(self._parts.further)  # the same names on all ranks
        told += [self._parts.further[name].to(told[0].device) * mesh_of(job).leads for name in further]
        self._parts.further.clear()
        together = torch.stack(told)
        if job.world_size > 1:
            dist.all_reduce(together)
        summed, *said = together.tolist()
        counted = float(number)
        self.loss = summed / counted if counted else math.nan
        self.late = bool(job.checkpoint.seconds and said.pop(0))
        self.guarded = int(said.pop(0)) if guarded is not None else 0
        self.further = {name: value / self._samples for name, value in zip(further, said, strict=True)}

    def _may_be_saved(self) -> bool:
        return self._checkpoints.due(self._step, self.late) or (self._goals.some and _evaluated(self._job, self._step))

    def _stops(self) -> bool:
        job, step = self._job, self._step
        return step < job.steps and _waits(job, step) and self._board.stop_at == step


def _logged(job: JobProgram, step: int) -> bool:
    return step % job.log_every == 0 or step == 1 or step == job.steps


def _waits(job: JobProgram, step: int) -> bool:
    """True if the host waits, in this step, for a collective that rank 0 takes part in (process/stop.py)."""
    return job.device == "cpu" or _logged(job, step)


def _next_wait(job: JobProgram, step: int) -> int:
    if _waits(job, step):
        return step
    return min(job.steps, step + job.log_every - step % job.log_every)


def _evaluated(job: JobProgram, step: int) -> bool:
    return step == job.steps or (job.evaluate_every > 0 and step % job.evaluate_every == 0)
