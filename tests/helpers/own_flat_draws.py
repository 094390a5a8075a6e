"""A network of a user's without blocks, which draws in its own code and in its layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(64, 32), nn.Linear(32, 24), nn.Linear(24, 10)
        self.drop, self.late = nn.Dropout(0.2), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x.flatten(1), 0.1, self.training)
        x = self.drop(F.relu(self.enter(x)))
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        x = F.dropout(F.relu(self.middle(x)), 0.2, self.training)
        return self.leave(self.late(F.dropout(x, 0.1, self.training)))
