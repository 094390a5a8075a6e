"""A network of a user's that draws in each way that the runtime controls, also outside of its blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class StochasticDepth(nn.Module):
    """Drops the whole of a sample's path."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = x.new_empty((len(x), *[1] * (x.dim() - 1))).bernoulli_(1 - self.rate)
        return x * kept / (1 - self.rate)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.path = StochasticDepth(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.path(self.attention(y, y, y, need_weights=False)[0])
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(256, WIDTH), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.embed(x))
        if self.training:
            x = x + 0.01 * torch.randn(x.shape, device=x.device)
        for block in self.blocks:
            x = block(x)
        return self.head(F.dropout(x, 0.05, self.training))


def network() -> nn.Module:
    return Network()
