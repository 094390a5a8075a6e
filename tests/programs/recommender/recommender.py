"""A recommender in the manner of DLRM: tables of categories, numbers, and the products of pairs of their vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SIZES = (40, 20, 10)
Sample = tuple[tuple[Tensor, Tensor], Tensor]


class Clicks(Dataset[Sample]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Sample:
        random = torch.Generator().manual_seed(index)
        numbers = torch.randn(4, generator=random)
        categories = torch.stack([torch.randint(size, (), generator=random) for size in SIZES])
        clicked = (numbers.sum() + categories[2] / 5 > 1).float()
        return (numbers, categories), clicked


class DLRM(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in SIZES)
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        pairs = (len(SIZES) + 1) * len(SIZES) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *(table(categories[:, n]) for n, table in enumerate(self.tables))], 1)
        products = vectors @ vectors.transpose(1, 2)
        row, column = torch.tril_indices(products.shape[1], products.shape[2], -1, device=products.device)
        return self.top(torch.cat([dense, products[:, row, column]], 1)).squeeze(1)


def clicked(score: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(score, target, reduction="none")


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model, losses = DLRM(), list[float]()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    while len(losses) < steps:
        for (numbers, categories), target in DataLoader(Clicks(), batch_size=16):
            loss = F.binary_cross_entropy_with_logits(model(numbers, categories), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
