"""The random split of a source into samples for training and samples held out for validation."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep
from dslc.runtime.process.random_numbers import generator

Split: TypeAlias = str  # validation, test, training, or one set of the validation split: "validation/clean"


def held_out(step: DataStep) -> tuple[Tensor, Tensor]:
    """Returns, for the `random` split, the samples for training and those for validation (int64, ascending).

    The held-out sets follow from the seed and the sizes alone, not from the epoch, the batch or the ranks.
    """
    train, held = parted(step.seed, step.train_samples, total(step))
    return train, held[: step.validation_samples].sort().values


def for_test(step: DataStep) -> Tensor:
    """Returns, for the `random` split, the samples of the test (int64, ascending)."""
    return parted(step.seed, step.train_samples, total(step))[1][step.validation_samples :].sort().values


def evaluated(step: DataStep) -> tuple[Split, ...]:
    """Returns the splits that are evaluated in a training: that for validation, or its sets."""
    if step.validation_sets:
        return tuple(f"validation/{name}" for name, _ in step.validation_sets)
    return ("validation",) if step.validation_samples else ()


def samples_of(step: DataStep, split: Split) -> int:
    """Returns the number of samples of a split that is evaluated."""
    return range_of(step, split)[1]


def range_of(step: DataStep, split: Split) -> tuple[int, int]:
    """Returns the first sample of a split among those opened for it, and their number."""
    if split in ("test", "training"):
        return 0, step.test_samples if split == "test" else step.train_samples
    first = 0
    for name, samples in step.validation_sets:
        if split == f"validation/{name}":
            return first, samples
        first += samples
    return 0, step.validation_samples


def total(step: DataStep) -> int:
    """Returns the number of samples of all splits."""
    return step.train_samples + step.validation_samples + step.test_samples


def sample_name(step: DataStep, split: Split, number: int) -> str:
    """Returns a sample of a split (train, validation, test) by its number there, and by that in the source."""
    split = "train" if split == "training" else split
    words = f"sample {number} of the {'training' if split == 'train' else split} data"
    if step.parts or step.stream is not None:
        return words
    inner = source_number(step, split, number)
    source = f"`dataset[{inner}]`" if step.source == "python" else f"number {inner} of `{step.source}`"
    return f"{words} ({source})"


def source_number(step: DataStep, split: Split, number: int) -> int:
    """Returns the number in its source of a sample of a split; splits that are given are sources of their own."""
    if step.split == "given":
        return number
    if step.split == "random":
        train, validation = held_out(step)
        chosen = train if split == "train" else for_test(step) if split == "test" else validation
        return int(chosen[number])
    first = {"train": 0, "validation": step.train_samples}.get(split, step.train_samples + step.validation_samples)
    return first + number


@lru_cache(maxsize=1)
def parted(seed: int, train: int, samples: int) -> tuple[Tensor, Tensor]:
    """Splits `samples` numbers: the `train` for training (ascending), and the held-out ones, validation first."""
    order = torch.randperm(samples, generator=generator(seed, "validation"))
    return order[samples - train :].sort().values, order[: samples - train]
