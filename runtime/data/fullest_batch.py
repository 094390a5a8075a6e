"""Finds the micro-batch of a training with the most numbers, before its first step.

Model: the size of a sample is its length in the file of `by_length`, else the count of its numbers. Up to `READING`
seconds are spent on reading samples, in a random order, so that the samples of a bounded reading are a fair draw. As
batches are a pure function of the seed, the sampler gives the samples of every micro-batch of every step. A batch is as
large as its largest sample times its samples, where `collate` pads; or as the sum of its samples, where `collate` joins
them. The fullest batch of either kind is made by `collate`, and the one with more numbers counts. Where fewer samples
than it has could be read in time, it is not made: it then counts as padded to its largest known sample.

Limits: orders of epochs are followed for `ORDERING` seconds. Samples that a data set draws anew in each epoch have the
size of their first epoch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep
from dslc.compiler.trace.structures import Structure, count_numbers, tensors
from dslc.runtime.data.rank_orders import place_of
from dslc.runtime.data.sample_keys import numbers_of, prepare
from dslc.runtime.data.sampler import batch_samples, micro_batches, permutation, sizes_of, steps_per_epoch
from dslc.runtime.data.samples import Samples, items
from dslc.runtime.data.splits import source_number
from dslc.runtime.process.random_numbers import generator, preserve_generators

READING = 10.0  # seconds in which samples are read, at most
ORDERING = 5.0  # seconds in which the orders of epochs are followed, at most
CHUNK = 64  # samples asked for at once; a user's are read one by one
_PADDED = 0.75  # of the numbers of the largest sample: a batch with at least these for each sample is padded


@dataclass(frozen=True, kw_only=True)
class FullestBatch:
    """The micro-batch with the most numbers. `numbers` counts its input for each sample, as `collate` makes it.

    Copies of the sample `example` make about such a batch; `source_number` is its number in the source.
    """

    step: int  # from 0
    epoch: int  # from 0
    data_rank: int
    samples: int
    numbers: float
    example: int
    source_number: int
    read: int  # samples whose size is known
    steps: int  # whose batches were looked at
    exact: bool  # False if the training may never make this batch: too few samples could be read to know its order


@dataclass(frozen=True)
class _MicroBatch:
    """A micro-batch by its place, and its size by two measures."""

    size: float
    step: int
    epoch: int
    data_rank: int
    indices: Tensor


@preserve_generators()  # samples of a user's code are made
def find_fullest(step: DataStep, samples: Samples, data_ranks: int, microbatches: int, steps: int) -> FullestBatch:
    """Returns the fullest micro-batch of a training of `steps` steps on `data_ranks` ranks."""
    sampler, exact = step.sampler, True
    if sampler is not None and sampler.kind == "by_length" and sampler.file:
        prepare(step, samples, torch.device("cpu"))
        sizes, known = numbers_of(step).values, len(samples)
    else:
        sizes, known = read_sizes(step, samples, READING)
        if known == len(sizes) or (sampler is not None and sampler.kind == "weighted"):
            prepare(step, samples, torch.device("cpu"))
        elif sampler is not None:  # its order needs all samples
            step, exact = replace(step, sampler=None), False
    slots, looked_at = find_slots(step, sizes, data_ranks, microbatches, steps)
    measured_slots = [(_measure(samples, sizes, slot, known), slot) for slot in slots]
    numbers, slot = max(measured_slots, key=lambda pair: pair[0])
    per_sample = numbers / len(slot.indices)
    example = _example(samples, sizes, slot, per_sample)
    return FullestBatch(
        step=slot.step,
        epoch=slot.epoch,
        data_rank=slot.data_rank,
        samples=len(slot.indices),
        numbers=per_sample,
        example=example,
        source_number=source_number(step, "train", example),
        read=known,
        steps=looked_at,
        exact=exact and known >= len(slot.indices),
    )


def read_sizes(step: DataStep, samples: Samples, seconds: float) -> tuple[Tensor, int]:
    """Returns the size of each training sample, 0 for an unread one, and the number of known sizes."""
    sizes = torch.zeros(len(samples), dtype=torch.float64)
    known, end = 0, time.monotonic() + seconds
    for index, sample in _in_random_order(step, samples):
        sizes[index] = count_numbers(sample)
        known += 1
        if time.monotonic() > end:
            break
    return sizes, known


def _in_random_order(step: DataStep, samples: Samples) -> Iterator[tuple[int, Structure]]:
    for chunk in torch.randperm(len(samples), generator=generator(step.seed, "sizes")).split(CHUNK):
        yield from zip(chunk.tolist(), items(samples, chunk), strict=True)


def find_slots(
    step: DataStep, sizes: Tensor, data_ranks: int, microbatches: int, steps: int
) -> tuple[list[_MicroBatch], int]:
    """Returns the fullest micro-batch if batches are padded, and if samples are joined; and the steps looked at."""
    per_epoch = steps_per_epoch(step)
    best: list[_MicroBatch | None] = [None, None]
    end, looked_at = time.monotonic() + ORDERING, 0
    while looked_at < steps and (not looked_at or time.monotonic() < end):
        epoch = looked_at // per_epoch
        count = min(per_epoch, steps - looked_at)
        for kind, slot in _of_epoch(step, sizes, data_ranks, microbatches, (epoch, count)):
            known = best[kind]
            if known is None or slot.size > known.size:
                best[kind] = slot
        looked_at += count
    return [slot for slot in best if slot is not None], looked_at


def _of_epoch(
    step: DataStep, sizes: Tensor, data_ranks: int, microbatches: int, part: tuple[int, int]
) -> Iterator[tuple[int, _MicroBatch]]:
    """Yields the fullest micro-batches of the first steps of an epoch: 0 and a padded one, 1 and a joined one."""
    epoch, count = part
    full, order = min(count, step.visited // step.batch), permutation(step, epoch)
    first = epoch * steps_per_epoch(step)
    rows = order[: full * step.batch].view(full, step.batch)
    of_rows = sizes[rows]
    for data_rank in range(data_ranks if full else 0):
        start, _, counts = sizes_of(step, place_of(data_rank, data_ranks), microbatches, 0)
        for samples in counts:
            columns = slice(start, start + samples)
            part_sizes = of_rows[:, columns]
            for kind, totals in enumerate((part_sizes.amax(1) * samples, part_sizes.sum(1))):
                k = int(totals.argmax())
                yield kind, _MicroBatch(float(totals[k]), first + k, epoch, data_rank, rows[k, columns])
            start += samples
    if count > full and batch_samples(step, full):
        for data_rank in range(min(data_ranks, step.last)):
            for indices in micro_batches(step, place_of(data_rank, data_ranks), microbatches, epoch, full):
                chosen = sizes[indices]
                for kind, total in enumerate((chosen.amax() * len(indices), chosen.sum())):
                    yield kind, _MicroBatch(float(total), first + full, epoch, data_rank, indices)


def _measure(samples: Samples, sizes: Tensor, slot: _MicroBatch, known: int) -> int:
    """Returns the numbers in the input of a batch; its largest sample's for each, if it takes too long."""
    if known >= len(slot.indices):
        return _numbers(samples, slot.indices, slot.epoch)
    largest = slot.indices[sizes[slot.indices].argmax()]
    return _numbers(samples, largest.view(1), slot.epoch) * len(slot.indices)


def _numbers(samples: Samples, indices: Tensor, epoch: int) -> int:
    """Returns the numbers in the input of a batch."""
    return sum(tensor.numel() for tensor in tensors(samples.batch(indices, epoch)[0]))


def _example(samples: Samples, sizes: Tensor, slot: _MicroBatch, per_sample: float) -> int:
    """Returns the sample whose copies make about the same batch: the largest where batches are padded, else the first
    that is at least of mean size.
    """
    of_batch = sizes[slot.indices]
    largest = slot.indices[of_batch.argmax()]
    if per_sample >= _PADDED * _numbers(samples, largest.view(1), slot.epoch):
        return int(largest)
    enough = slot.indices[of_batch >= of_batch.mean()]
    return int(enough[sizes[enough].argmin()])
