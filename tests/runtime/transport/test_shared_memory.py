"""Collectives over shared memory give what gloo's give, and a rank that waits for one that is gone says so."""

from __future__ import annotations

import platform
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from helpers.gang import gang
from helpers.group_work import sum_after_an_end, sum_without_the_last, train_by_engine
from torch.distributed import _functional_collectives as functional

from dslc.compiler.facts.hardware import DESCRIPTORS, SLOT_BYTES
from dslc.runtime.transport.shared_memory import NAME, SharedMemoryGroup
from dslc.runtime.transport.shared_messages import MessageStore
from dslc.runtime.transport.shared_segment import has_reached, stored_bytes, word_value

SIZES = (
    0,
    1,
    7,
    SLOT_BYTES // 4 - 1,
    SLOT_BYTES // 4 + 5,
    3 * SLOT_BYTES // 4,
)  # of float32: within a slot, and over several


def _numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(size) * 31 + 17 * rank) % 13).to(dtype)


def _every_collective(rank: int, size: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    ranks, world = dist.get_world_size(), cast("dist.ProcessGroup", dist.group.WORLD)
    own = _numbers(rank, size, dtype)
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        total = own.clone()
        dist.all_reduce(total, operation)
        yield total
    parts = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(parts, own)
    yield torch.stack(parts)
    whole = own.new_empty(ranks * size)
    dist.all_gather_into_tensor(whole, own)
    yield whole
    of_all = _numbers(rank, ranks * size, dtype)
    share = torch.empty_like(own)
    dist.reduce_scatter_tensor(share, of_all)
    yield share
    dist.reduce_scatter(share, list(of_all.clone().chunk(ranks)) if size else [own] * ranks)
    yield share
    sent = own.clone()
    dist.broadcast(sent, 1)
    yield sent
    exchanged = torch.empty_like(of_all)
    dist.all_to_all_single(exchanged, of_all)
    yield exchanged
    total = own.clone()
    dist.reduce(total, 1)
    yield total if rank == 1 else own
    gathered = [torch.empty_like(own) for _ in range(ranks)] if rank == 1 else None
    dist.gather(own, gathered, 1)
    yield torch.stack(gathered or [own])
    dist.scatter(share, list(of_all.chunk(ranks)) if rank == 1 and size else [own] * ranks if rank == 1 else None, 1)
    yield share
    yield functional.all_reduce(own, "sum", world) + 0
    yield functional.all_gather_tensor(own, 0, world) + 0
    yield functional.reduce_scatter_tensor(of_all, "sum", 0, world) + 0


def _all_results(rank: int, sizes: tuple[int, ...]) -> list[Any]:
    return [
        result.float().numpy()
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
        for size in (sizes if dtype == torch.float32 else sizes[1:3])
        for result in _every_collective(rank, size, dtype)
    ]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_collective_equals_gloos(ranks: int) -> None:
    sizes = SIZES if ranks == 2 else SIZES[1:5:3]
    over_gloo, shared = (gang(ranks, _all_results, sizes, backend=backend) for backend in ("gloo", NAME))
    for mine, theirs in zip(shared, over_gloo, strict=True):
        assert len(mine) == len(theirs)
        assert all((one == other).all() for one, other in zip(mine, theirs, strict=True))


def _uneven(rank: int) -> Any:
    """Rank 0 sends 0 rows to itself, 1 to rank 1, …; then messages cross, of two tags and more than fit at once."""
    ranks = dist.get_world_size()
    sizes = [(rank + other) % 3 for other in range(ranks)]
    arriving = torch.empty(sum(sizes), 2)
    dist.all_to_all_single(arriving, torch.full((sum(sizes), 2), float(rank)), sizes, sizes)
    peer = (rank + 1) % ranks
    sent = [dist.isend(torch.full((3, 2), float(n)), peer, tag=n % 2) for n in range(3 * DESCRIPTORS)]
    received = [torch.empty(3, 2) for _ in sent]
    order = sorted(range(len(sent)), key=lambda n: -(n % 2))  # all of tag 1 first
    waiting = [dist.irecv(received[n], (rank - 1) % ranks, tag=n % 2) for n in order]
    for work in [*sent, *waiting]:
        assert work is not None
        work.wait()
    return arriving[:, 0].tolist(), [part.unique().tolist() for part in received]


def test_uneven_parts_and_messages_that_cross() -> None:
    for rank, (rows, messages) in enumerate(gang(2, _uneven, backend=NAME)):
        assert rows == [float(other) for other in range(2) for _ in range((rank + other) % 3)]
        assert messages == [[float(n)] for n in range(3 * DESCRIPTORS)]


@pytest.mark.parametrize("sharded", [False, True])
def test_torchs_own_engines_train_alike(sharded: bool) -> None:
    over_gloo, shared = (
        gang(2, train_by_engine, sharded, SharedMemoryGroup, backend=backend) for backend in ("gloo", NAME)
    )
    assert shared == over_gloo


def test_a_rank_that_waits_for_an_ended_one_says_so() -> None:
    with pytest.raises(AssertionError, match="Connection closed by peer"):
        gang(2, sum_after_an_end, backend=NAME)


def test_a_rank_that_does_not_come_is_waited_for_until_the_timeout() -> None:
    assert "Timed out waiting 300ms" in gang(2, sum_without_the_last, backend=NAME)[0]


def _unable(rank: int) -> tuple[bool, float]:
    """Returns what a group is over, and what it sums, where rank 1 is on a machine that cannot share memory."""
    if rank == 1:
        platform.machine = lambda: "riscv64"
    group: Any = dist.new_group([0, 1])
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return isinstance(group, SharedMemoryGroup), total.item()


def test_a_group_of_which_one_rank_cannot_share_is_gloos() -> None:
    assert gang(2, _unable, backend=NAME) == [(False, 2.0)] * 2


def test_messages_of_any_sizes_use_their_places_again() -> None:
    segment: Any = SimpleNamespace(messages=torch.empty(1 << 18, dtype=torch.uint8))
    store, draw, last = MessageStore(segment), random.Random(1), 0
    for _ in range(200):
        stored = [torch.empty(draw.randrange(1 << 14), dtype=torch.uint8) for _ in range(4)]
        places = [store.store(tensor) for tensor in stored]
        last = max(last, *places)
        for tensor, place in zip(stored, places, strict=True):
            store.release(place, stored_bytes(tensor))
    assert last < 4 * 2 * (1 << 14)


def test_words_count_without_an_end() -> None:
    assert has_reached(word_value(2**31 + 3), word_value(2**31 + 2))
    assert not has_reached(word_value(2**31 + 3), word_value(2**31 + 4))
    assert has_reached(word_value(2**32 + 1), word_value(2**32 - 1))
