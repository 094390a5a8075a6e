"""Collectives of ranks on several hosts give what gloo's give, and a rank that waits for one that is gone says so."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gang import gang
from helpers.group_work import sum_after_an_end, sum_without_the_last, train_by_engine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dslc.compiler.facts.hardware import SLOT_BYTES
from dslc.runtime.transport.hierarchical_group import HierarchicalGroup
from dslc.runtime.transport.shared_memory import NAME, OBSERVERS, PythonGroup, SharedMemoryGroup

SIZES = (0, 1, 7, SLOT_BYTES // 4 + 5)  # of float32: within a slot, and over several


def _numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(size) * 31 + 17 * rank) % 13).to(dtype)


def _collectives(rank: int, dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    """Returns the result of each collective. The numbers are such that sums are exact in any order."""
    ranks, own = dist.get_world_size(), _numbers(rank, size, dtype)
    results, of_all = [], _numbers(rank, ranks * size, dtype)
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        total = own.clone()
        dist.all_reduce(total, operation)
        results.append(total)
    parts = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(parts, own)
    whole = own.new_empty(ranks * size)
    dist.all_gather_single(whole, own)
    scattered, shares = torch.empty_like(own), torch.empty_like(own)
    dist.reduce_scatter_single(scattered, of_all)
    dist.reduce_scatter(shares, [of_all[n * size : (n + 1) * size] for n in range(ranks)])
    sent = own.clone()
    dist.broadcast(sent, ranks - 1)
    exchanged = torch.empty_like(of_all)
    dist.all_to_all_single(exchanged, of_all)
    total = own.clone()
    dist.reduce(total, 1)
    gathered = [torch.empty_like(own) for _ in range(ranks)] if rank == 1 else None
    dist.gather(own, gathered, 1)
    dist.scatter(received := torch.empty_like(own), parts if rank == 1 else None, 1)
    message = own.clone()
    if size:  # gloo waits for ever for a message without bytes
        sent_message = dist.isend(own, (rank + 1) % ranks)
        dist.recv(message, (rank - 1) % ranks)
        assert sent_message is not None
        sent_message.wait()
    reduced = [total] if rank == 1 else []
    return [*results, *parts, whole, scattered, shares, sent, exchanged, *reduced, *(gathered or []), received, message]


def _all_collectives(rank: int, kind: str) -> list[Any]:
    kinds = {"gloo": dist.ProcessGroup, "shared": SharedMemoryGroup, "hierarchy": HierarchicalGroup}
    assert isinstance(dist.group.WORLD, kinds[kind])
    assert kind != "gloo" or not isinstance(dist.group.WORLD, PythonGroup)
    cases = [(torch.float32, size) for size in SIZES] + [(torch.bfloat16, 7), (torch.int64, 7)]
    return [result.float().numpy() for case in cases for result in _collectives(rank, *case)]


def _same_as_gloos(ranks: int, of_node: int, kind: str) -> None:
    over_gloo = gang(ranks, _all_collectives, "gloo", backend="gloo")
    for mine, theirs in zip(gang(ranks, _all_collectives, kind, backend=NAME, of_node=of_node), over_gloo, strict=True):
        assert len(mine) == len(theirs) and all((a == b).all() for a, b in zip(mine, theirs, strict=True))


def _observed(rank: int) -> tuple[list[str], list[str]]:
    """Returns what observers have seen end before the last rank takes part in a sum, and afterwards."""
    ends: list[str] = []

    @contextmanager
    def observe(kind: str, ranks: int, tensors: object) -> Iterator[None]:
        yield
        ends.append(kind)

    OBSERVERS.append(observe)
    if rank == dist.get_world_size() - 1:
        dist.barrier()
    work: Any = dist.all_reduce(torch.ones(3), async_op=True)
    before = list(ends)
    if rank != dist.get_world_size() - 1:
        dist.barrier()
    work.wait()
    return before, list(ends)


def test_an_observer_of_a_collective_is_left_when_it_ends() -> None:
    seen = gang(4, _observed, backend=NAME, of_node=2)
    assert all(before == [] for before, _ in seen[:3])
    assert all(sorted(after) == ["all_reduce", "barrier"] for _, after in seen)


def test_every_collective_equals_gloos() -> None:
    _same_as_gloos(4, 2, "hierarchy")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "of_node", "kind"), [(6, 2, "hierarchy"), (6, 3, "hierarchy"), (3, 2, "gloo")])
def test_every_collective_equals_gloos_on_hosts_of_other_sizes(ranks: int, of_node: int, kind: str) -> None:
    """Hosts with unequal numbers of ranks use gloo alone."""
    _same_as_gloos(ranks, of_node, kind)


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torchs_own_engines_train_alike(sharded: bool) -> None:
    for mine, theirs in zip(
        gang(4, train_by_engine, sharded, HierarchicalGroup, backend=NAME, of_node=2),
        gang(4, train_by_engine, sharded, HierarchicalGroup, backend="gloo"),
        strict=True,
    ):
        assert mine == pytest.approx(theirs, rel=1e-6)


def _of_gradients(rank: int) -> str:
    """Returns the error of the backward pass in which the last rank ends."""
    model: Any = DistributedDataParallel(nn.Linear(3, 3))
    if rank == dist.get_world_size() - 1:
        os._exit(1)
    try:
        model(torch.ones(1, 3)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("work", [_of_gradients, pytest.param(sum_after_an_end, marks=pytest.mark.slow)])
def test_a_rank_that_waits_for_an_ended_one_says_so(work: Any) -> None:
    """Here the first rank, on the other host, by the end of ranks that wait in turn."""
    with pytest.raises(AssertionError, match="Connection closed by peer"):
        gang(4, work, backend=NAME, of_node=2)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_waited_for_until_the_timeout() -> None:
    assert "Timed out waiting" in gang(4, sum_without_the_last, backend=NAME, of_node=2)[0]


def _unable(rank: int) -> tuple[bool, float]:
    """Returns whether a group uses shared memory, and what it sums, where rank 1 cannot share memory."""
    if rank == 1:
        platform.machine = lambda: "riscv64"
    group: Any = dist.new_group()
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return isinstance(group, PythonGroup), total.item()


@pytest.mark.slow
def test_a_group_of_which_one_rank_cannot_share_is_gloos_on_every_host() -> None:
    assert gang(4, _unable, backend=NAME, of_node=2) == [(False, 4.0)] * 4
