"""Recomputation: modules whose forward pass runs again in the backward pass, for the memory of what it would keep."""

from __future__ import annotations

from torch import nn

from dslc.compiler.program import RecomputeStep


def apply(step: RecomputeStep, model: nn.Module) -> None:
    """Has the modules of `step` recompute, in place; their names and parameters stay."""
    if step.kind != "none":
        raise NotImplementedError("recompute")
