"""Draws samples by weights, as torch's `WeightedRandomSampler` does.

Model: up to `CATEGORIES` samples the entries are the entries that `torch.multinomial` draws with the same generator, in
float64. `torch.multinomial` takes no more samples; beyond, the same distribution is drawn in two other ways. With
replacement, each entry is the sample at which the sum of the weights first exceeds a uniform number. Without
replacement, the samples with the largest weight / e, with e exponential, are drawn in that order (Efraimidis and
Spirakis 2006). torch does the same.

Limits: a sum of float64 tells weights apart that are within 1e16 of one another.
"""

from __future__ import annotations

import torch
from torch import Tensor

CATEGORIES = 2**24  # that torch.multinomial (2.13) takes


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


def of_classes(targets: Tensor) -> Tensor:
    """Returns weights (float64) with which each class that occurs in `targets` (int64) is drawn as often."""
    _, places, counts = targets.unique(return_inverse=True, return_counts=True)
    weights: Tensor = counts.double().reciprocal()[places]
    return weights
