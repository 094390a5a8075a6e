"""Validation sets by name."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset


def sets() -> tuple[TensorDataset, dict[str, TensorDataset]]:
    train, clean, noisy = (TensorDataset(torch.ones(n, 4), torch.zeros(n, dtype=torch.int64)) for n in (32, 8, 16))
    return train, {"clean": clean, "noisy": noisy}


def triple() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    train, validation, test = (TensorDataset(torch.ones(n, 4), torch.zeros(n, dtype=torch.int64)) for n in (32, 8, 8))
    return train, validation, test
