"""Transforms of pictures that a job cannot use, or not as it is meant."""

from __future__ import annotations

import torch
from torchvision.transforms import v2

small = v2.Compose([v2.RandomResizedCrop(20), v2.RandomHorizontalFlip()])
normalizing = v2.Compose(
    [
        v2.RandomCrop(28, padding=2),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize((0.1307,), (0.3081,)),
    ]
)


def failing(picture: object) -> object:
    return picture / 255  # type: ignore[operator]
