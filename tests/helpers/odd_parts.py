"""Networks, losses and optimizers that public bug reports are about, for the jobs that odd_parts_drawn.py draws.

A network takes 6 numbers, as a tensor or in a dict, and gives scores of 4 classes: alone, beside a loss, or for each
place of a mask, with the classes first. Or it takes the class as well, and gives its loss.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

CLASSES, WIDTH, PLACES = 4, 8, 5


class Samples:
    """Samples (x, class) or ({"x": x}, class); `form`: with a mask of classes instead, or in one dict."""

    def __init__(self, samples: int = 50, named: bool = False, form: str = "class", unseeded: bool = False) -> None:
        self.samples, self.named, self.form = samples, named, form
        self.shift = np.random.default_rng().random() if unseeded else 0.0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index)) + self.shift
        label: Any = torch.arange(PLACES).add(int(x[:CLASSES].argmax())) % CLASSES
        if self.form == "mask":
            label[index % PLACES :] = -100
        else:
            label = int(label[0])
        if self.form == "whole":
            return {"x": x, "label": label}
        return ({"x": x} if self.named else x), label


def weights() -> list[float]:
    return [1.0 + n % 5 for n in range(50)]


class Block(nn.Module):
    """A layer whose weight is stored in an odd way, and a norm."""

    def __init__(self, weight: str, norm: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        if weight == "transposed":
            self.layer.weight = nn.Parameter(self.layer.weight.detach().t().clone().t())
        elif weight == "expanded":
            self.layer.bias = nn.Parameter(torch.zeros(1).expand(WIDTH))
        elif weight == "empty":
            self.extra = nn.Parameter(torch.empty(0, WIDTH))
        elif weight == "orthogonal":
            parametrizations.orthogonal(self.layer)
        elif weight == "normed":
            parametrizations.weight_norm(self.layer)
        self.norm: nn.Module = nn.Identity()
        if norm != "none":
            self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=norm != "untracked")

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.layer(x))
        return x + torch.tanh(hidden)


class Odd(nn.Module):
    """`blocks` says how they are held, `path` how one is chosen, `buffer` what a forward pass moves.

    `again`: the first block is used once more after the others; `tied`: two layers share a weight under two names;
    `table`: a plain attribute that each pass needs, which a function keeps from a depth of 3 on; `keeps`: a plain
    attribute that each pass moves; `mixes`: samples see the mean of their batch.
    """

    seen: Tensor

    def __init__(
        self,
        blocks: str = "list",
        depth: int = 3,
        weight: str = "plain",
        norm: str = "none",
        path: str = "all",
        buffer: str = "none",
        output: str = "scores",
        again: bool = False,
        tied: bool = False,
        table: bool = False,
        keeps: bool = False,
        mixes: bool = False,
        double: bool = False,
    ) -> None:
        super().__init__()
        made = [Block(weight if n == 1 else "plain", norm if n == 0 else "none") for n in range(depth)]
        self.enter = nn.Linear(6, WIDTH)
        self.blocks: Any = nn.ModuleDict({f"b{n}": block for n, block in enumerate(made)})
        if blocks == "list":
            self.blocks = nn.ModuleList(made)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES)
        self.back = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.back.weight = self.mix.weight
        self.path, self.kind, self.output, self.again = path, buffer, output, again
        if buffer != "none":
            self.register_buffer("seen", torch.ones(1))
        numbers = torch.linspace(0.5, 1.5, WIDTH)
        self.table = numbers if table and depth < 3 else None
        self.scale = partial(torch.mul, numbers) if table and depth >= 3 else None
        self.calls, self.mixes = 0 if keeps else None, mixes
        if output == "map":
            self.head = nn.Linear(WIDTH, CLASSES * PLACES)
        self.is_double = double
        if double:
            self.double()

    def forward(self, x: Tensor, label: Tensor | None = None) -> Any:
        hidden = torch.tanh(self.enter(x.double() if self.is_double else x))
        if self.calls is not None and self.training:
            self.calls += 1
            hidden = hidden / self.calls
        if self.mixes:
            hidden = hidden - hidden.mean(0)
        made = list(self.blocks.values()) if isinstance(self.blocks, nn.ModuleDict) else list(self.blocks)
        if self.path == "one" and self.training:
            made = [made[random.randrange(len(made))]]
        for block in made:
            if self.path == "drop" and self.training and random.random() < 0.3:
                continue
            hidden = block(hidden)
            hidden = hidden if self.table is None else hidden * self.table
            hidden = hidden if self.scale is None else self.scale(hidden)
        if self.again:
            hidden = made[0](hidden)
        hidden = torch.tanh(self.back(torch.tanh(self.mix(hidden))))
        if self.kind == "maximum" and self.training:
            self.seen.copy_(torch.maximum(self.seen, hidden.detach().abs().max()))
        elif self.kind == "count" and self.training:
            self.seen.add_(1)
        scores: Tensor = self.head(hidden / self.seen if self.kind == "maximum" else hidden)
        if self.output == "map":
            return scores.unflatten(1, (CLASSES, PLACES))
        if self.output in ("loss", "balanced"):
            assert label is not None
            balance = scores.softmax(1).mean(0).square().sum() if self.output == "balanced" else 0.0
            return {"loss": F.cross_entropy(scores, label) + balance, "scores": scores}
        return (scores, scores.square().mean(1)) if self.output == "pair" else scores


def classified(output: Any, target: Tensor) -> Tensor:
    """The loss of scores, alone or beside a penalty for each sample."""
    scores, penalty = output if isinstance(output, tuple) else (output, None)
    losses = F.cross_entropy(scores, target, reduction="none")
    return losses if penalty is None else losses + 0.01 * penalty


def of_masks(output: Tensor, target: Tensor) -> Tensor:
    """A loss for each place, of scores with the classes first."""
    return F.cross_entropy(output, target, reduction="none")


class Margin(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Any, target: Tensor) -> Tensor:
        return classified(output, target) * self.scale


margin = Margin()


class Averaging(torch.optim.Optimizer):
    """Trains one sequence of weights, and evaluates its running mean, as schedule-free optimizers do."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "train_mode": True})

    def _swap(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                for p in group["params"]:
                    if "mean" in self.state[p]:
                        other = self.state[p]["mean"].clone()
                        self.state[p]["mean"].copy_(p)
                        p.copy_(other)
            group["train_mode"] = train

    @torch.no_grad()
    def train(self) -> None:
        self._swap(True)

    @torch.no_grad()
    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = p.detach().clone()
                p.add_(p.grad, alpha=-group["lr"])
                state["mean"].lerp_(p, 0.3)
