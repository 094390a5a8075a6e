"""Goals: which evaluation of a training is the best so far, and whether the training ends because none gets better.

Model: each goal (`GoalStep`) looks at one number of each evaluation. Its progress is the best value, the step that it
was found after, and the evaluations since. It is a function of the values alone, and is kept in each checkpoint, so
that a resumed training decides as an unbroken one.

Contract: an improvement is a finite value that is better than the best by more than `by`; the first finite value is
one. Of equal values the first is the best. All ranks compare the numbers of rank 0, and so decide alike.

A learning rate that falls where a metric gets no better (`Plateau`) is torch's `ReduceLROnPlateau`, over an optimizer
without parameters of the training. Its rate, as a share of the full rate, multiplies the rate of every group
(learning_rate.py).

Limits: a goal or plateau whose metric or direction differs from the checkpoint's begins anew. `by` and `patience` may
change. torch changes no rate by less than 1e-8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real

import torch
import torch.distributed as dist
from torch.optim import lr_scheduler

from dslc.compiler.ir.program import GoalStep, JobProgram, LearningRateStep, PlateauStep
from dslc.runtime.checkpoint.files import BEST, PLATEAU, STOPPING, Progress
from dslc.runtime.measure import collectives
from dslc.runtime.process.job_line import mark_errors


class GoalError(RuntimeError):
    """An evaluation without the number that a goal looks at."""


class Goals:
    """The goals of a training, on one rank. `kept` is the progress in the checkpoint that it resumes from."""

    def __init__(self, job: JobProgram, device: torch.device, saved_progress: Mapping[str, Progress]) -> None:
        requested = {STOPPING: job.early_stopping, BEST: job.checkpoint.best}
        self._job, self._device = job, device
        self._goals = {name: goal for name, goal in requested.items() if goal is not None}
        self.progress = {
            name: initial_progress(goal.metric, goal.highest, saved_progress.get(name))
            for name, goal in self._goals.items()
        }
        self._plateau = plateau_of(job, saved_progress.get(PLATEAU))
        if self._plateau is not None:
            self.progress[PLATEAU] = self._plateau.progress

    @property
    def some(self) -> bool:
        """True if an evaluation may end the training, or ask for a checkpoint."""
        return bool(self._goals)

    def hear(self, step: int, measurements: Mapping[str, object]) -> None:
        """Takes the results of the evaluation after `step`, on all ranks. Raises GoalError."""
        plateau = self._plateau
        steps: list[GoalStep | PlateauStep] = [*self._goals.values(), *([plateau.step] if plateau else [])]
        if not steps:
            return
        values = self._of_rank_0([_number(goal, measurements) for goal in steps])
        for (name, goal), value in zip(self._goals.items(), values, strict=False):
            self.progress[name] = update_progress(goal, self.progress[name], step, value)
        if plateau is not None:
            plateau.hear(step, values[-1])
            self.progress[PLATEAU] = plateau.progress

    def is_best(self, step: int) -> bool:
        """True if the evaluation after `step` is the best so far, and its checkpoint is asked for."""
        return BEST in self.progress and self.progress[BEST].step == step

    @property
    def rate(self) -> float:
        """The factor on the learning rate that follows the evaluations."""
        return self._plateau.progress.factor if self._plateau is not None else 1.0

    @property
    def reason(self) -> str:
        """Says why the training ends; "" if it goes on."""
        goal, progress = self._goals.get(STOPPING), self.progress.get(STOPPING)
        if goal is None or progress is None or progress.since < goal.patience:
            return ""
        evaluations = f"{progress.since} evaluation{'s' if progress.since > 1 else ''}"
        if progress.best is None:
            return f"{goal.metric} has not been finite in {evaluations}"
        more = f" by more than {goal.by:g}" if goal.by else ""
        came = "risen above" if goal.highest else "fallen below"
        return f"{goal.metric} has not {came} {progress.best:.6g}, of step {progress.step},{more} in {evaluations}"

    def _of_rank_0(self, values: list[float]) -> list[float]:
        if self._job.world_size == 1:
            return values
        sent_values = torch.tensor(values, dtype=torch.float64, device=self._device)
        with collectives.exclude_collectives():
            dist.broadcast(sent_values, src=0)
        received_values: list[float] = sent_values.tolist()
        return received_values


def initial_progress(metric: str, highest: bool, saved_progress: Progress | None) -> Progress:
    """Returns the progress over a metric with which a training begins: a checkpoint's, if its metric is the same."""
    if saved_progress is not None and (saved_progress.metric, saved_progress.highest) == (metric, highest):
        return saved_progress
    return Progress(metric=metric, highest=highest)


def update_progress(goal: GoalStep, progress: Progress, step: int, value: float) -> Progress:
    """Returns the progress after an evaluation that found `value` after `step`."""
    if not math.isfinite(value) or not (progress.best is None or _better(goal, value, progress.best)):
        return replace(progress, since=progress.since + 1)
    return replace(progress, best=value, step=step, since=0)


def _better(goal: GoalStep, value: float, best: float) -> bool:
    return value > best + goal.by if goal.highest else value < best - goal.by


def _number(goal: GoalStep | PlateauStep, values: Mapping[str, object]) -> float:
    value = values.get(goal.metric)
    if isinstance(value, Real):
        return float(value)
    with mark_errors(goal.line):
        if value is not None:
            raise GoalError(f"`{goal.metric}` of the evaluation is a list of numbers, and a goal needs one")
        numbers = ", ".join(name for name, entry in values.items() if isinstance(entry, Real))
        raise GoalError(f"the evaluation has no number `{goal.metric}`; it has {numbers}")


class Plateau:
    """The schedule, from `progress` on; `rate` is the full rate."""

    def __init__(self, schedule: LearningRateStep, step: PlateauStep, rate: float, progress: Progress) -> None:
        self.step, self.progress, self._rate = step, progress, rate
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
        self._torchs = lr_scheduler.ReduceLROnPlateau(
            self._optimizer,
            mode="max" if progress.highest else "min",
            factor=schedule.factor,
            patience=step.patience,
            threshold=step.threshold,
            threshold_mode=step.threshold_mode,
            cooldown=step.cooldown,
            min_lr=schedule.floor * rate,
        )
        self._optimizer.param_groups[0]["lr"] = rate * progress.factor
        if progress.best is not None:
            self._torchs.best = progress.best
        self._torchs.num_bad_epochs, self._torchs.cooldown_counter = progress.since, progress.cooldown

    def hear(self, step: int, value: float) -> None:
        """Takes the value of the metric in the evaluation after `step`."""
        torchs, previous_best = self._torchs, self.progress.best
        torchs.step(value)
        best = None if torchs.best == (-math.inf if self.progress.highest else math.inf) else torchs.best
        self.progress = replace(
            self.progress,
            best=best,
            step=step if best != previous_best else self.progress.step,
            since=torchs.num_bad_epochs,
            factor=self._optimizer.param_groups[0]["lr"] / self._rate if self._rate else 1.0,
            cooldown=torchs.cooldown_counter,
        )


def plateau_of(job: JobProgram, saved_progress: Progress | None) -> Plateau | None:
    """Returns the schedule of a job that has one, from a checkpoint's progress on."""
    step = job.learning_rate.plateau
    if step is None:
        return None
    return Plateau(
        job.learning_rate,
        step,
        job.optimizer.lr,
        initial_progress(step.metric, step.better == "highest", saved_progress),
    )
