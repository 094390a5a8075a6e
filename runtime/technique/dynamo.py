"""Keeps torch's compiler out of a training that compiles nothing.

Optimizers and DistributedDataParallel are marked so that `torch.compile` skips parts of them, and the first call of a
marked function imports all of torch._dynamo: 0.8 s a process, a quarter of a small job's time to its first step.
`leave_out` answers beforehand what they ask of it; `plain_step` is the step inside the wrapper of an optimizer's, and
`plain_zero_grad` is its `zero_grad`.

Contract: a no-op if torch._dynamo is loaded already (by a user's module that compiles itself). It may be loaded later:
functions patched here then count as ordinary code.

Limits: it relies on names inside torch. If they are missing it does nothing, and torch loads its compiler.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.parallel.distributed

from dslc.compiler.trace.private_torch import COMPILER, COMPILER_MARK, put_in_place_of_compiler, take_away


@contextlib.contextmanager
def leave_out() -> Iterator[None]:
    """Makes optimizers and DistributedDataParallel without torch._dynamo while the context lasts; they stay so."""
    if COMPILER in sys.modules:
        yield
        return
    for owner in (torch.optim.Optimizer, torch.nn.parallel.DistributedDataParallel):
        _mark(vars(owner))
    for name in {kind.__module__ for kind in vars(torch.optim).values() if isinstance(kind, type)}:
        _mark(vars(sys.modules[name]))
    stand_in = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    put_in_place_of_compiler(stand_in)
    try:
        yield
    finally:
        take_away(stand_in)


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


def _mark(names: Mapping[str, object]) -> None:
    for found in list(names.values()):
        function, wrapped = found, False
        while hasattr(function, "__wrapped__"):
            function, wrapped = function.__wrapped__, True
        if wrapped and isinstance(function, FunctionType) and not hasattr(function, COMPILER_MARK):
            setattr(function, COMPILER_MARK, function)
