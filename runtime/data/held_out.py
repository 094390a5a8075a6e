"""The random split of a source into samples for training and samples held out for validation."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep
from dslc.runtime.data.random_streams import generator

Split: TypeAlias = Literal["validation", "test"]


def held_out(step: DataStep) -> tuple[Tensor, Tensor]:
    """Returns, for the `random` split, the samples for training and those for validation (int64, ascending).

    The held-out sets follow from the seed and the sizes alone, not from the epoch, the batch or the ranks.
    """
    train, held = parted(step.seed, step.train_samples, total(step))
    return train, held[: step.validation_samples].sort().values


def for_test(step: DataStep) -> Tensor:
    """Returns, for the `random` split, the samples of the test (int64, ascending)."""
    return parted(step.seed, step.train_samples, total(step))[1][step.validation_samples :].sort().values


def samples_of(step: DataStep, split: Split) -> int:
    """Returns the number of samples of a split that is evaluated."""
    return step.validation_samples if split == "validation" else step.test_samples


def total(step: DataStep) -> int:
    """Returns the number of samples of all splits."""
    return step.train_samples + step.validation_samples + step.test_samples


@lru_cache(maxsize=1)
def parted(seed: int, train: int, samples: int) -> tuple[Tensor, Tensor]:
    """Returns which of `samples` samples are the `train` for training (ascending), and which are held out, those for
    validation first.
    """
    order = torch.randperm(samples, generator=generator(seed, "validation"))
    return order[samples - train :].sort().values, order[: samples - train]
