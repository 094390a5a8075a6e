"""Chooses the samples of a rank: the order of an epoch, its global batches, their shares and micro-batches.

Model: epoch `e` visits the training samples 0 … train_samples - 1 in the order `permutation(step, e)`, which a sampler
may draw or sort (orders.py). Its global batch `k` is the entries `k * batch` to `(k +
1) * batch` of that order. A data rank takes a contiguous share of the batch, and the share is cut into micro-batches,
both by compiler/placement/shares.py. Some samples can only be read a block at a time (row groups of Parquet files).
They are shuffled by blocks, and then within each `window` of consecutive blocks. So a block is read once an epoch, and
few are held.

Contract: everything is a pure function of (seed, epoch, k) and the rank's place. It is the same on any machine, in any
process and from any first step. The ranks' shares of a global batch are disjoint and their union is the batch, whatever
the number of ranks and micro-batches.

Limits: an order takes 8 bytes a sample, held for the last two epochs asked for.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep, RankPlace, SamplerStep
from dslc.compiler.placement.shares import deal, largest, piece, pieces
from dslc.runtime.data.orders import draw, grouped, order_of_mixture
from dslc.runtime.data.sample_keys import SampleKeys, numbers_of
from dslc.runtime.data.splits import Split, parted, range_of, total
from dslc.runtime.process.random_numbers import generator


def permutation(step: DataStep, epoch: int) -> Tensor:
    """Returns the order in which `epoch` (from 0) visits the training samples: int64, shape (visited,).

    It is shared between callers and must not be written to. If the job has a sampler, `prepare` must come first.
    """
    if step.parts:
        return _order_of_mixture(step, epoch)
    if step.sampler is not None:
        return _order_of_sampler(numbers_of(step), step.sampler, step.seed, step.batch, epoch)
    if step.shuffle and step.arguments.get("blocks"):
        return _order_of_blocks(step.seed, epoch, _bounds_of(step), step.arguments["window"])
    return _order(step.seed, step.train_samples, epoch if step.shuffle else None)


def _order_of_mixture(step: DataStep, epoch: int) -> Tensor:
    for known, number, order in _MIXED:
        if known is step and number == epoch:
            return order
    _MIXED.append((step, epoch, order_of_mixture(step, epoch, permutation)))
    return _MIXED[-1][2]


_MIXED: deque[tuple[DataStep, int, Tensor]] = deque(maxlen=2)  # the last two orders that were asked for


def _order_of_sampler(numbers: SampleKeys, sampler: SamplerStep, seed: int, batch: int, epoch: int) -> Tensor:
    if sampler.kind == "by_length":
        return _order_by_length(numbers, batch, sampler.window, seed, epoch)
    return _order_drawn(numbers, sampler.samples, sampler.replacement, seed, epoch)


@lru_cache(maxsize=2)
def _order_by_length(numbers: SampleKeys, batch: int, window: int, seed: int, epoch: int) -> Tensor:
    return grouped(numbers.values, batch, window, generator(seed, f"epoch {epoch}"))


@lru_cache(maxsize=2)
def _order_drawn(numbers: SampleKeys, samples: int, replacement: bool, seed: int, epoch: int) -> Tensor:
    return draw(numbers.values, samples, replacement, generator(seed, f"epoch {epoch}"))


def _bounds_of(step: DataStep) -> tuple[int, ...]:
    """Returns the bounds of the blocks among the training samples; a block without training samples is empty."""
    samples = total(step) if step.split == "random" else step.train_samples
    return _bounds(step.arguments["blocks"], step.seed, step.train_samples, samples)


@lru_cache(maxsize=2)
def _bounds(blocks: tuple[int, ...], seed: int, train: int, samples: int) -> tuple[int, ...]:
    ends = torch.tensor([0, *blocks], dtype=torch.int64).cumsum(0)
    if samples > train:
        ends = torch.searchsorted(parted(seed, train, samples)[0], ends)
    return tuple(ends.clamp(max=train).tolist())


@lru_cache(maxsize=2)
def _order_of_blocks(seed: int, epoch: int, bounds: tuple[int, ...], window: int) -> Tensor:
    random = generator(seed, f"epoch {epoch}")
    made = []
    for chosen in torch.randperm(len(bounds) - 1, generator=random).split(window):
        rows = torch.cat([torch.arange(bounds[n], bounds[n + 1]) for n in chosen.tolist()])
        made.append(rows[torch.randperm(len(rows), generator=random)])
    return torch.cat(made)


@lru_cache(maxsize=2)
def _order(seed: int, samples: int, epoch: int | None) -> Tensor:
    if epoch is None:
        return torch.arange(samples)
    return torch.randperm(samples, generator=generator(seed, f"epoch {epoch}"))


def steps_per_epoch(step: DataStep) -> int:
    """Returns the number of global batches of an epoch, including the partial one if it is kept."""
    return step.visited // step.batch + (1 if step.last else 0)


def batch_samples(step: DataStep, k: int) -> int:
    """Returns the number of samples in global batch `k` (from 0) of an epoch."""
    return step.batch if k < step.visited // step.batch else step.last


def share_of(step: DataStep, place: RankPlace, samples: int) -> tuple[int, int]:
    """Returns this rank's share [start, stop) of `samples`: of a global batch, or of a split."""
    if not step.shares or place.data_ranks == 1:
        return piece(samples, place.data_ranks, place.data_rank)
    sizes = _sizes(step, samples)
    start = sum(sizes[: place.data_rank])
    return start, start + sizes[place.data_rank]


def _sizes(step: DataStep, samples: int) -> tuple[int, ...]:
    """Returns the share of each data rank; () if they are equal."""
    return step.shares if samples == step.batch or not step.shares else deal(samples, step.shares)


def largest_share(step: DataStep, place: RankPlace, samples: int) -> int:
    """Returns the most of `samples` that a data rank has."""
    return max(_sizes(step, samples), default=largest(samples, place.data_ranks))


def sizes_of(step: DataStep, place: RankPlace, microbatches: int, k: int) -> tuple[int, int, list[int]]:
    """Returns this rank's share of global batch `k` as entries [start, stop) of the batch, and its micro-batches'
    sizes.

    All ranks have the same number of micro-batches in a step, and none is empty as long as every rank has a sample: the
    partial last batch of an epoch has min(microbatches, the smallest share) of them.
    """
    samples = batch_samples(step, k)
    start, stop = share_of(step, place, samples)
    smallest = min(_sizes(step, samples), default=samples // place.data_ranks)
    cut = pieces(stop - start, max(1, min(microbatches, smallest)))
    return start, stop, [b - a for a, b in cut]


def shares(step: DataStep, place: RankPlace, epoch: int, k: int, count: int = 1) -> Tensor:
    """Returns the samples (int64) of this rank's shares of `count` global batches of `epoch` from `k` on, in order.

    All global batches must be full, or `count` 1.
    """
    size, first = batch_samples(step, k), k * step.batch
    start, stop = share_of(step, place, size)
    if count == 1:
        return _entries(step, epoch, first + start, first + stop)
    return _entries(step, epoch, first, first + count * size).view(count, size)[:, start:stop].reshape(-1)


def _entries(step: DataStep, epoch: int, start: int, stop: int) -> Tensor:
    if step.stream is not None:  # it is in order already, and may have no end
        return torch.arange(start, stop)
    return permutation(step, epoch)[start:stop]


def micro_batches(step: DataStep, place: RankPlace, microbatches: int, epoch: int, k: int) -> tuple[Tensor, ...]:
    """Returns the indices (int64, into the training samples) of this rank's micro-batches of global batch `k`."""
    share, (_, _, sizes) = shares(step, place, epoch, k), sizes_of(step, place, microbatches, k)
    return (share,) if len(sizes) == 1 else share.split(sizes)


class RankOrder:
    """The micro-batches of one rank, step after step, as `micro_batches` gives them. `current_epoch` and `samples`, of
    the global batch, belong to the last step asked for.
    """

    def __init__(self, step: DataStep, place: RankPlace, microbatches: int) -> None:
        self._step, self._place, self._microbatches = step, place, microbatches
        self._per_epoch, self._full = steps_per_epoch(step), step.visited // step.batch
        self._cuts: dict[int, tuple[int, int, list[int]]] = {}  # by the samples of a global batch
        self._order: Tensor | None = None  # of the epoch
        self.current_epoch, self.samples = -1, 0

    def micro_batches(self, number: int) -> tuple[Tensor, ...]:
        """Returns the indices of the micro-batches of step `number` of the training."""
        step = self._step
        epoch, k = divmod(number, self._per_epoch)
        if epoch != self.current_epoch:
            self.current_epoch, self._order = epoch, None if step.stream is not None else permutation(step, epoch)
        self.samples = step.batch if k < self._full else step.last
        cut = self._cuts.get(self.samples)
        if cut is None:
            cut = self._cuts[self.samples] = sizes_of(step, self._place, self._microbatches, k)
        start, stop, sizes = k * step.batch + cut[0], k * step.batch + cut[1], cut[2]
        share = torch.arange(start, stop) if self._order is None else self._order[start:stop]
        return (share,) if len(sizes) == 1 else share.split(sizes)


def split_indices(step: DataStep, split: Split, place: RankPlace) -> Tensor:
    """Returns this rank's contiguous share of the samples of a split (int64), which may be empty."""
    first, samples = range_of(step, split)
    start, stop = share_of(step, place, samples)
    return torch.arange(first + start, first + stop)
