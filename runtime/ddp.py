"""Data parallelism: torch's DistributedDataParallel, set up as the program says.

Model: each rank works on its share of the global batch, and DDP averages the gradients over the ranks while the
backward pass still runs. The loss of a step is a sum divided by the global count, so the mean is undone by `undo_mean`.

Contract: what the loop calls is `wrap(…)`; parameter names are those of the plain model, which stays as it is. Only the
last of several micro-batches exchanges gradients (`no_sync` for the others). Ranks begin equal: a library model is made
from the seed and the names of its parameters on each rank, a user's own is handed out by rank 0.

Limits: the data axis alone. Every rank uses the same parameters in every step, unless `find_unused`. A static graph
cannot be joined with `no_sync` (torch asserts), which the compiler knows.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dslc.compiler.program import JobProgram

TORCHS_OWN = 25  # MiB of a bucket


def wrap(job: JobProgram, model: nn.Module) -> nn.Module:
    """What the loop calls: `model` itself for one rank, else DistributedDataParallel around it."""
    if job.gradients.kind == "none":
        return model
    assert not (job.gradients.static_graph and job.microbatches > 1), "a static graph cannot be joined with no_sync"
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model  # nothing to agree on, and DDP refuses it
    size = job.gradients.bucket_megabytes
    with warnings.catch_warnings():
        # torch 2.13 has another name for `broadcast_buffers`, which 2.11 does not know.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DistributedDataParallel(
            model,
            bucket_cap_mb=None if size == TORCHS_OWN else size,  # None has a small first bucket, which goes early
            gradient_as_bucket_view=True,
            static_graph=job.gradients.static_graph,
            find_unused_parameters=job.gradients.find_unused,
            # A user's own model may draw its numbers in ways that differ from rank to rank; a library model cannot.
            init_sync=job.model.python is not None,
            # Synchronised statistics are equal on all ranks already.
            broadcast_buffers=not job.sync_batch_norm and any(True for _ in model.buffers()),
        )


def undo_mean(model: nn.Module) -> int:
    """What a rank's loss is multiplied by, so that the gradients end as a sum over the ranks."""
    return dist.get_world_size() if isinstance(model, DistributedDataParallel) else 1


def without_exchange(model: nn.Module) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Makes contexts in which a backward pass keeps its gradients on the rank."""
    return model.no_sync if isinstance(model, DistributedDataParallel) else contextlib.nullcontext


def agree_on_buffers(model: nn.Module) -> None:
    """Gives all ranks rank 0's buffers where they may differ (statistics per rank), before they are used."""
    if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
        for buffer in model.module.buffers():
            dist.broadcast(buffer, 0)
