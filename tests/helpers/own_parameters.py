"""Networks whose parameters are of unusual kinds, for tests: `python("own_parameters:Odd", kind = "strided")`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations


class Odd(nn.Module):
    """A parameter of one of the kinds that torch lets a module have."""

    def __init__(self, kind: str, width: int = 64, hidden: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(width, hidden), nn.Linear(hidden, classes)
        self.s: Any = None
        whole = torch.randn(2 * hidden)
        if kind == "transposed":
            self.s = nn.Parameter(torch.randn(4, hidden).t())
        elif kind == "views":
            self.s, self.t = nn.Parameter(whole[:hidden]), nn.Parameter(whole[hidden:])
        elif kind == "strided":
            self.s = nn.Parameter(whole[::2])
        elif kind == "named":
            self.s = nn.ParameterDict({"a/b": torch.ones(hidden), "*": torch.ones(hidden), "[0]": torch.ones(1)})
        elif kind == "list":
            self.s = nn.ParameterList([torch.ones(hidden), torch.ones(1)])
        elif kind == "expanded_buffer":
            del self.s
            self.register_buffer("s", torch.full((1, hidden), 0.5).expand(4, hidden))

    def forward(self, x: Tensor) -> Tensor:
        h, s = torch.tanh(self.a(x.flatten(1))), self.s
        if self.kind == "transposed":
            h = h + h @ s @ s.t()
        elif self.kind == "expanded_buffer":
            h = h * s.sum(0)
        elif self.kind == "views":
            h = h * s + self.t
        elif self.kind == "strided":
            h = h * s
        elif self.kind == "named":
            h = h * s["a/b"] * s["[0]"] + s["*"]
        elif self.kind == "list":
            h = h * s[0] * s[1]
        return self.b(h)


class Last(nn.Module):
    """Convolutions in channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Linear(6, 10)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.n(self.a(x.view(-1, 4, 4, 4)))).mean((2, 3)))


class Normed(nn.Module):
    """A weight that torch computes from other tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made = getattr(parametrizations, kind) if kind != "old_weight" else torch.nn.utils.weight_norm
        self.a, self.b = made(nn.Linear(64, 8)), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x.flatten(1))))


class Freezes(nn.Module):
    """Freezes some parameters in `forward`: those of a module, or one."""

    def __init__(self, kind: str = "module") -> None:
        super().__init__()
        self.first, self.norm, self.last, self.kind = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "module":
            self.first.requires_grad_(False)
        else:
            self.first.weight.requires_grad = False
        hidden: Tensor = self.last(torch.tanh(self.norm(self.first(x.flatten(1)))))
        return hidden


class Table:
    """An object that is no module, with tensors."""

    def __init__(self) -> None:
        self.scales = [torch.linspace(0.5, 1.5, 8)]

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scales[0]


class Beside(nn.Module):
    """Keeps tensors in an object that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.last = nn.Linear(64, 8), Table(), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.last(torch.tanh(self.table(self.first(x.flatten(1)))))
        return hidden
