"""SimCLR: two views of each image, told apart from all other images of the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Views(Dataset[tuple[Tensor, Tensor]]):
    """Two noisy views of a wave; the target is not used."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        wave = torch.sin(torch.arange(16.0) * (0.2 + index / 64))
        return wave + 0.1 * torch.randn(2, 16, generator=torch.Generator().manual_seed(index)), torch.tensor(index)


class SimCLR(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.projector = nn.Linear(width, 8)

    def forward(self, views: Tensor) -> Tensor:
        return F.normalize(self.projector(self.encoder(views)), dim=-1)


def nt_xent(output: Tensor, target: Tensor, temperature: float = 0.5) -> Tensor:
    """Returns the loss of each image among the whole batch."""
    z = output.transpose(0, 1).flatten(0, 1)
    n = len(output)
    scores = (z @ z.T / temperature).masked_fill(torch.eye(2 * n, dtype=torch.bool, device=z.device), -1e9)
    partner = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(scores, partner, reduction="none").view(2, n).mean(0)


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model, losses = SimCLR(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    while len(losses) < steps:
        for views, index in DataLoader(Views(), batch_size=16):
            loss = nt_xent(model(views), index).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
