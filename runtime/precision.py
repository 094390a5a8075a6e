"""Mixed precision, level O1: autocast over float32 parameters, and loss scaling for float16.

Model: the forward pass and the loss run inside `autocast(step, device)`; the backward pass runs outside it, on
`scaler.scale(loss)`. Before gradients are clipped, `scaler.unscale_(optimizer)`; then `scaler.step(optimizer)` and
`scaler.update()`. Where nothing is scaled these are the plain backward pass and `optimizer.step()`.

Contract: a step whose gradients hold an infinity or a nan is skipped and the scale halved, on all ranks or on none:
each rank looks at gradients that DistributedDataParallel has already summed over all ranks, and an infinity or nan on
one of them is one in the sum.

Limits: where gradients are sharded, or an axis other than data exists, the flag has to be agreed over that axis, which
this does not do.
"""

from __future__ import annotations

import contextlib

import torch

from dslc.compiler.program import PrecisionStep


def autocast(step: PrecisionStep, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """What the forward pass and the loss run in. A new one for each use; for float32 it does nothing."""
    if step.dtype == "float32" or step.level == "O2":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, step.dtype))


def grad_scaler(step: PrecisionStep, device: torch.device) -> torch.amp.GradScaler:
    """The loss scaler; where nothing is scaled, one whose methods hand through."""
    return torch.amp.GradScaler(device.type, enabled=step.scaled)
