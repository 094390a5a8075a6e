"""`torch.compile`, module by module and in place."""

from __future__ import annotations

from torch import nn


def apply(modules: tuple[str, ...], model: nn.Module) -> None:
    """Has torch compile these modules of `model` at their first call; names and parameters stay."""
    if modules:
        raise NotImplementedError("compile")
