"""The order of a stream is the same on any number of ranks, with workers, and wherever one goes on."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest
import torch
from helpers import own_streams
from hypothesis import given, settings
from hypothesis import strategies as st

from dslc.compiler.ir.program import DataStep, RankPlace, StreamStep
from dslc.compiler.trace.sources.stream_protocol import Shards, StreamError
from dslc.runtime.data.batches import batches
from dslc.runtime.data.samples import Marks, SourceError, Splits
from dslc.runtime.data.streams import Stream, stream_samples

CPU = torch.device("cpu")
STEPS = 12


class Numbers:
    """Shards of `sizes` samples, which are their numbers: 1000 times the shard, and the place in it."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.shards, self.sizes = len(sizes), sizes

    def shard(self, number: int) -> Any:
        return iter(range(1000 * number, 1000 * number + self.sizes[number]))


def data_step(shards: int, batch: int, lanes: int, window: int, **changed: Any) -> DataStep:
    order = StreamStep(shards=shards, lanes=lanes, window=window)
    step = DataStep(
        source="python",
        train_samples=STEPS * batch,
        validation_samples=0,
        split="none",
        seed=5,
        shuffle=window > 0,
        batch=batch,
        last=0,
        workers=0,
        stream=order,
        line="job.plt:6:5",
    )
    return dataclasses.replace(step, **changed)


def opened(made: Any, step: DataStep) -> Stream:
    return stream_samples(step, Shards(made), "train", lambda samples: (torch.tensor(samples), torch.tensor(samples)))


def read(
    made: Any,
    step: DataStep,
    rank: int = 0,
    ranks: int = 1,
    first: int = 0,
    marks: Marks | None = None,
    pieces: int = 1,
) -> list[tuple[list[int], Marks]]:
    """Returns the samples of a rank in each step, and the places after it."""
    stream = opened(made, step)
    stream.go_to(json.loads(json.dumps(marks or {})), print)
    place = RankPlace(rank=rank, node=0, local_rank=rank, coordinates={}, data_rank=rank, data_ranks=ranks)
    splits = Splits(stream, stream, stream)
    found = []
    for batch in batches(step, splits, place, pieces, first, STEPS, CPU):
        assert batch.marks is not None and batch.samples == step.batch
        found.append(([n for inputs, _ in batch.micro for n in inputs.tolist()], batch.marks))
    return found


def joined(parts: list[list[tuple[list[int], Marks]]]) -> list[list[int]]:
    """Returns the samples of all ranks in each step."""
    return [[n for samples, _ in step for n in samples] for step in zip(*parts, strict=True)]


orders = st.tuples(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from([1, 2, 3]),  # lanes, at most as many as shards
    st.sampled_from([0, 1, 4, 30]),  # window
    st.integers(0, STEPS),
)


@given(orders)
@settings(max_examples=15)
def test_ranks_pieces_and_the_place_of_a_resume_change_nothing(drawn: tuple[list[int], int, int, int]) -> None:
    sizes, lanes, window, cut = drawn
    made, batch = Numbers(tuple(sizes)), 12
    step = data_step(len(sizes), batch, min(lanes, len(sizes)), window)
    whole = [samples for samples, _ in read(made, step)]
    for ranks in (2, 3, 4):
        parts = [read(made, step, rank, ranks, pieces=rank % 2 + 1) for rank in range(ranks)]
        assert joined(parts) == whole
        marks: dict[str, Any] = {}
        for part in parts:
            marks |= part[cut - 1][1] if cut else {}
        assert [samples for samples, _ in read(made, step, first=cut, marks=marks)] == whole[cut:]
        gone_on = [read(made, step, rank, ranks, cut, marks) for rank in range(ranks)]
        assert joined(gone_on) == whole[cut:]


@given(orders)
@settings(max_examples=15)
def test_each_pass_has_every_sample_once(drawn: tuple[list[int], int, int, int]) -> None:
    sizes, lanes, window, _ = drawn
    made = Numbers(tuple(sizes))
    step = data_step(len(sizes), 6, 1, window)
    found = [n for samples, _ in read(made, step) for n in samples]
    every = sorted(n for shard in range(len(sizes)) for n in made.shard(shard))
    passes = [found[at : at + len(every)] for at in range(0, len(found) - len(every) + 1, len(every))]
    assert all(sorted(each) == every for each in passes)
    if window == 0:
        assert all(each == every for each in passes)
    step = data_step(len(sizes), 6, min(lanes, len(sizes)), window)
    most = Counter(n for samples, _ in read(made, step) for n in samples)
    assert max(most.values()) <= -(-STEPS * 6 // (min(sizes) * step.stream.lanes)) + 1  # type: ignore[union-attr]


def test_it_is_shuffled_by_the_seed_and_anew_in_each_pass() -> None:
    made, step = Numbers((20, 20, 20)), data_step(3, 10, 1, 15)
    found = [samples for samples, _ in read(made, step)]
    assert found[:6] != found[6:] and found[0] != sorted(found[0])
    assert found != [samples for samples, _ in read(made, dataclasses.replace(step, seed=6))]
    assert found == [samples for samples, _ in read(made, dataclasses.replace(step, workers=1))]


def test_a_rank_reads_the_shards_of_its_share_alone() -> None:
    asked: list[int] = []

    class Watched(Numbers):
        def shard(self, number: int) -> Any:
            asked.append(number)
            return super().shard(number)

    step = data_step(4, 8, 4, 8)
    step = dataclasses.replace(step, shuffle=False)
    read(Watched((30, 30, 30, 30)), step, rank=1, ranks=4)
    assert set(asked) == {1}
    asked.clear()
    read(Watched((30, 30, 30, 30)), step, rank=0, ranks=2)
    assert set(asked) == {0, 1}


def test_a_state_is_taken_in_place_of_reading_again() -> None:
    step = data_step(2, 4, 2, 4)
    made = own_streams.Stateful(shards=2, size=1000)
    together = lambda samples: (torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples]))  # noqa: E731
    stream = stream_samples(step, Shards(made), "train", together)
    for k in range(10):
        stream.batch(torch.arange(4 * k, 4 * k + 4))
    marks, following = stream.marks(), stream.batch(torch.arange(40, 44))
    again = stream_samples(step, Shards(made), "train", together)
    again.go_to(json.loads(json.dumps(marks)), print)
    own_streams.Cursor.made = 0
    found = again.batch(torch.arange(40, 44))
    assert all(torch.equal(one, other) for one, other in zip(found, following, strict=True))
    assert own_streams.Cursor.made <= 2 * 2 * 2, "two windows of two samples in each lane"


@pytest.mark.parametrize(
    ("sizes", "length", "said"),
    [
        ((5, 0), 0, "the stream gives no more samples: shard 1 has none in pass"),
        ((7,), 20, "the stream ends early: pass 1 has 7 samples, and the plan has 20"),
    ],
)
def test_a_stream_that_ends(sizes: tuple[int, ...], length: int, said: str) -> None:
    lanes = len(sizes)
    order = StreamStep(shards=lanes, lanes=lanes, window=0, length=length)
    step = data_step(lanes, 4, lanes, 0, stream=order)
    with pytest.raises(SourceError, match=f"^job.plt:6:5: {said}"):
        read(Numbers(sizes), step)


def test_other_shards_than_planned() -> None:
    with pytest.raises(SourceError, match="the stream has 2 shards, and the plan was made for 3"):
        opened(Numbers((1, 1)), data_step(3, 4, 1, 0))


@pytest.mark.parametrize("made", [own_streams.once(), iter([1])])
def test_what_ends_after_one_pass_is_no_stream(made: Any) -> None:
    with pytest.raises(StreamError, match="ends after one pass"):
        Shards(made)
