"""Makes a whole model: its modules, then its numbers."""

from __future__ import annotations

import torch
from torch import nn

from dslc.compiler.ir.program import ModelStep
from dslc.runtime.model.model import own_model, tie


def build_model(step: ModelStep, device: torch.device | str) -> nn.Module:
    """Returns the model on `device`, in float32, in training mode, its tied weights shared.

    Raises ModelError if a user's own function returns no module; an exception of the function passes through.
    """
    from dslc.runtime.model.blank import blank

    if step.root is None and not step.reset:
        module = own_model(step).to(device)
        tie(module, step.ties)
    else:
        made = blank(step)
        made.fill(lambda value, _: value.to(device), device)
        module = made.module
    if step.channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module
