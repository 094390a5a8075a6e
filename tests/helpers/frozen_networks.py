"""A network of the user's own with six blocks, as it is and with its first three frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain() -> nn.Module:
    return Network()


def frozen() -> nn.Module:
    network = Network()
    for part in (network.first, *network.blocks[:3]):
        part.requires_grad_(False)
    return network
