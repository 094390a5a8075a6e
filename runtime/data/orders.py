"""The orders in which an epoch visits samples: by similar length, by weights, and of a mixture of sources.

By length: the samples are shuffled, every `window` batches of them are sorted by length and cut into batches, and the
batches of an epoch are shuffled. Within a batch the first half has every other sample by length, the first quarter
every fourth. So ranks, which take contiguous shares, have about as much to do. The partial last batch has any samples.

By weights: as torch's `WeightedRandomSampler`. Up to `CATEGORIES` samples `torch.multinomial` draws the entries, in
float64; it takes no more. Beyond, with replacement, each entry is the sample at which the sum of the weights first
exceeds a uniform number. Without replacement, the entries are the samples with the largest weight / e, with e
exponential (Efraimidis and Spirakis 2006), as in torch.

Mixtures: an epoch has `counts[n]` samples of source `n`. Each source has its own order, pass after pass, and goes on in
an epoch where the epoch before stopped. Let `i = e * counts[n] + m`: sample `m` of source `n` in epoch `e` is entry `i
% samples` of pass `i // samples`. The sources are shuffled or, without `shuffle`, alternate as evenly as their counts
allow. Samples are numbered source by source.

Limits: a sum of float64 tells weights apart that are within 1e16 of one another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep
from dslc.runtime.process.random_numbers import generator

CATEGORIES = 2**24  # that torch.multinomial (2.13) takes


def grouped(lengths: Tensor, batch: int, window: int, random: torch.Generator) -> Tensor:
    """Returns a permutation of the samples, int64. `lengths` has shape (samples,)."""
    order = torch.randperm(len(lengths), generator=random)
    full = len(lengths) // batch
    batches = []
    for part in order[: full * batch].split(window * batch):
        by_length = part[lengths[part].argsort(descending=True, stable=True)]
        batches.append(by_length.view(-1, batch))
    if not batches:
        return order
    whole = torch.cat(batches)[torch.randperm(full, generator=random)][:, _spread(batch)]
    return torch.cat([whole.reshape(-1), order[full * batch :]])


def _spread(count: int) -> Tensor:
    """Returns the numbers below `count` by their bits read backwards: any beginning of it is spread evenly."""
    width = max(1, (count - 1).bit_length())
    keys = [int(f"{n:0{width}b}"[::-1], 2) for n in range(count)]
    return torch.tensor(keys).argsort()


def draw(weights: Tensor, samples: int, replacement: bool, random: torch.Generator, most: int = CATEGORIES) -> Tensor:
    """Returns `samples` indices of `weights` (float64, shape (n,), not negative): int64, shape (samples,).

    Without replacement at least `samples` weights must be above 0.
    """
    if len(weights) <= most:
        return torch.multinomial(weights, samples, replacement, generator=random)
    if replacement:
        sums = weights.cumsum(0)
        last = int(weights.nonzero()[-1])  # for a product that rounds to the whole sum
        drawn = torch.rand(samples, dtype=torch.float64, generator=random) * sums[-1]
        return torch.searchsorted(sums, drawn, right=True).clamp(max=last)
    keys = weights / torch.empty_like(weights).exponential_(generator=random)
    return keys.topk(samples).indices


def order_of_mixture(step: DataStep, epoch: int, own: Callable[[DataStep, int], Tensor]) -> Tensor:
    """Returns the order of an epoch of a mixture, int64; `own(part, pass)` is the order of a source."""
    order = torch.empty(sum(step.counts), dtype=torch.int64)
    sources = _sources(step, epoch)
    first = 0
    for n, (part, count) in enumerate(zip(step.parts, step.counts, strict=True)):
        order[sources == n] = first + _source_samples(part, epoch * count, count, own)
        first += part.train_samples
    return order


def _source_samples(part: DataStep, start: int, count: int, own: Callable[[DataStep, int], Tensor]) -> Tensor:
    """Returns the `count` samples of a source from entry `start` on, over its passes."""
    samples = [torch.empty(0, dtype=torch.int64)]
    while count:
        number, at = divmod(start, part.train_samples)
        size = min(count, part.train_samples - at)
        samples.append(own(part, number)[at : at + size])
        start, count = start + size, count - size
    return torch.cat(samples)


def _sources(step: DataStep, epoch: int) -> Tensor:
    """Returns the source of each entry of an epoch."""
    counts = torch.tensor(step.counts)
    numbers = torch.arange(len(counts)).repeat_interleave(counts)
    if step.shuffle:
        return numbers[torch.randperm(len(numbers), generator=generator(step.seed, f"mixture {epoch}"))]
    # Entry m of n is due at (m + 1/2) / n of the epoch.
    due = torch.cat([(torch.arange(count) + 0.5) / count for count in step.counts])
    return numbers[due.argsort(stable=True)]
