"""Networks that a tensor axis cannot cut as the jobs beside this file ask for."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, joined: bool, fixed: str) -> None:
        super().__init__()
        self.joined, self.fixed = joined, fixed
        if joined:
            self.qkv = nn.Linear(32, 96)
        else:
            self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.scale = nn.Parameter(nn.init.ones_(Tensor(8)))
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.joined else (self.q(x), self.k(x), self.v(x))
        shape = {"heads": (4, 8), "number": (4, -1), "": (-1, 8)}[self.fixed]
        q, k, v = (part.view(*x.shape[:2], *shape).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q * self.scale if self.fixed == "" else q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class Net(nn.Module):
    def __init__(self, joined: bool, fixed: str) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 32)
        self.attention = Attention(joined, fixed)
        self.norm = nn.LayerNorm(32)
        self.up, self.between, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 256, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.attention(self.norm(x))
        return self.head(x + self.down(self.between(self.up(x)).relu()))


def network(joined: bool = False, fixed: str = "") -> nn.Module:
    return Net(joined, fixed)
