"""Optimizers as users write them: Lion, Muon, Adam with a state of 8 bits, and some that cannot be divided."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675)."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.lerp(p.grad, state["exp_avg"], beta1).sign_(), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 1 - beta2)


def newton_schulz(gradient: Tensor, steps: int = 5) -> Tensor:
    """A matrix near the orthogonal one of the same directions."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient.flatten(1)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if tall else x).reshape(gradient.shape)


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices (Jordan 2024), and AdamW for all else, whose rate is `adam_lr`."""

    def __init__(
        self, named_parameters: Iterable[Any], lr: float, momentum: float = 0.95, adam_lr: float = 3e-3,
        besides: tuple[str, ...] = ("embedding", "head"),
    ) -> None:  # fmt: skip
        named = list(named_parameters)
        assert not named or isinstance(named[0], tuple)
        hidden = [p for name, p in named if p.ndim >= 2 and not any(each in name for each in besides)]
        known = {id(p) for p in hidden}
        others = [p for _, p in named if id(p) not in known]
        groups = [
            {"params": hidden, "lr": lr, "momentum": momentum, "muon": True},
            {"params": others, "lr": adam_lr, "momentum": 0.0, "muon": False},
        ]
        super().__init__([group for group in groups if group["params"]], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                (self._muon if group["muon"] else self._adam)(p, group)

    def _muon(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"]
        buffer.mul_(group["momentum"]).add_(p.grad)
        p.add_(newton_schulz(p.grad + group["momentum"] * buffer), alpha=-group["lr"])

    def _adam(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        assert p.grad is not None
        state["step"] += 1
        state["exp_avg"].lerp_(p.grad, 0.1)
        state["exp_avg_sq"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        rate = group["lr"] * math.sqrt(1 - 0.99 ** state["step"]) / (1 - 0.9 ** state["step"])
        p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-rate)


BLOCK = 32


def quantised(value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 8 bits for each number, and the scale of each block."""
    flat = torch.nn.functional.pad(value.flatten(), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
    scale = flat.abs().amax(1).clamp_(min=1e-12)
    return (flat / scale[:, None] * 127).round().to(torch.int8), scale


def restored(codes: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    return (codes.float() / 127 * scale[:, None]).flatten()[: like.numel()].view_as(like)


class Adam8(torch.optim.Optimizer):
    """Adam whose moments are kept in 8 bits, with a scale for each block of numbers."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    for name in ("first", "second"):
                        state[name], state[name + "_scale"] = quantised(torch.zeros_like(p))
                first = restored(state["first"], state["first_scale"], p).lerp_(p.grad, 0.1)
                second = restored(state["second"], state["second_scale"], p).lerp_(p.grad.square(), 0.01)
                state["first"], state["first_scale"] = quantised(first)
                state["second"], state["second_scale"] = quantised(second)
                rate = group["lr"] * math.sqrt(1 - 0.99 ** group["step"]) / (1 - 0.9 ** group["step"])
                p.addcdiv_(first, second.sqrt_().add_(1e-4), value=-rate)


def adamw(params: Any, lr: float, **arguments: Any) -> torch.optim.Optimizer:
    """Torch's own, by a function."""
    return torch.optim.AdamW(params, lr=lr, **arguments)


class Together(torch.optim.SGD):
    """Clips the gradient of all parameters together."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(every, 0.1)
        super().step()


class Noisy(torch.optim.SGD):
    """Adds noise to each update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=group["lr"] / 100)


class Forgetful(torch.optim.SGD):
    """Counts its steps where no checkpoint looks."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / self.count)


def no_optimizer(params: Any, lr: float) -> float:
    return lr


def without_one(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params)[1:], lr=lr)


class Steady(torch.optim.SGD):
    """Does not look at the rate of its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-0.01)


class KeepsAList(torch.optim.SGD):
    """Keeps its last gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                past = self.state[p].setdefault("past", [])
                past.append(p.grad)
                p.add_(past[0], alpha=-group["lr"])


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024, arXiv:2405.15682): parameters are y in `train()`, and x in `eval()`."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def eval(self) -> None:
        self._go(lambda beta: 1 - 1 / beta, False)

    @torch.no_grad()
    def train(self) -> None:
        self._go(lambda beta: 1 - beta, True)

    def _go(self, weight: Callable[[float], float], train: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != train else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight(group["beta"]))
            group["train_mode"] = train

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "call train() before step()"
            group["k"] += 1
            share, beta = 1 / group["k"], group["beta"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share).add_(p.grad, alpha=group["lr"] * (beta * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])
