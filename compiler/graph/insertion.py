"""Inserts the operations of a rank among the actions of its process.

An operation says beside which actions it stands. Its count and bytes are divided over them, so that the sums are kept.
All ranks of a process do the same, so all of them issue the collectives at one place in the same order; the order of
the operations within one action is torch's own, and the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dslc.compiler.ir.actions import Action, Collective, StageAction
from dslc.compiler.operations.moments import StepOperation


class InsertionPoint(NamedTuple):
    """Before or after the action at `position` of a line."""

    position: int
    after: bool


def insertions(
    process: int, operation: StepOperation, line: Sequence[Action]
) -> Iterator[tuple[InsertionPoint, Collective]]:
    """Yields the actions that an operation becomes, each with its place in the line of the process."""
    points = _points(operation, line)
    assert points, f"no action of process {process} has {operation} beside it"
    for n, point in enumerate(points):
        before, after = (operation.count * m // len(points) for m in (n, n + 1))
        size = operation.bytes * after // operation.count - operation.bytes * before // operation.count
        if after > before:
            yield (
                point,
                Collective(
                    process=process,
                    operation=operation.operation,
                    axis=operation.axis,
                    carries=operation.what,
                    dtype=operation.dtype,
                    count=after - before,
                    bytes=size,
                    ranks=operation.ranks,
                    stride=operation.stride,
                    weights=operation.weights,
                    when=operation.when,
                ),
            )


def _points(operation: StepOperation, line: Sequence[Action]) -> list[InsertionPoint]:
    moment, stage = operation.moment, operation.stage
    positions = [
        n
        for n, action in enumerate(line)
        if isinstance(action, moment.kinds)
        and (stage is None or (isinstance(action, StageAction) and action.stage == stage))
    ]
    if operation.occurrences is not None:
        positions = [positions[n] for n in operation.occurrences]
    chosen = {"each": positions, "first": positions[:1], "last": positions[-1:]}[moment.which]
    return [InsertionPoint(n, moment.after) for n in chosen]
