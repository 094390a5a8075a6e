"""A transformer of a user's own that drops heads, features and positions, of which ranks of an axis have pieces."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 48


class Block(nn.Module):
    def __init__(self, width: int, heads: int, joined: bool) -> None:
        super().__init__()
        self.size, self.joined = width // heads, joined
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        if joined:
            self.qkv, self.both = nn.Linear(width, 3 * width), nn.Linear(width, 2 * HIDDEN)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
            self.up = nn.Linear(width, HIDDEN)
        self.out, self.down = nn.Linear(width, width), nn.Linear(HIDDEN, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        h = self.norm(x)
        parts = self.dropped(self.qkv(h)).chunk(3, -1) if self.joined else (self.q(h), self.k(h), self.v(h))
        q, k, v = (part.reshape(samples, length, -1, self.size).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 * self.training)
        x = x + self.dropped(self.out(y.transpose(1, 2).reshape(samples, length, -1)))
        h = self.second_norm(x)
        if self.joined:
            gate, up = self.dropped(self.both(h)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(self.dropped(self.up(h).flatten(0, 1).relu()).view(samples, length, -1))

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1, self.training)


class Network(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4, blocks: int = 2, joined: bool = False) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(256, width), nn.LayerNorm(width), nn.Linear(width, 256)
        self.blocks = nn.ModuleList(Block(width, heads, joined) for _ in range(blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(F.dropout(self.norm(x), 0.1, self.training))
