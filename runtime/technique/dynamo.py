"""Keeps torch's compiler out of a training that compiles nothing.

Parts of optimizers, DistributedDataParallel, `fully_shard`, DTensors and recomputation are marked so that
`torch.compile` skips them, and these marks import all of torch._dynamo: 0.8 s a process, a quarter of a small job's
time to its first step. `leave_out` lets a stand-in answer; `plain_step` is the step inside the wrapper of an
optimizer's, and `plain_zero_grad` is its `zero_grad`.

Limits: `plain_step` relies on names inside torch. If they are missing it is the optimizer's step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.parallel.distributed
import torch.utils.checkpoint

from dslc.compiler.trace.compiler_stand_in import leave_out_compiler
from dslc.compiler.trace.private_torch import COMPILER, REFERENCES

# Modules whose functions bear such marks; by the last ones DTensor finds the layout of a result.
_MARKED = (
    "torch.optim.",
    "torch.nn.parallel.distributed",
    "torch.distributed.tensor._api",
    "torch.utils.checkpoint",
    *REFERENCES,
)


def leave_out() -> None:
    """Lets a training run without torch._dynamo, until that is imported. To be called when all else is imported."""
    leave_out_compiler(_MARKED)


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Returns `optimizer.step` without the wrappers of the compiler, the profiler and the hooks (there are none)."""
    step: Any = type(optimizer).step
    wrappers = 0
    while hasattr(step, "__wrapped__"):
        step, wrappers = step.__wrapped__, wrappers + 1
    usual = wrappers == 2 and isinstance(step, FunctionType) and not optimizer.defaults.get("differentiable")
    if not usual or COMPILER in sys.modules:
        return optimizer.step

    without_gradients = torch.no_grad()  # one for all steps: making it takes as long as entering it

    def plain() -> object:
        with without_gradients:
            return step(optimizer)

    return plain


def plain_zero_grad(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Returns the function that drops the gradients, without the profiler's range around it."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        return functools.partial(optimizer.zero_grad, set_to_none=True)

    def drop() -> None:
        if "zero_grad" in vars(optimizer):  # a measurement of memory has replaced it
            optimizer.zero_grad(set_to_none=True)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return drop
