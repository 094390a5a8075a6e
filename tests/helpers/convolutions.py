"""Networks of convolutions on images of eight by eight pixels, in the usual memory order."""

from __future__ import annotations

from torch import Tensor, nn


def strided() -> nn.Module:
    """Strides in place of pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def grouped() -> nn.Module:
    """Convolutions of groups and without strides."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=32),
        nn.Conv2d(32, 64, 1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def unstrided() -> nn.Module:
    """Pooling in place of strides."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


class Block(nn.Module):
    """Two convolutions beside their input. `activated`: as in torchvision, an activation follows the sum."""

    def __init__(self, activated: bool) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32))
        self.two = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32))
        self.activated = activated

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.two(self.one(x).relu())
        return y.relu() if self.activated else y


def _of_blocks(activated: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Sequential(*(Block(activated) for _ in range(4))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def activated() -> nn.Module:
    return _of_blocks(True)


def summed() -> nn.Module:
    return _of_blocks(False)
