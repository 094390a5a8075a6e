"""Optimizers that evaluate the loss by a closure, with a small network and samples for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 16


def net(dropout: float = 0.0) -> nn.Module:
    """A network with the same numbers wherever it is made."""
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 1))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return module


class Wide(nn.Sequential):
    """Computes in float64 what it is given in float32."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = super().forward(input.double())
        return output


def wide_net() -> nn.Module:
    return Wide(*net().double().children())


def tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(SAMPLES, 5, generator=generator)
    return inputs, (inputs[:, :1] * inputs[:, 1:2]).sin() + inputs[:, 2:3]


class Samples:
    def __init__(self) -> None:
        self._inputs, self._targets = tensors()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._targets[index]


def lbfgs(params: Any, lr: float, **arguments: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=lr, **arguments)


class Sam(torch.optim.SGD):
    """Sharpness-aware minimization (Foret et al. 2021): the gradient at the worst point near the parameters."""

    def __init__(self, params: Any, lr: float, rho: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self._rho = rho

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        for p in parameters:
            self.state[p]["old"] = p.clone()
            assert p.grad is not None
            p.add_(p.grad, alpha=float(self._rho / norm))
        closure()
        for p in parameters:
            p.copy_(self.state[p]["old"])
        super().step()
        return loss


class SamWithDefault(Sam):
    """The same, with a default for the closure that it does not do without, as public ones have."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]
        assert closure is not None, "it needs a closure"
        return super().step(closure)


class SamByName(Sam):
    """The same, with a closure that is given by name alone."""

    @torch.no_grad()
    def step(self, *, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        return super().step(closure)


class SamByNameWithDefault(Sam):
    """The same, with a default that it does not do without."""

    @torch.no_grad()
    def step(self, *, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]
        assert closure is not None, "it needs a closure"
        return super().step(closure)


class GradientsFirst(torch.optim.SGD):
    """Uses the gradients of a backward pass that the loop has done before."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        if closure is None:
            raise ValueError("it needs a closure")
        torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None])
        closure()
        return super().step()


class SameLoss(torch.optim.SGD):
    """Fails if a second evaluation at the same parameters gives another loss."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        first, second = closure(), closure()
        assert torch.equal(first, second), f"{first} and {second}"
        super().step()
        return first


class NeverCalls(torch.optim.SGD):
    def step(self, closure: Callable[[], Tensor]) -> Any:  # type: ignore[override]
        return None


class FailsEitherWay(Sam):
    """It needs a closure, and fails with one for another reason."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]
        assert closure is not None, "it needs a closure"
        raise KeyError("rho")


class Evaluations:
    """A hook that writes the norm of the gradient after each evaluation."""

    def __init__(self) -> None:
        self._norms: list[float] = []

    def after_backward(self, context: Any) -> None:
        gradients = [p.grad for p in context.model.parameters()]
        self._norms.append(float(torch.stack([each.norm() for each in gradients]).norm()))

    def end(self, context: Any) -> None:
        (Path(context.folder) / "norms.json").write_text(json.dumps(self._norms))
