"""Mixtures: the order of the samples of several sources, and the samples themselves.

Model: an epoch has `counts[n]` samples of source `n`. Each source has its own order, pass after pass, and goes on in an
epoch where the epoch before stopped. Let `i = e * counts[n] + m`: sample `m` of source `n` in epoch `e` is entry `i %
samples` of pass `i // samples`. The sources are shuffled together or, without `shuffle`, alternate as evenly as their
counts allow. Samples are numbered source by source.

Contract: an order follows from the seed and the epoch alone, as any.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep
from dslc.runtime.data.random_streams import generator
from dslc.runtime.data.samples import Splits, concatenate_samples


def order(step: DataStep, epoch: int, own: Callable[[DataStep, int], Tensor]) -> Tensor:
    """Returns the order of an epoch of a mixture, int64; `own(part, pass)` is the order of a source."""
    made = torch.empty(sum(step.counts), dtype=torch.int64)
    sources = _sources(step, epoch)
    first = 0
    for n, (part, count) in enumerate(zip(step.parts, step.counts, strict=True)):
        made[sources == n] = first + _source_samples(part, epoch * count, count, own)
        first += part.train_samples
    return made


def _source_samples(part: DataStep, start: int, count: int, own: Callable[[DataStep, int], Tensor]) -> Tensor:
    """Returns the `count` samples of a source from entry `start` on, over its passes."""
    found = []
    while count:
        number, at = divmod(start, part.train_samples)
        size = min(count, part.train_samples - at)
        found.append(own(part, number)[at : at + size])
        start, count = start + size, count - size
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def _sources(step: DataStep, epoch: int) -> Tensor:
    """Returns the source of each entry of an epoch."""
    counts = torch.tensor(step.counts)
    numbers = torch.arange(len(counts)).repeat_interleave(counts)
    if step.shuffle:
        return numbers[torch.randperm(len(numbers), generator=generator(step.seed, f"mixture {epoch}"))]
    # Entry m of n is due at (m + 1/2) / n of the epoch.
    due = torch.cat([(torch.arange(count) + 0.5) / count for count in step.counts])
    return numbers[due.argsort(stable=True)]


def samples(parts: list[Splits], structured: bool) -> Splits:
    """Returns the samples of all sources, one source after another."""
    test = [part.test for part in parts if part.test is not None]
    return Splits(
        concatenate_samples([part.train for part in parts], structured),
        concatenate_samples([part.validation for part in parts], structured),
        test=concatenate_samples(test, structured) if test else None,
        plain_train=concatenate_samples([part.samples_of_split("training") for part in parts], structured),
    )
