"""Optimizer state sharded over the ranks: torch's ZeroRedundancyOptimizer beside DistributedDataParallel.

Model: whole parameters are dealt out, largest first, each to the rank that has the least so far; that rank keeps their
state, updates them, and broadcasts the result. Gradients are DDP's, whole on every rank.

Contract: each rank's parameters lie in one bucket (`parameters_as_bucket_view`), so that a step takes one broadcast a
rank. The numbers are the same as with the unsharded optimizer: every parameter's update is its own.

A parameter in a bucket is contiguous, and its gradient must be too: torch's fused updates take both as they lie in
memory. DDP lays gradients out like parameters, so `lay_out` must come before it.

Limits: parameters of one dtype (torch refuses several).
"""

from __future__ import annotations

import torch
from torch import nn

from dslc.compiler.ir.steps import Arguments
from dslc.runtime.parallel.custom_optimizer import ParamGroup
from dslc.runtime.technique import dynamo


def preload() -> None:
    """Imports the modules that every rank will need (0.9 s), in the process from which ranks are forked."""
    import torch.distributed.optim  # noqa: F401


def lay_out(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


def share_out(
    kind: type[torch.optim.Optimizer], groups: list[ParamGroup], arguments: Arguments
) -> torch.optim.Optimizer:
    """Returns the optimizer `kind` over `groups` of parameters; this rank keeps its share of the state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    made = ZeroRedundancyOptimizer(groups, kind, parameters_as_bucket_view=True, **arguments)
    made.optim.step = dynamo.plain_step(made.optim)
    return made
