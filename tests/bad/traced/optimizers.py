"""Optimizers that some plans cannot have."""

from typing import Any

import torch


class WholeMatrices(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad / (p.grad.norm() + 1e-9), alpha=-group["lr"])


class AllTogether(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = sum(p.grad.norm() for p in group["params"])
            for p in group["params"]:
                p.add_(p.grad / norm, alpha=-group["lr"])


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=-group["lr"])


class Counting(torch.optim.SGD):
    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / self.steps)


class Modes(torch.optim.SGD):
    """Evaluates other weights than it trains."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def lbfgs(params: Any, lr: float) -> torch.optim.Optimizer:
    """Computes the loss again within a step."""
    return torch.optim.LBFGS(params, lr=lr)


def of_tensors(params: Any, lr: float) -> torch.optim.Optimizer:
    """Treats vectors and matrices otherwise, and takes no groups."""
    matrices = [p for p in params if p.dim() > 1]
    vectors = [p for p in params if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "lr": 2 * lr}, {"params": vectors}]
    return torch.optim.SGD(groups, lr=lr)
