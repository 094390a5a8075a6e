"""A network and a loss that compute with tensors on the CPU, whatever device the others are on."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WEIGHTS = torch.ones(3)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.linspace(0, 1, 3)


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, WEIGHTS, reduction="none")
