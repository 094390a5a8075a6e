"""A network of a user's whose layers draw for each sample, along a later dim, and for the whole batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class Block(nn.Module):
    """Takes (positions, samples, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        if self.training:
            h = h * torch.rand_like(h[0, 0]).add(0.5)  # of the features, the same for all samples
            h = F.dropout(h, 0.1)
            keep = torch.rand((), device=x.device) < 0.8  # of the whole batch
            return x + torch.where(keep, self.out(h), torch.zeros_like(x))
        return x + self.out(h)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        if self.training:
            samples, size = len(x), x.shape[-1]
            x = x + 0.1 * x[:, :, torch.randperm(size)]
            x = x * torch.randint(1, 3, (samples, 1, 1))
            x = x + 0.1 * F.gumbel_softmax(x, dim=-1) + 0.1 * torch.normal(x.detach(), 0.5)
            chosen = torch.multinomial(x.detach().softmax(-1).flatten(0, 1), 1)
            x = x + 0.1 * torch.bernoulli(torch.sigmoid(x.detach())) * chosen.view(samples, -1, 1).float()
        x = self.drop(x.transpose(0, 1).contiguous())
        for block in self.blocks:
            x = block(x)
        return self.head(x.transpose(0, 1))
