"""A mixture has its share of each source in every epoch, and each source goes on where it stopped."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslc.compiler.ir.program import DataStep
from dslc.compiler.placement.epochs import counts
from dslc.dsl.language import calls as c
from dslc.runtime.data import sampler
from dslc.runtime.data.sources.open_sources import open_source
from dslc.runtime.data.splits import sample_name, source_number


def part(train: int, validation: int = 0, seed: int = 0, *, shuffle: bool = True) -> DataStep:
    return DataStep(
        source="synthetic",
        arguments={"samples": train + validation, "shape": (2,), "classes": 2, "targets": None, "vocab": None},
        train_samples=train,
        validation_samples=validation,
        split="random" if validation else "none",
        seed=seed,
        shuffle=shuffle,
        batch=3,
        last=0,
        workers=0,
    )


def mixture(sizes: list[int], shares: tuple[int, ...], *, validation: int = 0, shuffle: bool = True) -> DataStep:
    parts = tuple(part(size, validation, n, shuffle=shuffle) for n, size in enumerate(sizes))
    return DataStep(
        source="mixture",
        train_samples=sum(sizes),
        validation_samples=validation * len(sizes),
        split="each",
        seed=0,
        shuffle=shuffle,
        parts=parts,
        counts=shares,
        batch=3,
        last=0,
        workers=0,
    )


SIZES = st.lists(st.integers(1, 40), min_size=2, max_size=5)


@given(SIZES, st.data(), st.sampled_from(["first_exhausted", "all_exhausted"]))
def test_an_epoch_ends_when_one_source_or_all_are_used_up(sizes: list[int], data: st.DataObject, strategy: str) -> None:
    weight = st.floats(0.05, 20)
    weights = tuple(data.draw(st.lists(weight, min_size=len(sizes), max_size=len(sizes))))
    call = c.Mixture(sources=(c.Digits(), c.Digits()), weights=weights, stopping_strategy=strategy)
    found = counts(call, sizes)
    reached = [n >= size for n, size in zip(found, sizes, strict=True)]
    exact = [n == size for n, size in zip(found, sizes, strict=True)]
    assert any(exact) if strategy == "first_exhausted" else all(reached) and any(exact)
    if strategy == "first_exhausted":
        assert all(n <= size for n, size in zip(found, sizes, strict=True))
    scale = max(n / w for n, w in zip(found, weights, strict=True))
    assert all(n <= scale * w + 1e-6 for n, w in zip(found, weights, strict=True))


@given(SIZES, st.integers(1, 500))
def test_a_given_number_of_samples_is_shared_out_by_weight(sizes: list[int], samples: int) -> None:
    call = c.Mixture(sources=(c.Digits(), c.Digits()), samples=samples)
    found = counts(call, sizes)
    assert sum(found) == samples
    assert all(abs(n - samples * size / sum(sizes)) < 1 for n, size in zip(found, sizes, strict=True))
    assert counts(c.Mixture(sources=(c.Digits(), c.Digits())), sizes) == tuple(sizes), "by default each sample once"


@given(SIZES, st.data(), st.booleans())
def test_each_source_goes_on_in_the_next_epoch_where_it_stopped(
    sizes: list[int], data: st.DataObject, shuffle: bool
) -> None:
    shares = tuple(data.draw(st.integers(0, 60)) for _ in sizes)
    step, starts = mixture(sizes, shares, shuffle=shuffle), [sum(sizes[:n]) for n in range(len(sizes))]
    visits: list[list[int]] = [[] for _ in sizes]
    for epoch in range(3):
        order = sampler.permutation(step, epoch).tolist()
        assert len(order) == sum(shares) == step.visited
        for index in order:
            source = max(n for n, start in enumerate(starts) if index >= start)
            visits[source].append(index - starts[source])
    for n, (size, own) in enumerate(zip(sizes, visits, strict=True)):
        assert len(own) == 3 * shares[n]
        passes = [own[at : at + size] for at in range(0, len(own), size)]
        for number, one in enumerate(passes):
            assert one == sampler.permutation(step.parts[n], number)[: len(one)].tolist()


def test_sources_alternate_evenly_without_shuffling() -> None:
    order = sampler.permutation(mixture([8, 4], (8, 4), shuffle=False), 0).tolist()
    assert [index >= 8 for index in order] == [False, True, False] * 4
    assert order == [0, 8, 1, 2, 9, 3, 4, 10, 5, 6, 11, 7]


def test_samples_are_those_of_each_source_and_validation_is_of_each() -> None:
    step = mixture([12, 20], (12, 10), validation=4)
    splits, parts = open_source(step), [open_source(each) for each in step.parts]
    assert (len(splits.train), len(splits.validation)) == (32, 8)
    indices = torch.tensor([31, 0, 12, 11])
    expected = [parts[1], parts[0], parts[1], parts[0]]
    for row, place, index in zip(splits.train.batch(indices)[0], expected, [19, 0, 0, 11], strict=True):
        assert torch.equal(row, place.train.batch(torch.tensor([index]))[0][0])
    held = splits.validation.batch(torch.arange(8))[0]
    assert torch.equal(held, torch.cat([each.validation.batch(torch.arange(4))[0] for each in parts]))
    assert not Counter(map(tuple, parts[0].train.batch(torch.arange(12))[0].tolist())) & Counter(
        map(tuple, parts[1].train.batch(torch.arange(12))[0].tolist())
    ), "two synthetic sources are not the same samples"


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_sample_is_named_by_its_number_in_its_source_too(split: str) -> None:
    """The numbers of both splits are those of all samples, each once; the samples of a mixture have none."""
    step = part(30, 10)
    splits = (("train", 30), ("validation", 10))
    assert sorted(source_number(step, each, n) for each, count in splits for n in range(count)) == list(range(40))
    number = source_number(step, split, 7)
    words = f"sample 7 of the {'training' if split == 'train' else split} data"
    assert sample_name(step, split, 7) == f"{words} (number {number} of `synthetic`)"
    assert sample_name(replace(step, source="python"), split, 7) == f"{words} (`dataset[{number}]`)"
    assert sample_name(mixture([3, 5], (3, 5)), split, 7) == words
