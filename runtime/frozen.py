"""Parameters that do not train."""

from __future__ import annotations

from torch import nn

from dslc.compiler.program import ModelStep


def freeze(step: ModelStep, model: nn.Module) -> None:
    """Takes the parameters that a pattern of `step.frozen` matches out of training."""
    if step.frozen:
        raise NotImplementedError("freeze")
