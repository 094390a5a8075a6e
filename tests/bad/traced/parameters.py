"""Networks with parameters that no optimizer can update, or that cannot be sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 8), nn.Linear(8, 10)
        self.kind, whole = kind, torch.randn(10)
        self.s: Any = nn.LazyLinear(8) if kind == "lazy" else None
        if kind == "expanded":
            self.s = nn.Parameter(whole[:1].expand(8))
        elif kind == "overlapping":
            self.s, self.t = nn.Parameter(whole[:8]), nn.Parameter(whole[2:])
        elif kind in ("int16", "float8_e4m3fn"):
            del self.s
            self.register_buffer("s", torch.ones(8).to(getattr(torch, kind)))
        elif kind == "empty":
            self.s = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x.flatten(1))
        x = self.s(x) if self.kind == "lazy" else x + self.s.float().sum()
        return self.b(x)
