"""The fullest micro-batch of a training is that of a walk over all steps, however `collate` makes batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep, SamplerStep
from dslc.runtime.data import fullest_batch
from dslc.runtime.data.fullest_batch import find_fullest, read_sizes
from dslc.runtime.data.rank_orders import place_of
from dslc.runtime.data.sampler import micro_batches, steps_per_epoch
from dslc.runtime.data.samples import FetchedSamples

Sample = tuple[Tensor, int]
STEP = DataStep(
    source="python",
    structured=True,
    train_samples=45,
    validation_samples=0,
    split="none",
    seed=3,
    shuffle=True,
    batch=8,
    last=5,
    workers=0,
)


def padded(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    values = torch.nn.utils.rnn.pad_sequence([values for values, _ in samples], batch_first=True)
    return values, torch.zeros(len(samples))


def joined(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    return torch.cat([values for values, _ in samples]), torch.zeros(len(samples))


def ragged(collate: Callable[[list[Sample]], object], count: int) -> FetchedSamples:
    """Samples of drawn lengths, each another one."""
    lengths = random.Random(1).sample(range(1, 10 * count), count)
    return FetchedSamples([(torch.zeros(length), 0) for length in lengths], "job.plt:2", collate=collate)


@pytest.mark.parametrize("collate", [padded, joined])
@pytest.mark.parametrize(
    ("batch", "shares", "microbatches", "last", "steps"),
    [
        (8, (4, 4), 2, 0, 9),
        (10, (4, 3, 3), 2, 5, 14),
        (9, (9,), 4, 0, 3),
        (40, (20, 20), 1, 5, 2),
        (8, (2, 6), 2, 5, 9),
    ],
)
def test_the_fullest_batch_is_found(
    collate: Callable[[list[Sample]], object],
    batch: int,
    shares: tuple[int, ...],
    microbatches: int,
    last: int,
    steps: int,
) -> None:
    samples, ranks = ragged(collate, 45), len(shares)
    step = replace(STEP, batch=batch, last=last, shares=shares if shares == (2, 6) else ())
    fullest = find_fullest(step, samples, ranks, microbatches, steps)
    numbers = {}
    for number in range(steps):
        epoch, k = divmod(number, steps_per_epoch(step))
        for rank in range(ranks):
            for indices in micro_batches(step, place_of(rank, ranks), microbatches, epoch, k):
                numbers[number, rank, tuple(indices.tolist())] = samples.batch(indices)[0].numel()
    (number, rank, members), most = max(numbers.items(), key=lambda item: item[1])
    assert (fullest.step, fullest.data_rank, fullest.samples) == (number, rank, len(members))
    assert fullest.numbers * fullest.samples == most
    assert (fullest.read, fullest.steps) == (45, steps)
    copies = samples.batch(torch.tensor([fullest.example] * fullest.samples))[0].numel()
    assert copies >= most, "the account of these copies is no less"
    assert collate is joined or copies == most


def test_a_bounded_reading_says_how_many_sizes_are_known() -> None:
    step = replace(STEP, train_samples=200, last=0)
    sizes, known = read_sizes(step, ragged(padded, 200), seconds=0)
    assert known == int((sizes > 0).sum()) == 1


def test_a_file_of_lengths_is_the_sizes_of_all_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fullest_batch, "READING", 0.0)
    samples = ragged(padded, 45)
    lengths = [len(samples.dataset[n][0]) for n in range(45)]
    np.save(tmp_path / "lengths.npy", np.array(lengths))
    sampler = SamplerStep(kind="by_length", samples=45, file=str(tmp_path / "lengths.npy"), window=2, line="job.plt:2")
    step = replace(STEP, sampler=sampler)
    fullest = find_fullest(step, samples, 2, 1, 6)
    assert (fullest.read, fullest.exact, fullest.numbers) == (45, True, max(lengths))
    shuffled = find_fullest(replace(step, sampler=None), samples, 2, 1, 6)
    assert (shuffled.read, shuffled.exact) == (1, False)  # a sample of four is known
