"""Networks beside adapters that do not fit."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(256, 32), nn.LayerNorm(32)
        self.up, self.read = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 256, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.table(tokens))
        return self.head(F.linear(self.up(x).relu(), self.read.weight))


class Odd(nn.Module):
    """A dense layer whose weight has no multiple of 64 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(256, 9), nn.Linear(9, 9), nn.Linear(9, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.inner(self.table(tokens)))
        return output
