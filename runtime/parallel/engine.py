"""The interface between the loop and the engine that lays a model over the ranks (ddp.py, zero1.py, fsdp.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

Contexts = Callable[[], contextlib.AbstractContextManager[None]]


def do_nothing() -> None:
    """Stands in for a function that an engine does not need."""


def all_count(parameter: Tensor) -> bool:
    """True for every parameter: each rank holds gradients of its own, or all hold all."""
    return True


@dataclass(frozen=True, kw_only=True)
class Engine:
    """`model` is the module that the loop calls.

    `scale` multiplies a loss so that the gradients end as a sum over the ranks. `held` makes the context for the passes
    of each micro-batch but the last. `lockstep`: a forward pass needs all ranks. `shards` is the group of ranks that
    together hold the gradients, row by row; None if each holds them whole. `counts` is true of a parameter whose rows
    this rank counts. `agree_on_buffers` gives all ranks rank 0's buffers if they may differ (statistics per rank),
    before they are used. `let_go` frees parameters that forward passes without a backward pass have left gathered.
    `begin_step` is called before the passes of a step. `complete` sums, after the passes of a step, gradients that are
    still partial.
    """

    model: nn.Module
    scale: int = 1
    held: Contexts = contextlib.nullcontext
    lockstep: bool = False
    shards: dist.ProcessGroup | None = None
    counts: Callable[[Tensor], bool] = all_count
    agree_on_buffers: Callable[[], None] = do_nothing
    let_go: Callable[[], None] = do_nothing
    begin_step: Callable[[], None] = do_nothing
    complete: Callable[[], None] = do_nothing


def buffers_of_rank_0(model: nn.Module, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    """Returns the function that copies the first rank's buffers to all ranks of a group (None: all ranks)."""

    def agree() -> None:
        for buffer in model.buffers():
            dist.broadcast(buffer, group_src=0, group=group)

    return agree
