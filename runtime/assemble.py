"""The order in which the techniques are applied to a model. Each has a file of its own; here they meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dslc.compiler.program import JobProgram
from dslc.runtime import batch_norm, compiling, ddp, dynamo, frozen, initial_weights, recompute
from dslc.runtime.losses import LossSum, loss_sum
from dslc.runtime.model import build_model
from dslc.runtime.optimizers import build_optimizer
from dslc.runtime.precision import grad_scaler


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a training is made of. `plain` is the model under its own names, `model` what the loop calls."""

    plain: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    loss: LossSum
    device: torch.device


def assemble(job: JobProgram, device: torch.device) -> Parts:
    """Makes the parts on `device`. Where there are several ranks, the process group has to be there."""
    plain = build_model(job.model, device)  # with its memory format, which has to be fixed before buckets are laid out
    initial_weights.load(job.model, plain)
    frozen.freeze(job.model, plain)  # before any engine, which sees to what trains
    if job.sync_batch_norm:
        batch_norm.synchronise(plain)  # before DDP, which takes the module as it finds it
    recompute.apply(job.recompute, plain)  # inside what gathers parameters, which are there when it runs again
    compiling.apply(job.compiled, plain)  # around recomputation, so that the compiler sees it
    with dynamo.leave_out():
        model = ddp.wrap(job, plain)
        optimizer = build_optimizer(job.optimizer, plain)  # after DDP, which may hand out rank 0's numbers
    return Parts(
        plain=plain,
        model=model,
        optimizer=optimizer,
        scaler=grad_scaler(job.precision, device),
        loss=loss_sum(job.loss),
        device=device,
    )
