"""Measures how much of the batches of a job is padding, and what another order or packing would leave.

Model: some global batches of the first epoch are made as the training makes them, spread evenly over it: each
micro-batch of each rank by `collate`. The numbers in the first tensor of the input are compared with those in the first
tensors of its samples. With `data.pad` they are compared with the tokens that are not `pad`.

Packing puts whole samples one after another into sequences as long as the longest sample, each into the fullest
sequence that holds it, longest samples first.

Limits: up to `BATCHES` global batches are made, for `SECONDS` at most.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep, SamplerStep
from dslc.compiler.trace.structures import tensors
from dslc.runtime.data.rank_orders import place_of
from dslc.runtime.data.sample_keys import set_numbers
from dslc.runtime.data.sample_records import Shape, numbers_in, spread
from dslc.runtime.data.sampler import micro_batches, steps_per_epoch
from dslc.runtime.data.samples import Pair, Samples
from dslc.runtime.process.random_numbers import preserve_generators

BATCHES = 32
SECONDS = 10.0
WINDOW = 50  # of `by_length` by default
SEQUENCES = 1024  # that are looked through for documents


@dataclass(frozen=True)
class Padding:
    """Padding of some global batches. `numbers` are those of a sample with its padding, in the mean; `fullest` the
    numbers of the fullest rank of a step over the mean of ranks.
    """

    batches: int
    share: float
    numbers: float
    fullest: float


@preserve_generators()  # samples of a user's code are made
def measure_padding(
    step: DataStep, samples: Samples, shapes: Sequence[Shape] | None, data_ranks: int, microbatches: int, steps: int
) -> Padding | None:
    """Returns the padding of batches in the order of the sampler. `shapes` has one for each training sample; None if
    padding is a token. Returns None if batches hold fewer numbers than their samples.
    """
    count = min(steps, steps_per_epoch(step), step.visited // step.batch)
    batches, real, padded, fullest, number = 0, 0, 0, [], 0
    end = time.monotonic() + SECONDS
    for k in spread(count, BATCHES):
        by_rank = []
        for data_rank in range(data_ranks):
            place, of_rank = place_of(data_rank, data_ranks), 0
            for indices in micro_batches(step, place, microbatches, 0, k):
                batch = samples.batch(indices)
                of_rank += _first_tensor(batch).numel()
                real += _real_numbers(step, batch, indices, shapes)
                number += len(indices)
            by_rank.append(of_rank)
        padded += sum(by_rank)
        fullest.append(max(by_rank) * data_ranks / max(1, sum(by_rank)))
        batches += 1
        if time.monotonic() > end:
            break
    if not padded or real > padded:
        return None
    return Padding(batches, 1 - real / padded, padded / number, sum(fullest) / len(fullest))


def _first_tensor(batch: Pair) -> Tensor:
    return next(iter(tensors(batch[0])), torch.empty(0))


def _real_numbers(step: DataStep, batch: Pair, indices: Tensor, shapes: Sequence[Shape] | None) -> int:
    if shapes is None:
        return int(_first_tensor(batch).ne(step.pad or 0).sum())
    return sum(numbers_in(shapes[index]) for index in indices.tolist())


def by_length(step: DataStep, shapes: Sequence[Shape]) -> DataStep:
    """Returns the data in the order of `by_length`, by the numbers of its samples."""
    sampler = SamplerStep(kind="by_length", samples=step.train_samples, window=WINDOW, line="by the numbers of samples")
    ordered = replace(step, sampler=sampler, last=0)
    set_numbers(ordered, torch.tensor([float(numbers_in(shape)) for shape in shapes], dtype=torch.float64))
    return ordered


def packed_share(lengths: Sequence[int]) -> tuple[int, float]:
    """Returns the number of sequences into which samples are packed, and the share of them that is left empty."""
    size, sequences = max(lengths), 0
    room: list[int] = []  # that is left in each sequence, ascending
    for length in sorted(lengths, reverse=True):
        at = bisect_left(room, length)
        if at == len(room):
            sequences += 1
            left = size - length
        else:
            left = room.pop(at) - length
        insort(room, left)
    return sequences, 1 - sum(lengths) / (sequences * size) if size else 0.0


@dataclass(frozen=True)
class DocumentPacking:
    """Documents in sequences of equal length. `cut` is the share of documents that go on in the next sequence without
    their beginning; `masked` the share of pairs of positions that are of different documents; `uncounted` the share of
    targets that do not count.
    """

    sequences: int
    length: int
    documents: float  # in a sequence, in the mean
    cut: float
    masked: float
    uncounted: float


def measure_documents(step: DataStep, samples: Samples) -> DocumentPacking | None:
    """Returns how documents lie in the sequences of token files; None for other data."""
    if step.documents is None or step.source in ("chat", "preferences") or not len(samples):
        return None
    numbers = torch.tensor(spread(len(samples), SEQUENCES))
    inputs, _ = samples.batch(numbers)
    if not isinstance(inputs, Tensor) or inputs.dim() != 2:
        return None
    ends = inputs == step.documents
    document = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1).cumsum(1)  # the number of each position's
    total, length = document.shape
    counts = document[:, -1] + 1
    pairs = 0
    for row in document:
        pairs += int((row.bincount() ** 2).sum())
    unfinished = int((~ends[:, -1]).sum())
    return DocumentPacking(
        sequences=total,
        length=length,
        documents=float(counts.double().mean()),
        cut=unfinished / int(counts.sum()),
        masked=1 - pairs / (total * length**2),
        uncounted=float(ends.double().mean()),
    )
