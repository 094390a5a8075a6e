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


def row_without_pipeline(microbatches: int, reshard: bool, *, outputs_early: bool) -> Iterator[Issue]:
    """Yields the passes without a pipeline; parameters are freed after each backward pass, or after the last.
    `outputs_early`: the outputs of all micro-batches are made first, for a loss that compares them.
    """
    if outputs_early:
        yield from (Issue("E", 0, m) for m in range(microbatches))
    for m in range(microbatches):
        yield from (Issue("F", 0, m), Issue("B", 0, m))
        if reshard or m + 1 == microbatches:
            yield Issue("RESHARD", 0)


def _gathered(table: ScheduleTable, rank: int) -> list[Issue]:
    row = [Issue(*action) for action in table.rows[rank] if action is not None]
    in_memory: set[int] = set()
    issues: list[Issue] = []
    for issue, soon in zip(row, _next_stages(row), strict=True):
        released = [stage for stage in in_memory if stage not in soon]
        fresh = [stage for stage in soon if stage not in in_memory]
        issues += [Issue("RESHARD", stage) for stage in released]
        issues += [Issue("UNSHARD", stage) for stage in fresh]
        in_memory.difference_update(released)
        in_memory.update(fresh)
        issues.append(issue)
    return issues + [Issue("RESHARD", stage) for stage in in_memory]


def _next_stages(row: list[Issue]) -> list[list[int]]:
    """Returns for each entry the next `ACTIVE` stages in order of need, and one more if a pair brings in two."""
    next_stages: list[list[int]] = []
    needed: dict[int, int] = {}  # the next use of each stage, the last to be needed first
    for n in range(len(row) - 1, -1, -1):
        for part in reversed(row[n].parts):
            needed.pop(part.stage, None)
            needed[part.stage] = n
        soon = list(reversed(needed))
        next_stages.append(
            [stage for k, stage in enumerate(soon) if k < ACTIVE or needed[stage] == needed[soon[ACTIVE - 1]]]
        )
    return next_stages[::-1]


def _reduced(row: list[Issue], microbatches: int) -> list[Issue]:
    done_counts: Counter[int] = Counter()
    issues: list[Issue] = []
    for issue in row:
        issues.append(issue)
        for part in issue.parts:
            if part.kind in ("B", "W"):
                done_counts[part.stage] += 1
                if done_counts[part.stage] == microbatches:
                    issues.append(Issue("REDUCE_GRAD", part.stage))
    return issues


def _with_messages(table: ScheduleTable, rows: list[list[Issue]]) -> tuple[tuple[Issue, ...], ...]:
    rows_left = [deque(row) for row in rows]
    new_rows: list[list[Issue]] = [[] for _ in rows]
    inputs_present: list[set[tuple[str, int, int]]] = [set() for _ in rows]  # by the rank that takes them
    while any(rows_left):
        moved = False
        for rank, queue in enumerate(rows_left):
            if not queue or any(not _ready(table, part, inputs_present[rank]) for part in queue[0].parts):
                continue
            issue = queue.popleft()
            moved = True
            new_rows[rank].append(issue)
            for part in issue.parts:
                _hand_over(table, rank, part, new_rows, inputs_present)
        assert moved, f"{table.name}: the table waits for itself"
    return tuple(map(tuple, new_rows))


def _ready(table: ScheduleTable, part: Issue, inputs_present: set[tuple[str, int, int]]) -> bool:
    """True if an action's input from another stage is on its rank."""
    if part.kind == "F" and part.stage > 0:
        return ("F", part.stage, part.microbatch) in inputs_present
    if part.kind in ("B", "I") and part.stage < table.stages - 1:
        return ("B", part.stage, part.microbatch) in inputs_present
    return True


def _hand_over(
    table: ScheduleTable,
    rank: int,
    part: Issue,
    new_rows: list[list[Issue]],
    inputs_present: list[set[tuple[str, int, int]]],
) -> None:
    to = receiver(part.kind, part.stage, table.stages)
    if to is None:
        return
    way, home = ("F" if part.kind == "F" else "B"), table.placement[to]
    if home != rank:
        new_rows[rank].append(Issue(f"SEND_{way}", part.stage, part.microbatch))
        new_rows[home].append(Issue(f"RECV_{way}", to, part.microbatch))
    inputs_present[home].add((way, to, part.microbatch))


def receiver(kind: str, stage: int, stages: int) -> int | None:
    """Returns the stage that takes an action's result: the next one forward, the one before backward."""
    if kind == "F":
        return stage + 1 if stage + 1 < stages else None
    return stage - 1 if kind in ("B", "I") and stage > 0 else None
