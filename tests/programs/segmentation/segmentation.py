"""A U-Net with the Dice loss of each picture."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def pictures() -> TensorDataset:
    """Discs in noise, and where they are."""
    random = torch.Generator().manual_seed(0)
    centre, radius = torch.rand(48, 2, 1, 1, generator=random) * 16, 2 + 3 * torch.rand(48, 1, 1, generator=random)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    masks = ((rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2 < radius**2).float()[:, None]
    return TensorDataset(masks + 0.5 * torch.randn(48, 1, 16, 16, generator=random), masks)


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down, self.middle = block(1, width), block(width, 2 * width)
        self.up, self.last = block(3 * width, width), nn.Conv2d(width, 1, 1)
        self.smaller, self.larger = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    def forward(self, pictures: Tensor) -> Tensor:
        fine = self.down(pictures)
        coarse = self.larger(self.middle(self.smaller(fine)))
        scores: Tensor = self.last(self.up(torch.cat([fine, coarse], 1)))
        return scores


def dice(scores: Tensor, masks: Tensor) -> Tensor:
    found, wanted = scores.sigmoid().flatten(1), masks.flatten(1)
    return 1 - (2 * (found * wanted).sum(1) + 1) / (found.sum(1) + wanted.sum(1) + 1)


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = UNet()
    losses: list[float] = []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    while len(losses) < steps:
        for inputs, masks in DataLoader(pictures(), batch_size=8):
            loss = dice(model(inputs), masks).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
