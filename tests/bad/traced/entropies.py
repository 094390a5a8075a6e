"""Data sets that are not the same each time they are made."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset, random_split

COUNT = 1000


def unseeded() -> TensorDataset:
    random = np.random.default_rng()
    inputs = random.normal(size=(COUNT, 4)).astype("float32")
    return TensorDataset(torch.from_numpy(inputs), torch.arange(COUNT) % 4)


def by_clock() -> TensorDataset:
    made = torch.Generator().manual_seed(time.time_ns())
    return TensorDataset(torch.randn(COUNT, 4, generator=made), torch.arange(COUNT) % 4)


def by_set() -> list[tuple[torch.Tensor, int]]:
    names = list({f"file-{n}" for n in range(COUNT)})
    return [(torch.full((4,), float(name[5:])), int(name[5:]) % 4) for name in names]


def by_folder() -> list[tuple[torch.Tensor, int]]:
    names = [name for name in os.listdir(os.path.dirname(__file__)) if name.endswith((".py", ".plt"))]
    return [(torch.full((4,), float(sum(name.encode()))), n % 4) for n, name in enumerate(names)]


def seeded() -> TensorDataset:
    """As it should be: from a generator with a seed, and from torch's own, which is seeded before."""
    random = np.random.default_rng(0)
    inputs = torch.from_numpy(random.normal(size=(COUNT, 4)).astype("float32")) + torch.randn(COUNT, 4)
    return TensorDataset(inputs, torch.arange(COUNT) % 4)


def unseeded_in_part() -> TensorDataset:
    """One sample in thirty has noise, as where some are augmented beforehand."""
    inputs = torch.ones(COUNT, 4)
    inputs[30::30] += torch.from_numpy(np.random.default_rng().normal(size=4).astype("float32"))
    return TensorDataset(inputs, torch.arange(COUNT) % 4)


def unseeded_in_a_list() -> list[Any]:
    """As `random_split` gives a part for training and one for validation."""
    return random_split(unseeded(), [COUNT - 100, 100], generator=torch.Generator().manual_seed(0))
