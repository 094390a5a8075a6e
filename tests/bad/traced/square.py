"""Pixels in as many rows and columns as there are classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def network() -> nn.Module:
    return nn.Conv2d(1, 6, 1)


def data() -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(1, 6, 6), torch.zeros(6, 6, dtype=torch.int64))] * 16
