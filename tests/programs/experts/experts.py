"""A mixture of experts whose router looks at its numbers: each expert is called with the points that chose it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES, EXPERTS = 16, 4, 4


def points() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, FEATURES, generator=random)
    return TensorDataset(inputs, inputs[:, :CLASSES].abs().argmax(1))


class Experts(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, CLASSES)) for _ in range(EXPERTS)
        )

    def forward(self, points: Tensor) -> Tensor:
        weights, chosen = self.router(points).softmax(-1).max(-1)
        scores = points.new_zeros(len(points), CLASSES)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                scores = scores.index_add(0, rows, weights[rows, None] * expert(points[rows]))
        return scores


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Experts()
    losses: list[float] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    while len(losses) < steps:
        for inputs, classes in DataLoader(points(), batch_size=4):
            loss = F.cross_entropy(model(inputs), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
