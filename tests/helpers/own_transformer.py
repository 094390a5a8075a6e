"""A small transformer of a user's own, for tests of the axes: what a job calls `python("own_transformer:network", …)`.

`heads` fixed in a reshape, joined queries, keys and values, and a scale of the features that trains, are what a tensor
axis cannot cut.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class HeadNorm(nn.Module):
    """Norms each head by itself, with one weight for all of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, width: int, size: int, by_hand: bool, joined: bool) -> None:
        super().__init__()
        self.size, self.by_hand, self.joined = size, by_hand, joined
        if joined:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=n == 0) for n in range(3))
        self.norm = HeadNorm(size)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(x).chunk(3, dim=-1) if self.joined else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.reshape(batch, length, -1, self.size).transpose(1, 2) for part in parts)
        q, k = self.norm(q), self.norm(k)
        if self.by_hand:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = (q @ k.transpose(-2, -1) / self.size**0.5).masked_fill(~mask, float("-inf"))
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, width: int, size: int, by_hand: bool, joined: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.joined = Attention(width, size, by_hand, joined), joined
        if joined:
            self.both = nn.Linear(width, 96)
        else:
            self.up, self.gate = nn.Linear(width, 48), nn.Linear(width, 48)
        self.down = nn.Linear(48, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        gate, up = self.both(y).chunk(2, dim=-1) if self.joined else (self.gate(y), self.up(y))
        return x + self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    def __init__(
        self, width: int, heads: int, blocks: int, tie: bool, by_hand: bool, vocab: int, joined: bool, dropout: float
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.table = nn.Embedding(vocab, width)
        self.places = nn.Parameter(torch.randn(16, width))
        self.blocks = nn.ModuleList(Block(width, width // heads, by_hand, joined) for _ in range(blocks))
        self.head = nn.Linear(width, vocab, bias=False)
        if tie:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = F.dropout(block(x), self.dropout, self.training)
        return self.head(x)


class Flat(nn.Module):
    """Has no blocks: between its layers are shares, outputs of rows, and whole tensors beside these."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.table, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.gate, self.up, self.down = nn.Linear(width, 48), nn.Linear(width, 48), nn.Linear(48, width)
        self.split, self.norm = HeadNorm(size), nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.table(tokens)
        gate = self.split(self.gate(x).view(batch, length, -1, self.size))
        y = self.down((F.silu(gate) * self.up(x).view(gate.shape)).flatten(2))
        return self.head(x + self.norm(y))


def flat(width: int = 32, size: int = 8) -> nn.Module:
    return Flat(width, size)


def network(
    width: int = 32,
    heads: int = 4,
    blocks: int = 2,
    tie: bool = True,
    by_hand: bool = False,
    vocab: int = 256,
    joined: bool = False,
    dropout: float = 0.0,
) -> nn.Module:
    return Transformer(width, heads, blocks, tie, by_hand, vocab, joined, dropout)


def plain() -> nn.Module:
    """Torch's own layers. It must only be built on the meta device."""
    made = torch.empty(0)
    assert made.is_meta or type(made) is not Tensor, "the network is made whole"
    return nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 32), nn.Linear(32, 256))
