"""Work of ranks in a process group: a training by one of torch's own engines, and waiting in vain."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dslc.runtime.transport.shared_memory import NAME


def train_by_engine(rank: int, sharded: bool, kind: type) -> list[float]:
    """Returns the losses of three steps. The group of all ranks is of this kind if its backend is shared memory."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 3))
    if sharded:
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.005)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert isinstance(dist.group.WORLD, kind) == (dist.get_backend() == NAME)
    return losses


def sum_after_an_end(rank: int) -> str:
    """Returns the error of a sum before which the last rank has ended."""
    if rank == dist.get_world_size() - 1:
        os._exit(1)
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        return str(error)
    return ""


def sum_without_the_last(rank: int) -> str:
    """Returns the error of a sum to which the last rank does not come within 300 ms."""
    group: Any = dist.new_group(timeout=timedelta(milliseconds=300))
    if rank == dist.get_world_size() - 1:
        dist.barrier()
        return ""
    try:
        dist.all_reduce(torch.ones(3), group=group)
    except RuntimeError as error:
        dist.barrier()
        return str(error)
    return ""
