"""Data parallelism: torch's DistributedDataParallel, set up as the program says.

Model: each rank works on its share of the global batch, and DDP averages the gradients over the ranks while the
backward pass still runs. The loss of a step is a sum divided by the global count, so the mean is undone by `scale`.

Contract: parameter names are those of the plain model, which stays as it is. Only the last of several micro-batches
exchanges gradients (`no_sync` for the others). Ranks begin equal: a library model is made from the seed and the names
of its parameters on each rank, a user's own is handed out by rank 0.

Limits: the data axis alone. Every rank uses the same parameters in every step, but `unused` ones. A static graph
cannot be joined with `no_sync` (torch asserts), which the compiler knows.
"""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dslc.compiler.ir.program import JobProgram
from dslc.runtime.parallel import zero1
from dslc.runtime.parallel.engine import Engine, buffers_of_rank_0, nothing


def wrap(job: JobProgram, model: nn.Module) -> Engine:
    """`model` itself for one rank, else DistributedDataParallel around it."""
    if job.gradients.kind == "none" or not any(parameter.requires_grad for parameter in model.parameters()):
        return Engine(model=model)  # nothing to agree on, and DDP refuses it
    assert not (job.gradients.static_graph and job.microbatches > 1), "a static graph cannot be joined with no_sync"
    if job.gradients.kind == "zero1":
        zero1.lay_out(model)
    # Synchronised statistics are equal on all ranks already.
    differ = not job.sync_batch_norm and any(True for _ in model.buffers())
    with warnings.catch_warnings():
        # What replaces `broadcast_buffers` would exchange buffers at the beginning also where it is False.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            bucket_cap_mb=job.gradients.bucket_megabytes,
            gradient_as_bucket_view=True,
            static_graph=job.gradients.static_graph,
            find_unused_parameters=bool(job.gradients.unused),
            # A user's own model may draw its numbers in ways that differ from rank to rank; one that is made from
            # names cannot.
            init_sync=job.model.root is None and not job.model.reset,
            broadcast_buffers=differ,
        )
    return Engine(
        model=wrapped,
        scale=dist.get_world_size(),
        held=wrapped.no_sync,
        agree_on_buffers=buffers_of_rank_0(model) if differ else nothing,
    )
