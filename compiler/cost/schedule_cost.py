"""The cost of a schedule table: step time, bubble, and memory of activations.

Model of time. A rank runs its row in order and starts an action once its input has arrived. A forward needs the stage
before; a B or I needs the stage after (at the last stage, its own forward); a W only follows its I. A message to
another rank arrives `send` later and costs the sender nothing; within a rank it arrives at once. Idle slots of the
table are skipped: the simulation yields the waiting.

Two facts of torch 2.13's schedule runtime are part of the model. The parts of an overlapped pair run one after the
other, and their results leave after the second. And at the first stage I is a no-op, and W is the whole backward.

Model of memory. A micro-batch's activations at a stage are held from its F to its B, or to its W if the backward is
split. After I, torch still holds all of them, and also the gradients at the layers with weights. Measured on two
pre-norm transformer blocks, these are 0.68 times the activations; at the first stage, only the gradient it received. A
caller gives this figure as `between`, and adds what an action works in. Peaks follow from the order alone, so they hold
for any speed. Buffers of transfers, and the outputs that torch returns from the last stage, are not counted.

Limits. Every micro-batch costs the same; links do not contend; overlapping actions do not slow each other down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from dslc.compiler.placement.schedules import ScheduledAction, ScheduleTable
from dslc.dsl.record import Record, record
from dslc.dsl.sums import float_sum


class TimedAction(NamedTuple):
    """A plain action (never an overlapped pair) with its start and end."""

    action: ScheduledAction
    start: float
    end: float


@record
class Timeline(Record):
    """One step: its length, each rank's busy time, the mean idle share, and the spans of each rank in order."""

    total: float
    busy: tuple[float, ...]
    bubble: float
    spans: tuple[tuple[TimedAction, ...], ...]


def timeline(
    table: ScheduleTable,
    forward: Sequence[float],
    backward: Sequence[float],
    send: float = 0.0,
    input_share: Sequence[float] | None = None,
) -> Timeline:
    """Simulates one step of a table; all times in one unit of the caller's.

    `forward` and `backward` are a stage's seconds per micro-batch (the backward with its recomputation), `send` the
    seconds from one rank to another. `input_share` is the fraction of a stage's backward that I takes if it is split;
    by default torch's: none at the first stage, half elsewhere. Linear in the actions. A table whose actions wait for
    each other in a circle is a bug of its maker: AssertionError.
    """
    assert len(forward) == len(backward) == table.stages, "one cost per stage"
    share = input_share if input_share is not None else (0.0, *(0.5,) * (table.stages - 1))
    cost = {
        "F": forward,
        "B": backward,
        "I": [b * s for b, s in zip(backward, share, strict=True)],
        "W": [b * (1 - s) for b, s in zip(backward, share, strict=True)],
    }
    spans = _simulate(table, cost, send)
    total = max((row[-1].end for row in spans if row), default=0.0)
    busy = tuple(float_sum(span.end - span.start for span in row) for row in spans)
    bubble = 1 - float_sum(busy) / (len(busy) * total) if total else 0.0
    return Timeline(total=total, busy=busy, bubble=bubble, spans=tuple(map(tuple, spans)))


def _simulate(table: ScheduleTable, cost: dict[str, Sequence[float]], send: float) -> list[list[TimedAction]]:
    rows = [[action.parts for action in row if action is not None] for row in table.rows]
    edges = _Edges(table, send)
    spans: list[list[TimedAction]] = [[] for _ in rows]
    positions = [0] * len(rows)
    clock = [0.0] * len(rows)
    ready = list(range(len(rows)))
    while ready:  # a rank goes on until an input is missing; the action that delivers it makes the rank ready again
        rank = ready.pop()
        row, mine, now = rows[rank], spans[rank], clock[rank]
        while positions[rank] < len(row):
            parts = row[positions[rank]]
            if edges.missing(parts, rank):
                break
            for action in parts:
                start = max(now, edges.arrival(action))
                now = start + cost[action.kind][action.stage]
                mine.append(TimedAction(action, start, now))
            for action in parts:
                woken = edges.deliver(action, now)
                if woken is not None:
                    ready.append(woken)
            positions[rank] += 1
        clock[rank] = now
    stuck = [f"rank {r} at {row[n][0]}" for r, (row, n) in enumerate(zip(rows, positions, strict=True)) if n < len(row)]
    assert not stuck, f"{table.name}: the table waits for itself: {', '.join(stuck)}"
    return spans


class _Edges:
    """Inputs of all forwards, then of all backwards, by stage and micro-batch: the time of arrival, and the waiting
    rank.
    """

    def __init__(self, table: ScheduleTable, send: float) -> None:
        self._size = table.microbatches
        self._stages = table.stages
        self._arrives: list[float | None] = [None] * (2 * self._stages * self._size)
        self._arrives[: self._size] = [0.0] * self._size  # the data is there for the first stage
        self._waiting: dict[int, int] = {}
        self._delay = [send if a != b else 0.0 for a, b in pairwise(table.placement)]  # from stage s to s + 1, and back

    def _input(self, action: ScheduledAction) -> int | None:
        if action.kind == "W":
            return None
        return (action.stage + (0 if action.kind == "F" else self._stages)) * self._size + action.microbatch

    def missing(self, parts: tuple[ScheduledAction, ...], rank: int) -> bool:
        """True if an input is not yet on its way; the rank is then recorded as waiting for it."""
        for action in parts:
            slot = self._input(action)
            if slot is not None and self._arrives[slot] is None:
                self._waiting[slot] = rank
                return True
        return False

    def arrival(self, action: ScheduledAction) -> float:
        slot = self._input(action)
        return 0.0 if slot is None else self._arrives[slot] or 0.0

    def deliver(self, action: ScheduledAction, now: float) -> int | None:
        """Delivers the result of an action; returns the rank that waited for it, if one did."""
        stage, first_stage, last_stage = action.stage, 0, self._stages - 1
        if action.kind == "F":
            # The last stage's forward is the input of its own backward, which follows its stages in the numbering.
            to, delay = (stage + 1, self._delay[stage]) if stage < last_stage else (self._stages + last_stage, 0.0)
        elif action.kind != "W" and stage > first_stage:
            to, delay = self._stages + stage - 1, self._delay[stage - 1]
        else:
            return None
        slot = to * self._size + action.microbatch
        self._arrives[slot] = now + delay
        return self._waiting.pop(slot, None)


def microbatches_in_flight(table: ScheduleTable) -> tuple[int, ...]:
    """Returns for each stage the most micro-batches whose activations it holds at once."""
    now = [0] * table.stages
    most = [0] * table.stages
    for rank in range(table.ranks):
        for action in table.work(rank):
            if action.kind == "F":
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.kind != "I":
                now[action.stage] -= 1
    return tuple(most)


@record
class HeldBytes(Record):
    """Bytes of one micro-batch, by stage.

    `kept` is held from F to B or I, `between` from I to W. The `output` and the `gradient` of the input are sent to
    another rank. They stay until the end of the step, where torch waits for the messages.
    """

    kept: Sequence[float]
    between: Sequence[float]
    output: Sequence[float] = ()
    gradient: Sequence[float] = ()

    def microbatch_bytes(self, action: ScheduledAction) -> float:
        """Returns the bytes of the micro-batch that an action works on: after F, and before the others."""
        return (self.between if action.kind == "W" else self.kept)[action.stage]

    def sent_bytes(self, action: ScheduledAction) -> float:
        sizes = {"F": self.output, "B": self.gradient, "I": self.gradient}.get(action.kind)
        return sizes[action.stage] if sizes else 0.0


def bytes_beside(table: ScheduleTable, rank: int, held_bytes: HeldBytes) -> Iterator[tuple[ScheduledAction, float]]:
    """Yields the actions of a rank, with the bytes of activations that it holds beside the action's own."""
    assert len(held_bytes.kept) == table.stages, "one size per stage"
    now = 0.0
    for action in table.work(rank):
        own_bytes = held_bytes.microbatch_bytes(action)
        if action.kind == "F":
            yield action, now
            now += own_bytes
        else:
            yield action, now - own_bytes
            now += (held_bytes.between[action.stage] if action.kind == "I" else 0.0) - own_bytes
        now += held_bytes.sent_bytes(action)
