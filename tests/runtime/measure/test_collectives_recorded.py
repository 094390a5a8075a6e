"""The recorder sees each collective that is issued, whoever issues it, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gang import gang
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from dslc.runtime.measure.collectives import FIRST_STEP, STEPS, CollectiveExchange, Recorder, recorded


def _known(rank: int) -> list[CollectiveExchange]:
    from torch.distributed import _functional_collectives as functional

    world: Any = dist.group.WORLD
    group: Any = dist.new_group([0, 1])
    alone: Any = [dist.new_group([each]) for each in range(3)][rank]
    numbers = torch.ones(6)
    with Recorder() as recorder:
        dist.all_reduce(numbers)
        dist.all_reduce(numbers.double(), async_op=True).wait()
        dist.broadcast(numbers[:5], 1)
        dist.all_gather([torch.empty(6) for _ in range(3)], numbers)
        dist.all_gather_into_tensor(torch.empty(18), numbers)
        dist.reduce_scatter_tensor(torch.empty(2), numbers)
        dist.barrier()
        functional.all_reduce(numbers[:3], "sum", world).sum()  # a tensor that waits by itself
        dist.all_reduce(numbers, group=alone)  # which exchanges nothing
        if rank == 0:
            dist.send(numbers, 1)
        if rank == 1:
            dist.recv(numbers, 0)
        if rank < 2:
            dist.all_reduce(numbers.half(), group=group)
    dist.all_reduce(numbers)  # after it
    return list(recorder.exchanges)


@pytest.mark.slow
def test_kinds_bytes_and_groups() -> None:
    first, second, third = gang(3, _known)
    common = [
        CollectiveExchange(operation="all_gather", ranks=3, count=2, bytes=48),
        CollectiveExchange(operation="all_reduce", ranks=3, count=3, bytes=24 + 48 + 12),
        CollectiveExchange(operation="barrier", ranks=3, count=1, bytes=0),
        CollectiveExchange(operation="broadcast", ranks=3, count=1, bytes=20),
        CollectiveExchange(operation="reduce_scatter", ranks=3, count=1, bytes=24),
    ]
    pair = CollectiveExchange(operation="all_reduce", ranks=2, count=1, bytes=12)
    assert third == common
    assert set(first) == {*common, pair, CollectiveExchange(operation="send", ranks=3, count=1, bytes=24)}
    assert set(second) == {*common, pair, CollectiveExchange(operation="receive", ranks=3, count=1, bytes=24)}


def _reducer(rank: int) -> tuple[tuple[CollectiveExchange, ...], list[int]]:
    """Returns the collectives that DistributedDataParallel's reducer, in C++, asks for, and gloo's own by torch's
    profiler.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 700), nn.Linear(700, 3))
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    batch = torch.randn(4, 8)
    for _ in range(2):
        wrapped(batch).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        wrapped(batch).sum().backward()
        dist.barrier()
    with Recorder() as recorder:
        wrapped(batch).sum().backward()
    events: list[Any] = [event for event in seen.events() if event.name == "gloo:all_reduce"]
    return recorder.exchanges, [4 * event.input_shapes[0][0] for event in events]


def test_the_reducer_of_ddp_is_seen_as_torchs_profiler_sees_it() -> None:
    for exchanges, sizes in gang(2, _reducer, backend="gloo"):
        assert len(sizes) == 2  # a small first bucket, and the rest
        assert exchanges == (CollectiveExchange(operation="all_reduce", ranks=2, count=2, bytes=sum(sizes)),)


def _steps(rank: int) -> list[int]:
    kept: dict[int, tuple[CollectiveExchange, ...]] = {}

    def work(batch: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(batch)
        return batch

    watched = recorded(work, kept, 10)
    for _ in range(FIRST_STEP + STEPS + 1):
        dist.broadcast(watched(torch.ones(2)), 0)  # the loop's work between steps is not part of a step
    assert set(kept.values()) == {(CollectiveExchange(operation="all_reduce", ranks=2, count=1, bytes=8),)}
    return list(kept)


def test_a_few_steps_are_recorded_and_what_stands_between_them_is_not() -> None:
    assert gang(2, _steps) == [list(range(10 + FIRST_STEP, 10 + FIRST_STEP + STEPS))] * 2
