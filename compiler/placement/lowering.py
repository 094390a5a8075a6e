"""Lowers a schedule table as torch's schedule runtime does: adds sends, receives, and the gathering of stages.

Model. `_PipelineScheduleRuntime` (torch 2.13) gets the compute actions of each rank, and inserts the actions that they
need:

    SEND_F, RECV_F     a stage's output, from the rank that made it to the rank of the next stage
    SEND_B, RECV_B     the gradient of a stage's input, to the rank of the stage before
    UNSHARD, RESHARD   a stage's parameters are gathered under `fully_shard`, and freed: the next `ACTIVE` are present
    REDUCE_GRAD        a stage's gradients are reduced, after the last of its backwards

It takes one action of each rank in turn, again and again, and skips a rank whose next action has no input yet. The rank
that makes an output appends both ends of its message: the send to its own row, the receive to the other's. So all rows
together have one common order in which both ends of every message are neighbours: this is why no such plan hangs, even
if a send waits for its receive. `verify` proves it again for each plan, from the rows alone.

Contract. `lowered` gives the very rows that torch makes of the same table (a test checks that). Stages of one rank pass
values without a message.

Limits. Torch's own sends do not wait: they are finished at the end of a step. Torch 2.15 also finishes a send when its
gradient has come back. It has an entry for the end of a reduction, after which receives may come one entry later.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

from dslc.compiler.placement.schedules import ScheduledAction, ScheduleTable

ACTIVE = 3  # stages whose parameters are present at once


class Issue(NamedTuple):
    """One entry of a rank's row: an action of the table, or one inserted for it. `microbatch` is -1 if the entry
    concerns a whole stage.
    """

    kind: str
    stage: int
    microbatch: int = -1
    overlapped: tuple[ScheduledAction, ...] = ()

    @property
    def parts(self) -> tuple[Issue, ...]:
        """The two actions of an overlapped pair; else itself."""
        return tuple(Issue(p.kind, p.stage, p.microbatch) for p in self.overlapped) or (self,)

    def __str__(self) -> str:
        """Torch's notation: `1RECV_F0`, `0UNSHARD`."""
        if self.overlapped:
            return str(ScheduledAction("FB", self.stage, self.microbatch, self.overlapped))
        return f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"


def lowered(table: ScheduleTable) -> tuple[tuple[Issue, ...], ...]:
    """Returns the rows of `table` with torch's insertions; AssertionError if the table waits for itself."""
    return _with_messages(table, [row_of(table, rank) for rank in range(table.ranks)])


def row_of(table: ScheduleTable, rank: int) -> list[Issue]:
    """Returns the row of a rank without its messages."""
    return _reduced(_gathered(table, rank), table.microbatches)


def row_without_pipeline(microbatches: int, reshard: bool, *, ahead: bool) -> Iterator[Issue]:
    """Yields the passes without a pipeline; parameters are freed after each backward pass, or after the last. `ahead`:
    the outputs of all micro-batches are made first, for a loss that compares them.
    """
    if ahead:
        yield from (Issue("E", 0, m) for m in range(microbatches))
    for m in range(microbatches):
        yield from (Issue("F", 0, m), Issue("B", 0, m))
        if reshard or m + 1 == microbatches:
            yield Issue("RESHARD", 0)


def _gathered(table: ScheduleTable, rank: int) -> list[Issue]:
    row = [Issue(*action) for action in table.rows[rank] if action is not None]
    there: set[int] = set()
    found: list[Issue] = []
    for issue, soon in zip(row, _next_stages(row), strict=True):
        gone = [stage for stage in there if stage not in soon]
        fresh = [stage for stage in soon if stage not in there]
        found += [Issue("RESHARD", stage) for stage in gone]
        found += [Issue("UNSHARD", stage) for stage in fresh]
        there.difference_update(gone)
        there.update(fresh)
        found.append(issue)
    return found + [Issue("RESHARD", stage) for stage in there]


def _next_stages(row: list[Issue]) -> list[list[int]]:
    """Returns for each entry the next `ACTIVE` stages in order of need, and one more if a pair brings in two."""
    found: list[list[int]] = []
    needed: dict[int, int] = {}  # the next use of each stage, the last to be needed first
    for n in range(len(row) - 1, -1, -1):
        for part in reversed(row[n].parts):
            needed.pop(part.stage, None)
            needed[part.stage] = n
        soon = list(reversed(needed))
        found.append([stage for k, stage in enumerate(soon) if k < ACTIVE or needed[stage] == needed[soon[ACTIVE - 1]]])
    return found[::-1]


def _reduced(row: list[Issue], microbatches: int) -> list[Issue]:
    done: Counter[int] = Counter()
    found: list[Issue] = []
    for issue in row:
        found.append(issue)
        for part in issue.parts:
            if part.kind in ("B", "W"):
                done[part.stage] += 1
                if done[part.stage] == microbatches:
                    found.append(Issue("REDUCE_GRAD", part.stage))
    return found


def _with_messages(table: ScheduleTable, rows: list[list[Issue]]) -> tuple[tuple[Issue, ...], ...]:
    left = [deque(row) for row in rows]
    made: list[list[Issue]] = [[] for _ in rows]
    there: list[set[tuple[str, int, int]]] = [set() for _ in rows]  # inputs present on the rank that takes them
    while any(left):
        moved = False
        for rank, queue in enumerate(left):
            if not queue or any(not _ready(table, part, there[rank]) for part in queue[0].parts):
                continue
            issue = queue.popleft()
            moved = True
            made[rank].append(issue)
            for part in issue.parts:
                _hand_over(table, rank, part, made, there)
        assert moved, f"{table.name}: the table waits for itself"
    return tuple(map(tuple, made))


def _ready(table: ScheduleTable, part: Issue, there: set[tuple[str, int, int]]) -> bool:
    """True if an action's input from another stage is on its rank."""
    if part.kind == "F" and part.stage > 0:
        return ("F", part.stage, part.microbatch) in there
    if part.kind in ("B", "I") and part.stage < table.stages - 1:
        return ("B", part.stage, part.microbatch) in there
    return True


def _hand_over(
    table: ScheduleTable, rank: int, part: Issue, made: list[list[Issue]], there: list[set[tuple[str, int, int]]]
) -> None:
    to = receiver(part.kind, part.stage, table.stages)
    if to is None:
        return
    way, home = ("F" if part.kind == "F" else "B"), table.placement[to]
    if home != rank:
        made[rank].append(Issue(f"SEND_{way}", part.stage, part.microbatch))
        made[home].append(Issue(f"RECV_{way}", to, part.microbatch))
    there[home].add((way, to, part.microbatch))


def receiver(kind: str, stage: int, stages: int) -> int | None:
    """Returns the stage that takes an action's result: the next one forward, the one before backward."""
    if kind == "F":
        return stage + 1 if stage + 1 < stages else None
    return stage - 1 if kind in ("B", "I") and stage > 0 else None
