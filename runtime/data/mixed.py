"""Mixtures: the order of the samples of several sources, and the samples themselves.

Model: an epoch has `counts[n]` samples of source `n`. Each source has its own order, pass after pass, and goes on in an
epoch where the one before stopped: sample `m` of source `n` in epoch `e` is entry `(e * counts[n] + m) % samples` of
pass `(e * counts[n] + m) // samples`. The sources are shuffled together or, without `shuffle`, alternate as evenly as
their counts allow. Samples are numbered source by source.

Contract: an order follows from the seed and the epoch alone, as any.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep
from dslc.runtime.data.random_streams import generator
from dslc.runtime.data.samples import Checked, FetchedSamples, Joined, Pair, Part, Samples, SourceError, Splits, items


def order(step: DataStep, epoch: int, own: Callable[[DataStep, int], Tensor]) -> Tensor:
    """Returns the order of an epoch of a mixture, int64; `own(part, pass)` is that of a source."""
    made = torch.empty(sum(step.counts), dtype=torch.int64)
    sources = _sources(step, epoch)
    first = 0
    for n, (part, count) in enumerate(zip(step.parts, step.counts, strict=True)):
        made[sources == n] = first + _taken(part, epoch * count, count, own)
        first += part.train_samples
    return made


def _taken(part: DataStep, start: int, count: int, own: Callable[[DataStep, int], Tensor]) -> Tensor:
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
    join = Structures if structured else _joined
    test = [part.test for part in parts if part.test is not None]
    return Splits(
        join([part.train for part in parts]),
        join([part.validation for part in parts]),
        test=join(test) if test else None,
    )


def _joined(parts: list[Samples]) -> Samples:
    by_process = any(part.by_process for part in parts)
    return Joined([len(part) for part in parts], parts.__getitem__, keep=None, by_process=by_process)


class Structures:
    """Samples of several data sets of a user's, which one function puts together to a batch."""

    by_process, apart = True, True

    def __init__(self, parts: list[Samples]) -> None:
        self._parts = parts
        self._starts = torch.tensor([0, *map(len, parts)]).cumsum(0)
        self._maker = _maker(parts[0])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def items(self, indices: Tensor, epoch: int = 0) -> list[object]:
        """Returns these samples as the data sets give them."""
        found: list[object] = []
        for index, part in zip(indices, torch.searchsorted(self._starts, indices, right=True) - 1, strict=True):
            found += items(self._parts[part], (index - self._starts[part]).view(1), epoch)
        return found

    def batch(self, indices: Tensor, epoch: int = 0) -> Pair:
        return self._maker.collated(self.items(indices, epoch))


def _maker(samples: Samples) -> FetchedSamples:
    while isinstance(samples, Part | Checked):
        samples = samples.samples
    if not isinstance(samples, FetchedSamples):
        raise SourceError("only data sets of a user's own give samples that are structures")
    return samples
