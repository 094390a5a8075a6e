"""The learning rate of each step.

Model: the rate of step s (from 0) is the optimizer's own rate times a factor, by the schedule's kind:

    warm-up      (s + 1) / warmup, or begin + (1 - begin) * s / warmup             for s < warmup
    constant     1
    cosine       down(t),         t = (s - warmup) / (steps - warmup)
    linear       floor + (1 - floor) * (1 - t)
    stable       1; in the last `decay` steps, from floor to 1 by `shape`: 1 - u, (1 + cos(pi * u)) / 2 or 1 - sqrt(u),
                 u = (s - steps + decay) / decay
    one_cycle    start + (1 - start) * (1 - cos(pi * s / (rise - 1))) / 2         for s < rise
                 down((s - rise + 1) / (steps - rise))                             from there on
    restarts     down(v), v the share that is past of the current fall: the first takes `every` steps, each next one
                 `growth` times as many
    step         factor ** ((s - warmup) // every)
    multistep    factor ** (the number of `milestones` that are not after s)
    exponential  factor ** ((s - warmup) / every)
    plateau      1, times a share that follows the evaluations (best_metric.py)
    python       what the user's function returns for (s, steps)

    where down(t) = floor + (1 - floor) * (1 + cos(pi * t)) / 2

Contract: a pure function of the step, so that a resumed run needs only the state of a plateau. From `steps` on, t, u
and v stay 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import TypeAlias

import torch

from dslc.compiler.ir.program import LearningRateStep
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.process.user_code import load_function

Factor: TypeAlias = Callable[[int], float]


def schedule(step: LearningRateStep) -> Factor:
    """Returns the function that gives the factor of each step, counted from 0."""
    if step.python is None:
        return lambda s: factor(step, s)
    user_schedule, steps = load_function(step.python), step.steps
    return mark_errors(step.python.line)(lambda s: _share(user_schedule(s, steps), s))


def _share(value: object, s: int) -> float:
    """Returns the result of a user's schedule as a number. Raises ValueError if it is no factor."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise ValueError(f"the schedule gives {value!r:.80} for step {s}, and should give a number of at least 0")
    return float(value)


def factor(step: LearningRateStep, s: int) -> float:
    """Returns the factor of a schedule by name in step `s`, counted from 0."""
    if s < step.warmup:
        begin = step.begin
        return (s + 1) / step.warmup if begin is None else begin + (1 - begin) * s / step.warmup
    position = s - step.warmup
    through = min(1.0, position / (step.steps - step.warmup)) if step.steps > step.warmup else 1.0
    match step.kind:
        case "cosine":
            return _down(step, through)
        case "linear":
            return step.floor + (1 - step.floor) * (1 - through)
        case "stable":
            return step.floor + (1 - step.floor) * _fallen(step, s)
        case "one_cycle":
            return _one_cycle(step, s)
        case "restarts":
            return _down(step, _since_restart(step, position))
        case "step":
            return float(step.factor ** (position // step.every))
        case "multistep":
            return float(step.factor ** sum(time <= s for time in step.milestones))
        case "exponential":
            return float(step.factor ** (position / step.every))
        case _:
            return 1.0


def _down(step: LearningRateStep, t: float) -> float:
    return step.floor + (1 - step.floor) * (1 + math.cos(math.pi * min(1.0, t))) / 2


def _fallen(step: LearningRateStep, s: int) -> float:
    """Returns the factor (from 1 down to 0) in the fall at the end."""
    u = min(1.0, max(0.0, (s - step.steps + step.decay) / step.decay))
    match step.shape:
        case "linear":
            return 1 - u
        case "cosine":
            return (1 + math.cos(math.pi * u)) / 2
        case "sqrt":
            return 1 - math.sqrt(u)


def _one_cycle(step: LearningRateStep, s: int) -> float:
    if s < step.rise:
        up = s / (step.rise - 1) if step.rise > 1 else 1.0
        return step.start + (1 - step.start) * (1 - math.cos(math.pi * up)) / 2
    return _down(step, (s - step.rise + 1) / max(1, step.steps - step.rise))


def _since_restart(step: LearningRateStep, position: int) -> float:
    length = step.every
    while position >= length:
        position, length = position - length, length * step.growth
    return position / length


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Sets the rate of a step in every group, before `optimizer.step()`, and returns the rate of the first group."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    rate: float = optimizer.param_groups[0]["lr"]
    return rate
