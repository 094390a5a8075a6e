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
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from dslc.compiler.ir.number_text import time_text
from dslc.compiler.ir.program import JobProgram, RankPlace, TrainMode
from dslc.runtime.checkpoint import weights
from dslc.runtime.checkpoint.checkpoint import Checkpoints
from dslc.runtime.data.batches import StepBatch, batches
from dslc.runtime.data.samples import Splits
from dslc.runtime.data.splits import evaluated
from dslc.runtime.loop.best_metric import Goals
from dslc.runtime.loop.evaluate import evaluate, named
from dslc.runtime.loop.hooks import Hooks, Loggers
from dslc.runtime.loop.learning_rate import schedule, set_learning_rate
from dslc.runtime.loop.loss_spikes import LossSpikes
from dslc.runtime.loop.nonfinite import NonFiniteGuard
from dslc.runtime.loop.step_sync import StepReduction, is_evaluated, next_wait
from dslc.runtime.loop.text_generation import TextWriter
from dslc.runtime.measure import collectives
from dslc.runtime.measure.observe import OBSERVED, Observer
from dslc.runtime.measure.order_check import OrderCheck
from dslc.runtime.measure.phases import phase_clock
from dslc.runtime.measure.position_details import PositionReporter
from dslc.runtime.measure.replica_check import ReplicaCheck
from dslc.runtime.measure.report import Measure
from dslc.runtime.measure.slow_steps import phase_numbers, slow_step_watch
from dslc.runtime.measure.step_trace import StepTrace
from dslc.runtime.parallel.tensor_parallel import noise_rank
from dslc.runtime.process import random_numbers
from dslc.runtime.process.positions import Phase, position_number
from dslc.runtime.process.records import Records, note
from dslc.runtime.process.stop import RunControl
from dslc.runtime.reference import add_reference
from dslc.runtime.step import closure_step, custom_step, pipeline_step
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.step.compile_timing import compile_timing
from dslc.runtime.step.stepper import UNSEEN, Between, StepCallbacks, StepResult, per_sample, stepper
from dslc.runtime.step.tensor_summaries import TensorRecorder


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The progress of a training. `stopped_at` is the step after which all ranks left on request; `early` says why it
    ended before its last step by itself.
    """

    steps: int
    stopped_at: int | None = None
    early: str = ""


def train(
    job: JobProgram,
    place: RankPlace,
    parts: TrainingComponents,
    splits: Splits,
    board: RunControl,
    run_dir: str,
    positions: PositionReporter,
) -> TrainingResult:
    """Trains for `job.steps` steps, evaluates, and leaves metrics.jsonl and the weights in `run_dir` (rank 0).

    Ends early if the board or a goal says so, after a step that is the same on all ranks. If the job's time has passed,
    that step is evaluated and saved as the last one is.
    """
    hooks = Hooks(job, place, parts, run_dir) if job.hooks else None
    loggers = Loggers(job.loggers, board.note) if job.loggers and place.rank == 0 else None
    try:
        end = _TrainingRun(job, place, parts, splits, board, run_dir, positions, hooks, loggers).run()
        if hooks is not None:
            hooks.end()
    except BaseException as error:
        if parts.exchange is not None:
            parts.exchange.abandon()
        if hooks is not None:
            hooks.failed(error)
        if loggers is not None:
            loggers.failed()
        raise
    if loggers is not None:
        loggers.close()
    return end


class _TrainingRun:
    """A training on one rank, from the checkpoint that it goes on from to its end."""

    def __init__(
        self,
        job: JobProgram,
        place: RankPlace,
        parts: TrainingComponents,
        splits: Splits,
        board: RunControl,
        run_dir: str,
        positions: PositionReporter,
        hooks: Hooks | None,
        loggers: Loggers | None,
    ) -> None:
        self._job, self._place, self._parts, self._splits = job, place, parts, splits
        self._board, self._run_dir, self._hooks = board, run_dir, hooks
        self._enter, self._losses = positions.enter, 0
        self._factor = schedule(job.learning_rate)
        again = board.attempt > 1
        self._spikes = (
            LossSpikes(job, place, job.on_spike, run_dir, continues=again or job.checkpoint.resume == "auto")
            if job.on_spike is not None
            else None
        )
        self._checkpoints = Checkpoints(
            job,
            place,
            parts,
            run_dir,
            hooks,
            is_restart=again,
            notify=board.note,
            rate=self._rate_after,
            spikes=self._spikes,
        )
        positions.enter_phase(Phase.REFERENCE)
        keep_reference = add_reference(job, place, parts, splits, run_dir, partial(self._enter, Phase.REFERENCE))
        positions.enter_phase(Phase.RESUME)
        start = self._checkpoints.resume()
        keep_reference(start.step)
        if self._spikes is not None:
            self._spikes.resume(start.skipped_steps, start.losses)
        if parts.exchange is not None:
            parts.exchange.step = start.step
        if hooks is not None:
            hooks.start(start.step)
        also = loggers.log if loggers else None
        self._records = Records(run_dir, start.step, also, board.note) if place.rank == 0 else None
        if self._records is not None:
            board.records = self._records.begin
        self._texts: TextWriter | None = None
        if job.generate is not None and job.observation is None:
            self._texts = TextWriter(job, place, parts, job.generate, run_dir, start.step, board.note)
        self._evaluated_splits = _evaluated_splits(job)
        self._guard = NonFiniteGuard(job, place, parts, board, self._checkpoints)
        self._goals = Goals(job, parts.device, start.goals)
        self._phases = phase_clock(job, place, parts)
        self._told = StepReduction(job, place, parts, board, self._guard, self._checkpoints, self._goals, self._phases)
        self._slow = slow_step_watch(job)
        self._order = OrderCheck(job, place, parts)
        self._replicas = ReplicaCheck(job, place, parts, self._newest_checkpoint)
        self._measure = Measure(job, place, parts, start.step)
        traced = isinstance(job.mode, TrainMode) and job.mode.trace
        self._trace = StepTrace(job, place, parts, start.step, run_dir) if traced else None
        self._observer: Observer | None = None
        self._recorder: TensorRecorder | None = None
        self._work = self._worker(start.step)
        if splits.stream is not None:
            splits.stream.go_to(start.stream, partial(note, run_dir))
        # Samples of a user's code leave the host's random generators anywhere (random_numbers.py).
        self._noise = noise_rank(job, place.rank) if splits.train.by_process else None
        self._step, self._seen, self._began = start.step, start.samples, time.monotonic() - start.seconds
        self._first = start.step
        self._timed = job.max_time is not None and start.seconds >= job.max_time
        board.begin(start.step)

    def run(self) -> TrainingResult:
        job, first = self._job, self._step
        if job.evaluate_start and first == 0:
            self._evaluate()
            self._began = time.monotonic()
        last = first if self._goals.reason or self._timed else job.steps  # it had ended early when it was saved
        made = batches(job.data, self._splits, self._place, job.microbatches, first, last, self._parts.device)
        self._enter(Phase.SAMPLES)
        for batch in self._phases.batches(made if self._trace is None else self._trace.batches(made)):
            if self._ends_with(batch):
                break
            self._enter(Phase.SAMPLES)
        self._enter(Phase.END)
        return self._end()

    def _worker(self, first: int) -> Callable[[StepBatch], StepResult]:
        job, told = self._job, self._told
        between = told.reduce if self._hooks is None else self._hooks.add_after_backward(told.reduce)
        if job.observation is not None and job.observation.tensors:
            self._recorder = TensorRecorder(job, self._place, self._parts, os.path.join(self._run_dir, OBSERVED), first)
            between = self._recorder.wrap_between(between)
        looks = StepCallbacks(
            loss=self._wrap_loss(self._order.loss(self._guard.loss)),
            between=self._wrap_between(self._phases.wrap_between(between)),
            norm=self._guard.norm,
            evaluated=UNSEEN.evaluated if self._hooks is None else self._hooks.add_after_backward(UNSEEN.evaluated),
            later=collectives.exclude_collectives,
            notify=self._board.note,
        )
        if (timing := compile_timing(job, self._place, self._parts, looks, self._board.note)) is not None:
            looks = replace(looks, passes=timing)
        if self._trace is not None:
            looks = self._trace.callbacks(looks)
        work = self._measure.wrap(self._phases.wrap(_stepper(job)(job, self._place, self._parts, looks)))
        if self._trace is not None:
            work = self._trace.wrap(work)
        if job.observation is None:
            return work
        if self._recorder is not None:
            work = self._recorder.wrap(work)
        parts = self._parts
        self._observer = Observer(job, self._place, parts.plain, parts.optimizer, parts.device, self._run_dir, first)
        return self._observer.wrap(work)

    def _wrap_loss(self, work: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Returns `work`, which is called with each loss, after which the backward pass begins."""
        enter, after = self._enter, Phase.BACKWARD if self._job.pipeline is None else Phase.PASSES

        numbers = [position_number(after, losses) for losses in range(self._job.microbatches + 1)]

        def entered(loss: Tensor) -> None:
            losses = self._losses = self._losses + 1
            work(loss)
            enter(numbers[losses] if losses < len(numbers) else position_number(after, losses))

        return entered

    def _wrap_between(self, work: Between) -> Between:
        """Returns `work`, which is called between passes and update."""

        def entered(batch: StepBatch, total: Tensor, number: int | Tensor) -> None:
            work(batch, total, number)
            self._enter(Phase.UPDATE)

        return entered

    def _ends_with(self, batch: StepBatch) -> bool:
        """Does the next step, with all that follows from it. Returns True if it is the last."""
        told, hooks, guard = self._told, self._hooks, self._guard
        if self._spikes is not None and self._spikes.needs_skip(self._step + 1):
            return self._skip(batch)
        rate = self._begin(batch.epoch)
        self._losses = 0
        self._enter(Phase.FORWARD if self._job.pipeline is None else Phase.PASSES)
        done = self._order.run(self._work, batch) if self._order.is_due(self._step) else self._work(batch)
        self._enter(Phase.RECORD)
        guard.leave()
        if self._parts.average is not None:
            self._parts.average.update(self._step)
        told.agree(done.total, done.number)
        self._seen += batch.samples
        self._record(batch, rate)
        if self._spikes is not None:
            self._spikes.follow(self._step, told.mean_loss(done.total, done.number), self._newest_checkpoint)
        if hooks is not None:
            hooks.after_step(told.loss)
        self._replicas.after_step(self._step)
        if self._replicas.is_due(self._step):
            with self._phases.pause():
                self._replicas.compare(self._step)
        return self._complete(batch)

    def _skip(self, batch: StepBatch) -> bool:
        """Passes over the next step, whose batch a spike of the loss rules out. Returns True if it is the last."""
        self._enter_step()
        self._told.enter(self._step)
        self._told.skip()
        if self._parts.exchange is not None:
            self._parts.exchange.step = self._step
        return self._complete(batch)

    def _complete(self, batch: StepBatch) -> bool:
        """Evaluates and saves after a step, where that is due. Returns True if the step is the last."""
        told, guard = self._told, self._guard
        self._timed = told.stopped and self._board.timed
        if told.stopped and not self._timed and not self._checkpoints.on:
            return True
        reason = self._goals.reason
        if self._evaluates() or self._generates(reason):
            with self._phases.pause():
                self._evaluate()
                self._generate()
            reason = self._goals.reason
        ended = told.stopped or bool(reason)
        checkpoints, best = self._checkpoints, self._goals.is_best
        if checkpoints.on and checkpoints.due(self._step, told.late or ended or best(self._step)):
            self._enter(Phase.CHECKPOINT)
            with self._phases.pause():
                guard.state()
                self._replicas.compare(self._step)
                self._checkpoints.save(self._step, self._seen, self._seconds, self._goals.progress, batch.marks)
        return ended

    def _newest_checkpoint(self) -> str:
        """Waits until the last checkpoint is published, and returns its path; "" if there is none."""
        self._checkpoints.finish()
        return self._checkpoints.newest

    def _begin(self, epoch: int) -> float:
        """Enters the next step, and returns its learning rate."""
        self._enter_step()
        factor, optimizer = self._factor(self._step - 1) * self._goals.rate, self._job.optimizer
        rate = set_learning_rate(self._parts.optimizer, factor)
        if optimizer.python is None:  # a pipeline stage may have no group with the job's rate
            rate = optimizer.lr * factor
        if self._hooks is not None:
            self._hooks.before_step(self._step, rate, epoch)
        self._guard.enter(self._step)
        self._told.enter(self._step)
        return rate

    def _enter_step(self) -> None:
        """Counts the next step, and answers a request to stop."""
        job, board = self._job, self._board
        self._step += 1
        if self._noise is not None:
            random_numbers.begin_step(job.seed, self._noise, self._step - 1)
        self._checkpoints.look()
        board.enter(self._place.rank, self._step)
        self._enter(Phase.BEGIN)
        if self._place.rank == 0:
            late = job.max_time is not None and self._seconds >= job.max_time
            if late or board.stop_requested:
                board.answer(next_wait(job, self._step), timed=late)

    def _rate_after(self, steps: int) -> float | None:
        """Returns the learning rate of the step after `steps` steps, without the factor of a plateau. Returns None
        where only a user's own schedule could say it, as the schedule is called for the job's steps alone.
        """
        job = self._job
        if job.learning_rate.python is not None and steps >= job.steps:
            return None
        return job.optimizer.lr * self._factor(steps)

    @property
    def _seconds(self) -> float:
        """Seconds since the first step began, over all resumes."""
        return time.monotonic() - self._began

    def _record(self, batch: StepBatch, rate: float) -> None:
        job, told = self._job, self._told
        if told.loss is None:
            return
        self._board.units = _units(job, batch)
        if self._records is not None:
            skips = job.on_nonfinite == "skip"
            more = {"skipped": self._guard.note_skipped(self._run_dir, told.guarded)} if skips else {}
            line = {"step": self._step, "split": "train", "loss": told.loss, "lr": rate}
            phases = phase_numbers(job, told.phases)
            self._records.write(
                {**line, **told.further, **more, "samples": self._seen, "seconds": self._seconds, **phases}
            )
            for text in self._slow.follow(self._step - self._first, told.phases):
                note(self._run_dir, text)

    def _evaluates(self) -> bool:
        """True if splits are evaluated after this step, or before the first."""
        step = self._step
        return bool(self._evaluated_splits) and (step == 0 or self._timed or is_evaluated(self._job, step))

    def _evaluate(self) -> None:
        """Evaluates the splits that the job asks for, if it does after this step, or before the first."""
        job, step, splits = self._job, self._step, self._evaluated_splits
        if not self._evaluates():
            return
        self._enter(Phase.EVALUATION)
        progress = partial(self._enter, Phase.EVALUATION)
        with self._averaged(), self._order.evaluation():
            found = {split: evaluate(job, self._place, self._parts, self._splits, split, progress) for split in splits}
        together = named({split: metrics for split, metrics in found.items() if split != "training"})
        if step and together:
            self._goals.hear(step, together)
        if self._records is not None:
            for split, metrics in found.items():
                line = {"step": step, "split": split, **metrics}
                self._records.write({**line, "samples": self._seen, "seconds": self._seconds})
        if self._hooks is not None:
            of_training = {f"training.{name}": value for name, value in found.get("training", {}).items()}
            self._hooks.evaluated({**together, **of_training})
        self._replicas.compare(step)

    def _generates(self, reason: str) -> bool:
        """True if texts are due after this step, or the training ends with it, for a `reason` or by its time."""
        return self._texts is not None and (self._timed or bool(reason) or self._texts.is_due(self._step))

    def _generate(self) -> None:
        """Has the network continue the job's prompts, after a step in which that is due."""
        if self._texts is None or not self._generates(self._goals.reason):
            return
        self._enter(Phase.GENERATION)
        self._order.note_generation()
        with self._averaged():
            self._texts.write(self._step, self._seconds, partial(self._enter, Phase.GENERATION))
        self._replicas.compare(self._step)

    def _test(self) -> None:
        """Evaluates the test samples, once, if the training has come to its end."""
        job = self._job
        if not job.data.test_samples or job.observation is not None or (self._told.stopped and not self._timed):
            return
        with self._averaged():
            found = evaluate(job, self._place, self._parts, self._splits, "test")
        if self._records is not None:
            line = {"step": self._step, "split": "test", **found}
            self._records.write({**line, "samples": self._seen, "seconds": self._seconds})

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        """Puts the mean of weights in their place, over steps or over ranks, if the job has one."""
        average, exchange = self._parts.average, self._parts.exchange
        if exchange is not None and exchange.differ:
            return exchange.averaged()
        return contextlib.nullcontext() if average is None else average.in_place()

    def _end(self) -> TrainingResult:
        job, step, parts = self._job, self._step, self._parts
        if self._trace is not None:
            self._trace.leave()
        if parts.exchange is not None:
            parts.exchange.close()
        self._guard.state()
        self._replicas.compare(step)
        self._measure.leave(
            self._run_dir, self._checkpoints.stalls, self._texts.times if self._texts else [], list(self._phases.laps)
        )
        if self._observer is not None:
            self._observer.leave()
        if self._recorder is not None:
            self._recorder.leave()
        self._test()
        if self._records is not None:
            self._records.close()
        with self._averaged():
            if self._job.observation is None:  # an observed training keeps its own, also of float64
                weights.save_weights(parts.plain, self._run_dir, writes=self._place.rank == 0, pipeline=parts.pipeline)
        self._checkpoints.finish()
        if step == job.steps:
            return TrainingResult(steps=step)
        timed = self._timed and job.max_time is not None
        early = self._goals.reason or (f"`max_time` has passed, {time_text(job.max_time or 0)}" if timed else "")
        return TrainingResult(steps=step, early=early) if early else TrainingResult(steps=step, stopped_at=step)


def _evaluated_splits(job: JobProgram) -> tuple[str, ...]:
    if job.observation is not None:
        return ()
    return evaluated(job.data) + (("training",) if job.evaluate_training else ())


def _stepper(
    job: JobProgram,
) -> Callable[[JobProgram, RankPlace, TrainingComponents, StepCallbacks], Callable[[StepBatch], StepResult]]:
    if job.own_step is not None:
        return custom_step.stepper
    if job.optimizer.closure:
        return closure_step.stepper
    return pipeline_step.stepper if job.pipeline else stepper


def _units(job: JobProgram, batch: StepBatch) -> int:
    return per_sample(batch) if job.loss.counts in ("tokens", "kept") else 1
