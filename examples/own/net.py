"""A network and a data set for dslc: it finds both as `python("net:network")` and `python("net:data")`."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def data() -> tuple[TensorDataset, TensorDataset]:
    """Two spirals: which one does a point belong to? A pair is (train, validation)."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(2000) % 2
    radius = torch.rand(2000, generator=generator)
    angle = 6.28 * radius + 3.14 * label + 0.1 * torch.randn(2000, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points[:1600], label[:1600]), TensorDataset(points[1600:], label[1600:])
