"""The samples that an epoch takes of each source of a mixture.

Model: the source that ends an epoch gives all of its samples, once, and the others in proportion to their weights. The
first to be used up is the one with the fewest samples for its weight; the last, the one with the most.
"""

from __future__ import annotations

from collections.abc import Sequence

from dslc.dsl.language.calls import Mixture


def counts(mixture: Mixture, train: Sequence[int]) -> tuple[int, ...]:
    """Returns how many training samples of each source an epoch has; `train` are those that there are."""
    weights = mixture.weights or tuple(map(float, train))
    if mixture.samples is not None:
        return _shared_out(mixture.samples, weights)
    ends = max if mixture.stopping_strategy == "all_exhausted" else min
    last = ends(range(len(train)), key=lambda n: train[n] / weights[n])
    return tuple(round(train[last] * weight / weights[last]) for weight in weights)


def _shared_out(samples: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Shares out by largest remainders."""
    exact = [samples * weight / sum(weights) for weight in weights]
    found = [int(each) for each in exact]
    most = sorted(range(len(exact)), key=lambda n: found[n] - exact[n])
    for n in most[: samples - sum(found)]:
        found[n] += 1
    return tuple(found)
