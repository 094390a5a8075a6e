"""A learning rate that falls where a metric of the evaluations gets no better.

Model: torch's `ReduceLROnPlateau` itself, over an optimizer without parameters of the training, takes each evaluation.
Its rate, as a share of the full rate, multiplies the rate of every group (learning_rate.py).

Contract: the rates are torch's. The state is plain numbers (`Progress`), which each checkpoint keeps, so that a resumed
training has the rates of an unbroken one. All ranks hear the same numbers, and so have the same rates.

Limits: a schedule over another metric or direction than the checkpoint's begins anew, at the full rate. torch changes
no rate by less than 1e-8.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.optim import lr_scheduler

from dslc.compiler.ir.program import JobProgram, LearningRateStep, PlateauStep
from dslc.runtime.checkpoint.files import Progress


def initial_progress(metric: str, highest: bool, kept: Progress | None) -> Progress:
    """Returns the progress over a metric with which a training begins: a checkpoint's, if its metric is the same."""
    if kept is not None and (kept.metric, kept.highest) == (metric, highest):
        return kept
    return Progress(metric=metric, highest=highest)


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
        torchs, before = self._torchs, self.progress.best
        torchs.step(value)
        best = None if torchs.best == (-math.inf if self.progress.highest else math.inf) else torchs.best
        self.progress = replace(
            self.progress,
            best=best,
            step=step if best != before else self.progress.step,
            since=torchs.num_bad_epochs,
            factor=self._optimizer.param_groups[0]["lr"] / self._rate if self._rate else 1.0,
            cooldown=torchs.cooldown_counter,
        )


def plateau_of(job: JobProgram, kept: Progress | None) -> Plateau | None:
    """Returns the schedule of a job that has one, from a checkpoint's progress on."""
    step = job.learning_rate.plateau
    if step is None:
        return None
    return Plateau(
        job.learning_rate, step, job.optimizer.lr, initial_progress(step.metric, step.better == "highest", kept)
    )
