"""Samplers: weights draw as torch's sampler does, classes come as often, and like lengths share a batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import WeightedRandomSampler

from dslc.compiler.ir.program import DataStep, SamplerStep
from dslc.runtime.data import sample_keys, sampler
from dslc.runtime.data.orders import draw, grouped
from dslc.runtime.data.samples import FetchedSamples, Part, SourceError, TensorSamples
from dslc.runtime.data.splits import held_out
from dslc.runtime.process.random_numbers import generator

CPU = torch.device("cpu")
SEEDS = count()


def step_of(kind: str, samples: int, visited: int | None = None, **fields: object) -> DataStep:
    made = SamplerStep(kind=kind, samples=visited or samples, line="job.plt:3:4", **fields)  # type: ignore[arg-type]
    return DataStep(
        source="python",
        train_samples=samples,
        validation_samples=0,
        split="none",
        seed=3,
        shuffle=True,
        sampler=made,
        batch=4,
        last=0,
        workers=0,
    )


@pytest.mark.parametrize("replacement", [True, False])
def test_weights_draw_what_torchs_own_sampler_draws(replacement: bool, tmp_path: Path) -> None:
    weights = np.random.default_rng(0).random(50)
    np.save(tmp_path / "w.npy", weights)
    step = step_of("weighted", 50, 30, replacement=replacement, file=str(tmp_path / "w.npy"))
    sample_keys.prepare(step, TensorSamples(torch.zeros(50), torch.zeros(50)), CPU)
    for epoch in (0, 1):
        theirs = WeightedRandomSampler(
            weights.tolist(), 30, replacement=replacement, generator=generator(3, f"epoch {epoch}")
        )
        assert sampler.permutation(step, epoch).tolist() == list(theirs)
    assert sampler.steps_per_epoch(step) == 7


def test_beyond_the_categories_of_multinomial_the_shares_are_the_same() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0, 0.0], dtype=torch.float64)
    drawn = draw(weights, 80_000, True, generator(0, "drawn"), most=2)
    torch.testing.assert_close(drawn.bincount(minlength=6) / 80_000, (weights / 8).float(), atol=0.01, rtol=0)
    firsts: Counter[int] = Counter()
    random = generator(0, "firsts")
    for _ in range(4000):
        once = draw(weights, 3, False, random, most=2).tolist()
        assert sorted(once) == [1, 2, 4]
        firsts[once[0]] += 1
    assert [firsts[n] / 4000 for n in (1, 2, 4)] == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.03)


@pytest.mark.parametrize("kind", ["weighted", "by_length"])
@pytest.mark.parametrize(("split", "validation", "test"), [("random", 3, 0), ("random", 2, 1), ("tail", 1, 2)])
def test_a_number_belongs_to_a_sample_of_the_source_whether_it_is_held_out_or_not(
    kind: Any, split: Any, validation: int, test: int, tmp_path: Path
) -> None:
    np.save(tmp_path / "w.npy", np.arange(1, 11))
    step = replace(
        step_of(kind, 7, file=str(tmp_path / "w.npy")),
        split=split,
        validation_samples=validation,
        test_samples=test,
        line="job.plt:2:1",
    )
    kept = held_out(step)[0] if split == "random" else torch.arange(7)
    sample_keys.prepare(step, Part(TensorSamples(torch.zeros(10), torch.zeros(10)), kept), CPU)
    assert sample_keys.numbers_of(step).values.tolist() == [float(n + 1) for n in kept.tolist()]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (np.ones(3), "3 numbers are given, and the data has 4 samples"),
        (np.array([1.0, -1, 1, 1]), "the weight of sample 1 is -1"),
        (np.array([1.0, np.nan, 1, 1]), "the weight of sample 1 is nan"),
        (np.zeros(4), "no sample has a weight above 0"),
        (np.array([1.0, 0, 0, 0]), "4 samples cannot be drawn without replacement: 1 have a weight above 0"),
        (np.ones((4, 1)), "these are of shape 4 x 1"),
    ],
)
def test_weights_that_cannot_be_drawn_by(weights: object, said: str, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", weights)  # type: ignore[arg-type]
    step = step_of("weighted", 4, replacement=False, file=str(tmp_path / "w.npy"))
    with pytest.raises(SourceError, match=r"^job\.plt:3:4: .*" + said):
        sample_keys.prepare(step, TensorSamples(torch.zeros(4), torch.zeros(4)), CPU)


class Labelled:
    """Samples of three classes, of which one is rare, as torchvision's data sets have them."""

    def __init__(self, told: bool) -> None:
        self.labels, self.fetched = [0] * 30 + [1] * 8 + [2] * 2, 0
        if told:
            self.targets = self.labels

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.fetched += 1
        return torch.zeros(2), self.labels[index]


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        (torch.zeros(3, 2), 3.0),
        (torch.zeros(()), 1.0),
        ((np.zeros((4, 2)), 1), 4.0),
        ([[1, 2, 3], [4]], 3.0),
        ({"words": [[1], [2, 3]], "label": 1}, 2.0),
        ({"words": {"left": "a text", "right": ""}}, 6.0),
        ((5, 1), 1.0),
    ],
)
def test_the_length_of_a_sample_is_that_of_its_first_part(sample: object, length: float) -> None:
    step = replace(step_of("by_length", 2), seed=next(SEEDS))  # numbers are kept by what a job says of its data
    sample_keys.prepare(step, FetchedSamples([sample, sample], "job.plt:2:1"), CPU)
    assert sample_keys.numbers_of(step).values.tolist() == [length, length]


@pytest.mark.parametrize("told", [True, False])
def test_each_class_is_drawn_as_often(told: bool) -> None:
    step, data = step_of("balanced", 40, 3000 + told), Labelled(told)
    sample_keys.prepare(step, FetchedSamples(data, "job.plt:2:1"), CPU)
    assert data.fetched == (1 if told else 40)
    classes = torch.tensor(data.labels)[sampler.permutation(step, 0)].bincount()
    assert classes.sum() == 3000 + told and (classes - 1000).abs().max() < 100


@given(st.lists(st.integers(0, 30), min_size=1, max_size=120), st.integers(1, 9), st.integers(1, 6), st.integers(0, 9))
def test_each_sample_is_once_in_an_order_by_length(lengths: list[int], batch: int, window: int, seed: int) -> None:
    order = grouped(torch.tensor(lengths, dtype=torch.float64), batch, window, generator(seed, "epoch 0"))
    assert sorted(order.tolist()) == list(range(len(lengths)))


def test_like_lengths_share_a_batch_and_ranks_have_as_much_to_do() -> None:
    lengths = torch.randint(1, 400, (4000,), generator=generator(1, "lengths")).double()

    def padded(order: torch.Tensor) -> float:
        batches = lengths[order].view(-1, 16)
        return float((batches.amax(1, keepdim=True) - batches).sum())

    order = grouped(lengths, 16, 50, generator(0, "epoch 0"))
    assert padded(order) < 0.1 * padded(torch.randperm(4000, generator=generator(0, "epoch 0")))
    halves = lengths[order].view(-1, 2, 8).sum(2)
    assert float((halves[:, 0] - halves[:, 1]).abs().mean()) < 0.01 * float(halves.mean())
    firsts = lengths[order].view(-1, 16)[:50].mean(1)
    assert firsts.sort().values.tolist() != firsts.tolist() != firsts.sort(descending=True).values.tolist()
