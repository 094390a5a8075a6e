"""A network of a user's whose helper methods and hooks draw: outside of the `forward` of their own module."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


def dropped(module: nn.Module, args: object, output: Tensor) -> Tensor:
    """Drops some of a module's output: a hook."""
    return F.dropout(output, 0.1, module.training)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, hooked: str) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), Inner()
        self.inner.get_submodule(hooked).register_forward_hook(dropped)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Masks(nn.Module):
    """Is never called: the network takes its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def masked(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.scale, 0.2, self.training)


class Network(nn.Module):
    def __init__(self, hooked: str = "act") -> None:
        super().__init__()
        self.embed, self.masks, self.head = nn.Embedding(256, WIDTH), Masks(), nn.Linear(WIDTH, 256)
        self.blocks = nn.ModuleList(Block(hooked) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.masks.masked(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.masks.masked(x))
