"""The learning rate of each step.

Model: the rate of step s (from 0) is the optimizer's own rate times `factor(step, s)`:

    warm-up      (s + 1) / warmup                                                  for s < warmup
    constant     1
    cosine       floor + (1 - floor) * (1 + cos(pi * t)) / 2,  t = (s - warmup) / (steps - warmup)
    linear       floor + (1 - floor) * (1 - t)
    step         factor ** ((s - warmup) // every)
    exponential  factor ** ((s - warmup) / every)

Contract: a pure function of the step, so that a resumed run needs no state. From `steps` on, t is 1.
"""

from __future__ import annotations

import math

import torch

from dslc.compiler.ir.program import LearningRateStep


def factor(step: LearningRateStep, s: int) -> float:
    """Returns the factor on the learning rate in step `s`, counted from 0."""
    if s < step.warmup:
        return (s + 1) / step.warmup
    after = s - step.warmup
    through = min(1.0, after / (step.steps - step.warmup)) if step.steps > step.warmup else 1.0
    match step.kind:
        case "constant":
            return 1.0
        case "cosine":
            return step.floor + (1 - step.floor) * (1 + math.cos(math.pi * through)) / 2
        case "linear":
            return step.floor + (1 - step.floor) * (1 - through)
        case "step":
            return float(step.factor ** (after // step.every))
        case "exponential":
            return float(step.factor ** (after / step.every))


def set_learning_rate(optimizer: torch.optim.Optimizer, step: LearningRateStep, s: int) -> float:
    """Sets the rate of step `s` in every group, before `optimizer.step()`, and returns that of the first."""
    scale = factor(step, s)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * scale
    rate: float = optimizer.param_groups[0]["lr"]
    return rate
