"""Small language models of a user's own whose attention is torch's, for tests of the context axis: what a job calls
`python("own_attention:Model", …)`.

`kind` chooses a fault that the context axis has to find.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal attention whose keys and values have half as many heads as the queries."""

    def __init__(self, width: int, heads: int, kind: str) -> None:
        super().__init__()
        self.heads, self.kind, self.size = heads, kind, width // heads
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.kv = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, self.heads // 2, self.size).permute(2, 0, 3, 1, 4)
        if self.kind == "by hand":
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            scores = (q @ k.transpose(-2, -1)).softmax(-1)
            y = scores @ v
        elif self.kind == "mask":
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.kind != "full", scale=0.3, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kind: str) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, kind)
        self.up, self.down = nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    """Takes positions, and counts them from 0 where it is given none."""

    def __init__(self, width: int = 32, heads: int = 4, blocks: int = 2, vocab: int = 256, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.table, self.places = nn.Embedding(vocab, width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(Block(width, heads, kind) for _ in range(blocks)))
        self.mixer = nn.Conv1d(width, width, 3, padding=1) if kind == "convolution" else nn.Identity()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None] + (1 if self.kind == "from 1" else 0)
        h = self.table(x) + self.places(position_ids)
        if self.kind == "convolution":
            h = self.mixer(h.transpose(1, 2)).transpose(1, 2)
        h = self.blocks(h)
        if self.kind == "mean":
            h = h - h.mean(1, keepdim=True)
        if self.kind == "length":
            h = h / x.shape[1]
        out: Tensor = self.head(self.norm(h))
        return out


class Counting(Model):
    """Counts its positions itself."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        h = self.table(x) + self.places(torch.arange(x.shape[1], device=x.device))
        out: Tensor = self.head(self.norm(self.blocks(h)))
        return out


class Encoder(nn.Module):
    """Layers of torch's own, without positions."""

    def __init__(self, width: int = 32, vocab: int = 256) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, 48, 0.0, batch_first=True) for _ in range(2))
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.table(x)))
        return out
