"""The random split of a source into samples for training and samples held out for validation."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep
from dslc.runtime.data.random_streams import generator


def held_out(step: DataStep) -> tuple[Tensor, Tensor]:
    """Returns, for the `random` split, the samples for training and those held out (int64, ascending).

    The held-out set follows from the seed and the sizes alone, not from the epoch, the batch or the ranks.
    """
    return parted(step.seed, step.train_samples, step.train_samples + step.validation_samples)


@lru_cache(maxsize=1)
def parted(seed: int, train: int, total: int) -> tuple[Tensor, Tensor]:
    """Returns which of `total` samples are the `train` for training, and which are held out."""
    order = torch.randperm(total, generator=generator(seed, "validation"))
    return order[total - train :].sort().values, order[: total - train].sort().values
