"""Lion: an update by the sign of a momentum (Chen et al. 2023, arXiv:2302.06675).

Model: u = sign(β₁ m + (1 - β₁) g); p ← p (1 - lr · decay) - lr · u; m ← β₂ m + (1 - β₂) g. The only state is m.

Contract: each number is updated alone, so a rank may hold any part of a parameter. A group of parameters is updated in
one kernel where torch has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dslc.compiler.trace.private_torch import add_all, approach_all, moved, scale_all, take_signs


class Lion(torch.optim.Optimizer):
    """Keeps a momentum for each parameter: `exp_avg`, laid out as the parameter is."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        first, second = group["betas"]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        momenta = [self.state[parameter]["exp_avg"] for parameter in parameters]
        updates = moved(gradients, momenta, first)
        take_signs(updates)
        if group["weight_decay"]:
            scale_all(parameters, 1 - group["lr"] * group["weight_decay"])
        add_all(parameters, updates, alpha=-group["lr"])
        approach_all(momenta, gradients, 1 - second)
