"""Networks whose scores no head can turn into losses in chunks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS, CLASSES = 5, 6


def scaled() -> nn.Module:
    network = nn.Sequential(nn.Flatten(), nn.Linear(ROWS * CLASSES, CLASSES))
    network[1].register_forward_hook(lambda module, inputs, scores: 20 * scores)
    return network


def classes_first() -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Linear(ROWS, ROWS))


def samples() -> list[tuple[Tensor, int]]:
    return [(torch.zeros(CLASSES, ROWS), 0)] * 16


def rows() -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(CLASSES, ROWS), torch.zeros(ROWS, dtype=torch.int64))] * 16
