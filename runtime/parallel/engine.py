"""What the loop has to know of the engine that lays a model over the ranks (ddp.py, zero1.py, fsdp.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

Contexts = Callable[[], contextlib.AbstractContextManager[None]]


def nothing() -> None:
    """In the place of what an engine has no need of."""


def all_count(parameter: Tensor) -> bool:
    """What a rank holds of a gradient is its own alone, or all ranks have all of it."""
    return True


@dataclass(frozen=True, kw_only=True)
class Engine:
    """`model` is what the loop calls.

    `scale` is what a loss is multiplied by so that the gradients end as a sum over the ranks. `held` makes the context
    for the passes of each micro-batch but the last. `lockstep`: a forward pass takes all ranks. `shards` are the ranks
    that hold the gradients between them, row by row; None where each holds them whole. `counts` says of a parameter
    whether this rank is the one that counts the rows it holds. `agree_on_buffers` gives all ranks rank 0's buffers
    where they may differ (statistics per rank), before they are used. `let_go` frees what forward passes without a
    backward pass have left gathered. `complete` adds up, after the passes of a step, what gradients are still in parts.
    """

    model: nn.Module
    scale: int = 1
    held: Contexts = contextlib.nullcontext
    lockstep: bool = False
    shards: dist.ProcessGroup | None = None
    counts: Callable[[Tensor], bool] = all_count
    agree_on_buffers: Callable[[], None] = nothing
    let_go: Callable[[], None] = nothing
    complete: Callable[[], None] = nothing


def buffers_of_rank_0(model: nn.Module, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    """The function that gives the ranks of a group (None: all) the buffers of its first."""

    def agree() -> None:
        for buffer in model.buffers():
            dist.broadcast(buffer, group_src=0, group=group)

    return agree
