"""A network of a user's that drops rows of a tensor whose first dim joins positions and samples, in some order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class Block(nn.Module):
    def __init__(self, from_shape: bool) -> None:
        super().__init__()
        self.from_shape = from_shape
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        more = self.down(F.gelu(self.up(self.norm(x))))
        if not self.from_shape:
            return x + F.dropout(more, 0.2, self.training)
        return x + more * (torch.rand(x.shape) > 0.2) if self.training else x + more


class Network(nn.Module):
    """`order` is of (positions, samples): "first" for samples first, "last" and "between" (of the positions).
    `from_shape`: a mask is made of a shape alone. `rows` are of a table that no pass takes, to make it large.
    """

    def __init__(self, order: str = "last", from_shape: bool = False, rows: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH).requires_grad_(False)
        self.order, self.embed, self.head = order, nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.blocks = nn.ModuleList(Block(from_shape) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        samples, positions = x.shape
        x = F.dropout(self.embed(x), 0.1, self.training)
        if self.order == "between":
            x = x.unflatten(1, (positions // 2, 2)).transpose(0, 1)
        elif self.order == "last":
            x = x.transpose(0, 1)
        shape = x.shape
        x = x.reshape(-1, WIDTH)
        for block in self.blocks:
            x = block(x)
        x = x.view(shape)
        if self.order != "first":
            x = x.transpose(0, 1)
        return self.head(x.reshape(samples, positions, WIDTH))
