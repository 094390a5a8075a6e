"""Super-resolution: a sub-pixel convolution (ESPCN) that makes images twice as large."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Smooth waves of 16 x 16, and the same of 8 x 8."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        across, down, shift = torch.rand(3, generator=random)
        grid = torch.arange(16.0)
        large = torch.sin(across * grid[None] + down * grid[:, None] + 6 * shift)[None]
        return F.avg_pool2d(large, 2), large


class ESPCN(nn.Module):
    def __init__(self, factor: int = 2, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 5, padding=2)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.conv3 = nn.Conv2d(width, factor**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(factor)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv2(torch.tanh(self.conv1(x))))
        return self.shuffle(self.conv3(x))


def plain(steps: int) -> list[float]:
    torch.manual_seed(0)
    model, losses = ESPCN(), list[float]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    while len(losses) < steps:
        for small, large in DataLoader(Pairs(), batch_size=8):
            loss = F.mse_loss(model(small), large)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]
