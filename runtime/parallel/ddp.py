"""Data parallelism: torch's DistributedDataParallel, set up as the program says.

Model: each rank works on its share of the global batch, and DDP averages the gradients over the ranks while the
backward pass still runs. The loss of a step is a sum divided by the global count, so the mean is undone by `scale`.

Contract: parameter names are the names in the plain model, which stays as it is. Only the last of several micro-batches
exchanges gradients (`no_sync` for the earlier ones). Ranks begin equal: each makes a library model from the seed and
the names of its parameters; rank 0 broadcasts a user's own.

Limits: the data axis alone. Every rank uses the same parameters in every step, except `unused` ones. A static graph
excludes `no_sync` (torch asserts), which the compiler respects.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dslc.compiler.ir.program import JobProgram
from dslc.runtime.parallel import zero1
from dslc.runtime.parallel.engine import Engine, buffers_of_rank_0, do_nothing

Hook = Callable[[dist.GradBucket], None]


def wrap(
    job: JobProgram, model: nn.Module, hook: Hook | None = None, complete: Callable[[], None] = do_nothing
) -> Engine:
    """Returns the engine of `model` for one rank, else of DistributedDataParallel. A `hook` takes the mean of a bucket
    in place of an exact sum; `complete` waits for it.
    """
    if job.gradients.kind == "zero1":
        zero1.lay_out(model)
    if job.own_step is not None and job.world_size > 1:  # it exchanges gradients by itself
        return Engine(model=model, agree_on_buffers=buffers_of_rank_0(model))
    if job.gradients.kind == "none" or not any(parameter.requires_grad for parameter in model.parameters()):
        return Engine(model=model)  # nothing to exchange, and DDP refuses one rank
    assert not (job.gradients.static_graph and job.microbatches > 1), "a static graph cannot be joined with no_sync"
    # Synchronised statistics are equal on all ranks already.
    differ = (not job.sync_batch_norm or job.moves_buffers) and any(True for _ in model.buffers())
    with warnings.catch_warnings():
        # The successor of `broadcast_buffers` would exchange buffers at the beginning even if it is False.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            gradient_as_bucket_view=True,
            static_graph=job.gradients.static_graph,
            # Where numbers decide, each step finds out by itself (unused_parameters.py): DDP takes all that an output
            # depends on for used, whatever the loss leaves out.
            find_unused_parameters=job.gradients.search and bool(job.gradients.unused),
            # A user's own model may draw other numbers on each rank; one made from names cannot.
            init_sync=job.model.root is None and not job.model.reset,
            # The library's layers move buffers by batch statistics or by the counts of all ranks, or count for each
            # rank by itself, as routers do.
            broadcast_buffers=differ and job.model.root is None,
        )
    if hook is not None:
        wrapped.register_comm_hook(None, _complete_at_once(hook))
    return Engine(
        model=wrapped,
        scale=job.gradients.averages,
        held=wrapped.no_sync,
        complete=complete,
        agree_on_buffers=buffers_of_rank_0(model) if differ else do_nothing,
    )


def _complete_at_once(hook: Hook) -> Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]]:
    """Returns a communication hook that is done at once; gradients may change until `complete` has waited."""

    def complete(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        hook(bucket)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # It looks at these, and takes no text for a type.
    complete.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return complete
