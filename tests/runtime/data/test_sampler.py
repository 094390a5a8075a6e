"""Every sample of every global batch is on exactly one rank; which samples those are does not depend on the ranks."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from dslc.compiler.ir.program import DataStep, RankPlace
from dslc.compiler.placement.shares import deal
from dslc.runtime.data import sampler
from dslc.runtime.data.splits import held_out


def data_step(train: int, batch: int, *, keep: bool = False, shuffle: bool = True, seed: int = 0) -> DataStep:
    return DataStep(
        source="digits",
        train_samples=train,
        validation_samples=0,
        split="none",
        seed=seed,
        shuffle=shuffle,
        batch=batch,
        last=train % batch if keep else 0,
        workers=0,
    )


def place(rank: int, ranks: int) -> RankPlace:
    return RankPlace(rank=rank, node=0, local_rank=rank, coordinates={"data": rank}, data_rank=rank, data_ranks=ranks)


def dealt(step: DataStep, ranks: int, microbatches: int, epoch: int, k: int) -> list[list[list[int]]]:
    """Returns the samples of a global batch by rank and micro-batch."""
    return [
        [piece.tolist() for piece in sampler.micro_batches(step, place(rank, ranks), microbatches, epoch, k)]
        for rank in range(ranks)
    ]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[DataStep, int, int]:
    """A data step, ranks and micro-batches; a rank has at least one sample of each batch."""
    ranks, batch = draw(st.integers(1, 7)), draw(st.integers(7, 40))
    train = draw(st.integers(batch, 200))
    keep = draw(st.booleans()) and train % batch >= ranks
    step = data_step(train, batch, keep=keep, shuffle=draw(st.booleans()), seed=draw(st.integers(0, 2**40)))
    microbatches = draw(st.integers(1, 9))
    if draw(st.booleans()):
        weights = draw(st.lists(st.integers(1, 5), min_size=ranks, max_size=ranks))
        step = dataclasses.replace(step, shares=deal(batch, weights))
    return step, ranks, microbatches


@given(jobs(), st.integers(0, 3))
def test_every_sample_of_an_epoch_is_on_one_rank_and_in_one_micro_batch(
    job: tuple[DataStep, int, int], epoch: int
) -> None:
    step, ranks, microbatches = job
    order = sampler.permutation(step, epoch).tolist()
    assert sorted(order) == list(range(step.train_samples))
    seen = []
    for k in range(sampler.steps_per_epoch(step)):
        pieces = dealt(step, ranks, microbatches, epoch, k)
        flat = [sample for rank in pieces for piece in rank for sample in piece]
        assert flat == order[k * step.batch : k * step.batch + sampler.batch_samples(step, k)]
        assert len({len(rank) for rank in pieces}) == 1, "all ranks have as many micro-batches"
        shares = [sum(map(len, rank)) for rank in pieces]
        assert min(shares) > 0 and (k or not step.shares or tuple(shares) == step.shares)
        for sizes in (*([] if step.shares else [shares]), *(list(map(len, rank)) for rank in pieces)):
            assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
        seen += flat
    assert len(seen) == step.train_samples // step.batch * step.batch + step.last


@given(jobs(), st.integers(1, 7), st.integers(1, 9))
def test_a_global_batch_does_not_depend_on_ranks_or_micro_batches(
    job: tuple[DataStep, int, int], ranks: int, microbatches: int
) -> None:
    step, *first = job
    equal = dataclasses.replace(step, shares=())
    flat = [
        [sample for rank in dealt(how, shape[0], shape[1], 1, 0) for piece in rank for sample in piece]
        for how, shape in ((step, first), (equal, [ranks, microbatches]))
    ]
    assert flat[0] == flat[1]


@given(jobs(), st.data())
def test_shares_of_several_batches_are_the_shares_of_each(job: tuple[DataStep, int, int], data: st.DataObject) -> None:
    step, ranks, _ = job
    full = step.train_samples // step.batch
    k = data.draw(st.integers(0, full - 1))
    count = data.draw(st.integers(1, full - k))
    here = place(data.draw(st.integers(0, ranks - 1)), ranks)
    each = [sampler.shares(step, here, 2, one) for one in range(k, k + count)]
    assert torch.equal(sampler.shares(step, here, 2, k, count), torch.cat(each))


def test_the_last_batch_has_no_more_micro_batches_than_samples_on_a_rank() -> None:
    step = data_step(64 + 7, 64, keep=True)
    assert [[len(piece) for piece in rank] for rank in dealt(step, 3, 4, 0, 1)] == [[2, 1], [1, 1], [1, 1]]


def test_the_order_is_the_same_on_any_machine() -> None:
    step = data_step(12, 4, seed=7)
    assert sampler.permutation(step, 0).tolist() == [3, 7, 2, 6, 8, 4, 0, 10, 5, 9, 11, 1]
    orders = [sampler.permutation(step, epoch).tolist() for epoch in range(3)]
    orders.append(sampler.permutation(data_step(12, 4, seed=8), 0).tolist())
    assert all(a != b for a, b in itertools.combinations(orders, 2)), "epochs and seeds differ"
    assert sampler.permutation(data_step(12, 4, shuffle=False), 5).tolist() == list(range(12))


def test_torchs_own_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    sampler.permutation(data_step(30, 5, seed=91), 4)
    assert torch.equal(torch.get_rng_state(), before)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 2**40), st.integers(1, 9))
def test_held_out_samples_follow_from_the_seed(train: int, validation: int, seed: int, ranks: int) -> None:
    step = dataclasses.replace(data_step(train, 1, seed=seed), validation_samples=validation, split="random")
    kept, held = held_out(step)
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(train + validation))
    assert len(held) == validation and held.tolist() == sorted(held.tolist())
    other = dataclasses.replace(step, batch=min(train, 3), shuffle=False)
    assert torch.equal(held_out(other)[1], held)
    shares = [sampler.split_indices(step, "validation", place(rank, ranks)).tolist() for rank in range(ranks)]
    assert [index for share in shares for index in share] == list(range(validation))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
