"""The ranks among which an exchange takes place, and the collectives of a bucket, one after another.

Model: an exchange has members. Each rank is one; or, if it is hierarchical, each node: its ranks hold the same, and
each exchanges a piece with the ranks at its place in other nodes. All ranks begin the collectives of their buckets in
one order, so that no two wait for one another.

Contract: groups of an exchange are its own, so that its collectives never come between collectives of the training.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from dslc.compiler.ir.program import ExchangeStep, JobProgram
from dslc.compiler.placement.buckets import LONGEST


class PendingWork(Protocol):
    """A thing to wait for: a collective, or several."""

    def wait(self) -> object: ...


# Takes a bucket's numbers, or a piece of them, and the bucket's index.
Rule = Callable[[Tensor, int], Iterator[PendingWork]]


@dataclass(frozen=True, kw_only=True)
class ExchangeGroups:
    """`everyone` are all ranks; `near` the `pieces` ranks of this rank's node, if they are one member. `far` has, of
    each of the `members`, the rank that exchanges the same piece. This rank is in `member`, and `piece` is its piece.
    """

    everyone: dist.ProcessGroup
    near: dist.ProcessGroup | None
    far: dist.ProcessGroup
    ranks: int
    members: int
    member: int
    pieces: int
    piece: int


def make_exchange_groups(job: JobProgram, step: ExchangeStep) -> ExchangeGroups:
    """Makes the groups of an exchange. All ranks call it, as making a group is a collective."""
    ranks, pieces, rank = job.world_size, step.pieces, dist.get_rank()
    member, piece = divmod(rank, pieces)
    everyone = group_of(job)
    near, far = None, everyone
    if pieces > 1:
        near = group_of_node(job, pieces)
        places = [group_of(job, range(first, ranks, pieces)) for first in range(pieces)]
        far = places[piece]
    return ExchangeGroups(
        everyone=everyone,
        near=near,
        far=far,
        ranks=ranks,
        members=ranks // pieces,
        member=member,
        pieces=pieces,
        piece=piece,
    )


def group_of(job: JobProgram, ranks: Iterable[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """Makes a group of these ranks, or of all, that waits as long as the job says. All ranks call it."""
    members = None if ranks is None else list(ranks)
    made: dist.ProcessGroup = dist.new_group(members, timeout=datetime.timedelta(seconds=job.timeout), backend=backend)
    return made


def group_of_node(job: JobProgram, pieces: int, backend: str | None = None) -> dist.ProcessGroup:
    """Makes the groups of each `pieces` ranks, and returns the group of this rank. All ranks call it."""
    nodes = [group_of(job, range(n, n + pieces), backend) for n in range(0, job.world_size, pieces)]
    return nodes[dist.get_rank() // pieces]


class WorkGroup:
    """Several collectives that are waited for together."""

    def __init__(self, works: Iterable[PendingWork]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def in_turn(*ways: tuple[Callable[..., object], Tensor, int], group: dist.ProcessGroup) -> PendingWork:
    """Begins to send and receive as many numbers each way, in short messages in turn: gloo takes almost twice as long
    for long ones that cross. A way is `dist.isend` or `dist.irecv`, the numbers, and the other rank in the group.
    """
    messages = [
        [dist.P2POp(way, part, group=group, group_peer=other) for part in numbers.view(-1).split(_most(numbers))]
        for way, numbers, other in ways
    ]
    return WorkGroup(dist.batch_isend_irecv([each for turn in zip(*messages, strict=True) for each in turn]))


def _most(numbers: Tensor) -> int:
    return LONGEST // numbers.element_size()


class BucketQueue:
    """The rules of buckets that are under way, the oldest first. `around` makes the context for what they do."""

    def __init__(self) -> None:
        self.going: list[tuple[Iterator[PendingWork], PendingWork]] = []
        self.around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    def begin(self, steps: Iterator[PendingWork]) -> None:
        """Takes the buckets that are under way one step further, then begins with another."""
        self._further()
        self._enter(steps)

    def also(self, steps: Iterator[PendingWork]) -> None:
        """Begins with a bucket, and waits for no other."""
        self._enter(steps)

    def finish(self) -> None:
        while self.going:
            self._further()

    def _further(self) -> None:
        going, self.going = self.going, []
        for steps, waited in going:
            waited.wait()
            self._enter(steps)

    def _enter(self, steps: Iterator[PendingWork]) -> None:
        with self.around():
            waited = next(steps, None)
        if waited is not None:
            self.going.append((steps, waited))


def mean(tensor: Tensor, group: dist.ProcessGroup, ranks: int) -> Iterator[PendingWork]:
    """Makes `tensor` the mean over the ranks of a group, in place."""
    yield dist.all_reduce(tensor, group=group, async_op=True)
    tensor.div_(ranks)


def between_nodes(rule: Rule, where: ExchangeGroups, *, alike: bool) -> Rule:
    """Returns `rule` for the numbers of a whole bucket, a multiple of the pieces: of a hierarchical exchange it is
    applied to this rank's piece. `alike`: the ranks of a node hold the same numbers; else they are summed to a mean
    first.
    """
    if where.near is None:
        return rule
    near = where.near

    def hierarchical_rule(bucket: Tensor, index: int) -> Iterator[PendingWork]:
        piece = bucket.view(where.pieces, -1)[where.piece]
        if not alike:
            piece = piece.new_empty(piece.shape)
            yield dist.reduce_scatter_single(piece, bucket, group=near, async_op=True)
            piece.div_(where.pieces)
        yield from rule(piece, index)
        yield dist.all_gather_single(bucket, piece.clone() if alike else piece, group=near, async_op=True)

    return hierarchical_rule
