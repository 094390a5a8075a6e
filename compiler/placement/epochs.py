"""Finds the global batches that suit an epoch, and the batches nearest to one that does not.

Model: a batch is split evenly over the data-parallel ranks, each share into equal micro-batches. The rest of an epoch
is dropped or kept; if kept it is a short batch. Every rank needs a sample of a short batch, and a pipeline needs
micro-batches of one shape. A training that ends before its first short batch never sees one.

An epoch of a mixture: the source that ends it gives all of its samples, once, and the others in proportion to their
weights. The source with the fewest samples for its weight is used up first, the source with the most last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal

from dslc.dsl.language.calls import Mixture
from dslc.dsl.record import Record, record

TRIED = 10_000  # multiples tried to either side
Fault = Literal["", "E0303", "E0304", "E0307"]


@record
class Epoch(Record):
    """`train` samples (None: not known) for `ranks` data-parallel ranks with `pieces` micro-batches each."""

    train: int | None
    ranks: int
    pieces: int
    staged: bool  # true if there is a pipeline
    keep: bool  # true if the rest is kept as a batch
    steps: int | None  # of the training, if the job gives them

    def short(self, batch: int) -> int:
        """Returns the samples of the short batch that the training reaches; 0 if there is none, or it is unknown."""
        if not self.keep or self.train is None:
            return 0
        full, rest = divmod(self.train, batch)
        return rest if self.steps is None or self.steps > full else 0

    def fault(self, batch: int) -> Fault:
        """Returns the rule that an evenly divisible batch breaks."""
        if self.train is None:
            return ""
        if batch > self.train and not self.keep:
            return "E0303"
        short = self.short(batch)
        if 0 < short < self.ranks:
            return "E0304"
        return "E0307" if short and self.staged else ""

    def nearest_batches(self, batch: int) -> tuple[int, ...]:
        """Returns the batches nearest to this one, below and above, that divide evenly and break no rule."""
        each = self.ranks * self.pieces
        most = max(batch, self.train) if self.train is not None else batch + TRIED * each
        first = batch // each * each
        below = range(first if first < batch else first - each, 0, -each)[:TRIED]
        above = range(first + each, most + 1, each)[:TRIED]
        found = (next((b for b in side if not self.fault(b)), None) for side in (below, above))
        return tuple(b for b in found if b is not None)


def near_divisors(share: int, count: int) -> Iterator[int]:
    """Yields divisors of `share`, the nearest to `count` (at most all of it) first, those within `TRIED`."""
    count = min(count, share)
    around = chain([count], chain.from_iterable((count - d, count + d) for d in range(1, TRIED)))
    return (m for m in around if 1 <= m <= share and share % m == 0)


def counts(mixture: Mixture, train: Sequence[int]) -> tuple[int, ...]:
    """Returns how many training samples of each source an epoch has; `train` has the samples of each source."""
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
