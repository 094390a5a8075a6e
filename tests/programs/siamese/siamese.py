"""A siamese network: one tower for both images of a pair, and a head that tells whether they are of one kind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Sample = tuple[tuple[Tensor, Tensor], Tensor]


def drawn(kind: int, seed: int) -> Tensor:
    noise = 0.3 * torch.randn(1, 12, 12, generator=torch.Generator().manual_seed(seed))
    return noise + torch.sin(torch.arange(12.0) * (1 + kind) / 2)


class Pairs(Dataset[Sample]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Sample:
        same = index % 2
        kind = index // 2 % 4
        other = kind if same else (kind + 1 + index % 3) % 4
        return (drawn(kind, index), drawn(other, 1000 + index)), torch.tensor(float(same))


class Siamese(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(1, width, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, width, 3), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Linear(2 * 9 * width, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.head(torch.cat([self.tower(first), self.tower(second)], 1)).squeeze(1)


def same(likely: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy(likely, target, reduction="none")


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model, losses = Siamese(), list[float]()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    while len(losses) < steps:
        for (first, second), target in DataLoader(Pairs(), batch_size=8):
            loss = F.binary_cross_entropy(model(first, second), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
