"""Inserts the operations of a rank among the actions of its process.

An operation says beside which actions it stands. Its count and bytes are divided over them, so that the sums are kept.
All ranks of a process do the same, so all of them issue the collectives at one place in the same order; the order of
the operations within one action is torch's own, and the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dslc.compiler.ir.records import Action
from dslc.compiler.operations.moments import Operation


class InsertionPoint(NamedTuple):
    """Before or after the action at `position` of a line."""

    position: int
    after: bool


def insertions(process: int, operation: Operation, line: Sequence[Action]) -> Iterator[tuple[InsertionPoint, Action]]:
    """Yields the actions that an operation becomes, each with its place in the line of the process."""
    points = _points(operation, line)
    assert points, f"no action of process {process} has {operation} beside it"
    for n, point in enumerate(points):
        before, after = (operation.count * m // len(points) for m in (n, n + 1))
        size = operation.bytes * after // operation.count - operation.bytes * before // operation.count
        if after > before:
            yield (
                point,
                Action(
                    process=process,
                    what=operation.operation,
                    axis=operation.axis,
                    carries=operation.what,
                    dtypes=(operation.dtype,),
                    count=after - before,
                    bytes=size,
                    ranks=operation.ranks,
                    stride=operation.stride,
                    weights=operation.weights,
                    when=operation.when,
                ),
            )


def _points(operation: Operation, line: Sequence[Action]) -> list[InsertionPoint]:
    moment, stage = operation.moment, operation.stage
    positions = [n for n, a in enumerate(line) if a.what in moment.kinds and stage in (None, a.stage)]
    if operation.occurrences is not None:
        positions = [positions[n] for n in operation.occurrences]
    chosen = {"each": positions, "first": positions[:1], "last": positions[-1:]}[moment.which]
    return [InsertionPoint(n, moment.after) for n in chosen]
