"""A vision transformer from scratch: patches by unfold, a class token, learned positions, attention by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset

SIZE, PATCH, CLASSES = 16, 4, 4

Sample = tuple[Tensor, int]


class Gratings(Dataset[Sample]):
    """Waves along one of four directions, in noise."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Sample:
        random = torch.Generator().manual_seed(index)
        kind = index % CLASSES
        rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        along = (rows, columns, rows + columns, rows - columns)[kind]
        noise = torch.randn(3, SIZE, SIZE, generator=random)
        return torch.sin(along * 0.8 + 6 * torch.rand(1, generator=random)) + 0.5 * noise, kind


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-2, -1) * self.scale).softmax(dim=-1)
        mixed: Tensor = self.proj((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return mixed


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class ViT(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(3 * PATCH**2, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + (SIZE // PATCH) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(F.unfold(images, PATCH, stride=PATCH).transpose(1, 2))
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x)[:, 0])
        return scores


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model, losses = ViT(), list[float]()
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, steps)
    while len(losses) < steps:
        for images, kinds in DataLoader(Gratings(), batch_size=8):
            loss = F.cross_entropy(model(images), kinds, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            if len(losses) == steps:
                break
    return losses
