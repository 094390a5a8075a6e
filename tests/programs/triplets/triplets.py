"""A siamese network with the triplet loss: a sample is three vectors, and there is no target but the sample itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader


@dataclass
class Triplet:
    anchor: Tensor
    near: Tensor
    far: Tensor


class Triplets:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Triplet:
        random = torch.Generator().manual_seed(index)
        anchor = torch.randn(12, generator=random)
        near, far = anchor + 0.3 * torch.randn(12, generator=random), torch.randn(12, generator=random)
        return Triplet(anchor, near, far)


class Siamese(nn.Module):
    """Returns one loss for each triplet."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 8))

    def forward(self, batch: Triplet) -> Tensor:
        anchor, near, far = map(self.tower, (batch.anchor, batch.near, batch.far))
        return F.triplet_margin_loss(anchor, near, far, reduction="none")


def stacked(samples: list[Triplet]) -> Triplet:
    return Triplet(*(torch.stack([getattr(s, name) for s in samples]) for name in ("anchor", "near", "far")))


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Siamese()
    losses: list[float] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader: DataLoader[Triplet] = DataLoader(Triplets(), batch_size=8, collate_fn=stacked)  # type: ignore[arg-type]
    while len(losses) < steps:
        for batch in loader:
            loss = model(batch).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
