"""Weights from a file in the place of initial values."""

from __future__ import annotations

from torch import nn

from dslc.compiler.program import ModelStep


def load(step: ModelStep, model: nn.Module) -> None:
    """Puts the values of `step.weights` into `model`, whose parameters may be sharded."""
    if step.weights:
        raise NotImplementedError("weights")
