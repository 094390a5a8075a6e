"""Muon for matrices of hidden layers (Jordan 2024), and AdamW for all other parameters, as torch has both.

Model: a group of parameters with `adamw` belongs to AdamW, with its fused kernel; another group belongs to Muon, which
keeps a momentum and moves a matrix along the momentum's nearest orthogonal matrix, computed in bfloat16.
"""

from __future__ import annotations

import torch

from dslc.runtime.optimizer.local_parts import LocalParts, Options

ADAMW = "adamw"  # in a group: true if its parameters belong to AdamW, whose rate is then the group's `lr`
FUSED = "fused"  # in a group, as in torch's: checkpoints load step counts onto the device of its parameters


class Muon(LocalParts):
    """torch's Muon and AdamW over this rank's parameters; each group has its own `lr`."""

    def __init__(
        self,
        groups: list[Options],
        *,
        lr: float,
        weight_decay: float,
        adamw_betas: tuple[float, float],
        adamw_eps: float,
        **options: object,
    ) -> None:
        def inner(group: Options) -> torch.optim.Optimizer:
            options_of_both = {name: group[name] for name in ("params", "lr", "weight_decay")}
            if group[ADAMW]:
                return torch.optim.AdamW([options_of_both], betas=adamw_betas, eps=adamw_eps, fused=group[FUSED])
            return torch.optim.Muon([options_of_both], **options)  # type: ignore[arg-type]

        defaults = {"lr": lr, "weight_decay": weight_decay, "adamw_betas": adamw_betas, "adamw_eps": adamw_eps}
        super().__init__([{**group, FUSED: group[ADAMW]} for group in groups], defaults | options, inner)
