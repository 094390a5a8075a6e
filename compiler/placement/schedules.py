"""Pipeline schedules: the order in which each pipeline rank runs its micro-batches.

Model. A pipeline of `ranks` ranks holds `ranks * virtual_stages` stages, and `placement` gives the rank of each stage:
looped (stage s on rank s mod p), or in a V (rank r holds stages r and 2p-1-r) for `zbv` and `dualpipev`. A rank runs
its row from left to right; a backward is either whole (B) or split into two gradients. The stage before waits for the
gradient of the input (I); nobody waits for the gradient of the weights (W), which can fill a gap.

| name               | work                                                                                          |
| ------------------ | --------------------------------------------------------------------------------------------- |
| `gpipe`            | Huang et al. 2019, arXiv:1811.06965: all forwards, then all backwards                         |
| `1f1b`             | PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503: activations bounded by the depth    |
| `interleaved_1f1b` | Narayanan et al. 2021, arXiv:2104.04473: v stages per rank, the bubble divided by v           |
| `looped_bfs`       | Lamy-Poirier 2023, arXiv:2211.05953: v stages per rank, breadth first: one stage at a time    |
| `zero_bubble`      | ZB-H1 of Qi et al. 2024, arXiv:2401.10241, interleaved: W fills the bubble                    |
| `zbv`              | ZB-V, section 6 of the same: a V; no bubble within a row where F, I and W take equally long   |
| `dualpipev`        | DualPipe, DeepSeek-V3 2024, arXiv:2412.19437, cut in half to a V: forwards overlap backwards  |

Contract. `demands` is complete: if it is empty, torch 2.13's schedule class and schedule runtime accept the same
numbers. `table` gives the very rows that torch builds, idle slots included (a test checks both). Costs and memory of a
table are in compiler/cost/schedule_cost.py.

Limits. One rank needs no schedule, and is refused. Idle slots are the schedule's own, drawn for unit costs; they say
nothing about real time. Torch cannot split the backward of a stage that went through `torch.compile`
(`SPLITS_BACKWARD`); compilation is not in the numbers that `demands` sees.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from dslc.dsl.language.blocks import SCHEDULES
from dslc.dsl.record import Record, record

Kind = Literal["F", "B", "I", "W", "FB"]


class ScheduledAction(NamedTuple):
    """One piece of a rank's work on one micro-batch at one stage.

    `kind`: F forward, B whole backward, I backward of the input, W backward of the weights, or FB: a forward and a
    whole backward of another micro-batch that may overlap. An FB names its two parts in `overlapped`, and carries the
    stage and micro-batch of the forward. Count work over `parts`, never over the FB itself.
    """

    kind: Kind
    stage: int
    microbatch: int
    overlapped: tuple[ScheduledAction, ...] = ()

    @property
    def parts(self) -> tuple[ScheduledAction, ...]:
        """The plain actions in order: itself, or the two of an overlapped pair."""
        return self.overlapped or (self,)

    def __str__(self) -> str:
        """Torch's notation: `3F0` is the forward of micro-batch 0 at stage 3."""
        if self.overlapped:
            return f"({';'.join(str(part) for part in self.overlapped)})OVERLAP_F_B"
        return f"{self.stage}{self.kind}{self.microbatch}"


Row = list[ScheduledAction | None]


@record
class ScheduleTable(Record):
    """A row of actions per pipeline rank, with None for an idle slot; and the pipeline rank of each stage."""

    name: str
    ranks: int
    virtual_stages: int
    microbatches: int
    rows: tuple[tuple[ScheduledAction | None, ...], ...]
    placement: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.ranks * self.virtual_stages

    def work(self, rank: int) -> Iterator[ScheduledAction]:
        """Yields the plain actions of a rank in order: no idle slots, overlapped pairs split."""
        for action in self.rows[rank]:
            if action is not None:
                yield from action.parts

    @property
    def has_forwards_first(self) -> bool:
        """True if each rank runs all its forward passes of a step before its first backward pass."""
        kinds = ("".join(action.kind for action in self.work(rank)) for rank in range(self.ranks))
        return all("F" not in row.lstrip("F") for row in kinds)


# -------------------------------------------------------------------------------------------- what a schedule asks for

NAMES: Final = SCHEDULES
SPLITS_BACKWARD: Final = frozenset({"zero_bubble", "zbv", "dualpipev"})
_ONE_STAGE: Final = frozenset({"gpipe", "1f1b"})
_V_SHAPED: Final = frozenset({"zbv", "dualpipev"})
_IN_ROUNDS: Final = frozenset({"interleaved_1f1b", "zero_bubble"})


def default_virtual_stages(name: str) -> int:
    """Returns the default of stages per rank."""
    return 1 if name in _ONE_STAGE else 2


def default_microbatches(name: str, ranks: int, virtual_stages: int) -> int:
    """Returns the default of micro-batches: the fewest, in whole rounds of `ranks`, that fill the pipeline.

    A V needs as many as it has stages; the others as many as there are ranks.
    """
    return ranks * virtual_stages if name in _V_SHAPED else ranks


def demands(name: str, ranks: int, microbatches: int, virtual_stages: int) -> tuple[str, ...]:
    """Returns every demand of the schedule that these numbers do not meet, in words; () if torch accepts them too."""
    unmet = []
    if ranks < 2:
        unmet.append(f"{name} needs at least 2 pipeline ranks: {ranks} < 2")
    if name in _ONE_STAGE and virtual_stages != 1:
        unmet.append(f"{name} has exactly 1 stage per rank, not {virtual_stages}")
    elif name in _V_SHAPED and virtual_stages != 2:
        unmet.append(f"{name} has exactly 2 stages per rank, not {virtual_stages}")
    elif virtual_stages < 1:
        unmet.append(f"{name} needs at least 1 stage per rank: {virtual_stages} < 1")
    if microbatches < 1:
        unmet.append(f"{name} needs at least 1 micro-batch: {microbatches} < 1")
    elif name == "1f1b" and microbatches < ranks:
        unmet.append(f"{name} needs at least as many micro-batches as stages: {microbatches} < {ranks}")
    elif name == "dualpipev" and microbatches < 2 * ranks:
        unmet.append(f"{name} needs at least as many micro-batches as stages, 2 per rank: {microbatches} < {2 * ranks}")
    elif name in _IN_ROUNDS and ranks >= 1 and microbatches % _rounds(ranks, microbatches):
        rounds = _rounds(ranks, microbatches)
        unmet.append(
            f"{name} on {ranks} ranks works through {microbatches} micro-batches in {rounds} equal rounds "
            f"({microbatches} // {ranks}): {microbatches} is not a multiple of {rounds}"
        )
    return tuple(unmet)


def accepted_microbatches(name: str, ranks: int, virtual_stages: int, wished: int) -> tuple[int, ...]:
    """Returns the accepted counts next to `wished`: itself alone if accepted, else the nearest below and above,
    ascending.

    Returns () if no count would do, because something else is wrong.
    """
    if demands(name, ranks, 2 * ranks, virtual_stages):  # two per rank suits every schedule
        return ()

    def first_accepted(candidates: range) -> tuple[int, ...]:
        return next(((m,) for m in candidates if not demands(name, ranks, m, virtual_stages)), ())

    start = max(wished, 0)
    above = first_accepted(range(start, start + 2 * ranks + 1))  # every multiple of `ranks` fits, from two per rank on
    return above if above == (wished,) else first_accepted(range(start - 1, 0, -1)) + above


def _rounds(ranks: int, microbatches: int) -> int:
    # The paper has rounds of as many micro-batches as ranks; torch takes a few more if they do not divide.
    return max(1, microbatches // ranks)


# -------------------------------------------------------------------------------------------------------------- tables


@lru_cache(maxsize=64)
def table(name: str, ranks: int, microbatches: int, virtual_stages: int) -> ScheduleTable:
    """Returns the table of a schedule whose `demands` are met: O(ranks * virtual_stages * microbatches), and cached."""
    unmet = demands(name, ranks, microbatches, virtual_stages)
    assert not unmet, "; ".join(unmet)
    rows = [_ROWS[name](rank, ranks, microbatches, virtual_stages) for rank in range(ranks)]
    if name == "zero_bubble":
        rows = _spaced(rows)
    return ScheduleTable(
        name=name,
        ranks=ranks,
        virtual_stages=virtual_stages,
        microbatches=microbatches,
        rows=tuple(map(tuple, rows)),
        placement=placement(name, ranks, virtual_stages),
    )


def placement(name: str, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    if name in _V_SHAPED:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * virtual_stages


def _gpipe(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Row:
    return [ScheduledAction(kind, rank, m) for kind in ("F", "B") for m in range(microbatches)]


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Row:
    warmup = ranks - 1 - rank  # forwards sent before the first backward can return
    row: Row = [ScheduledAction("F", rank, m) for m in range(warmup)]
    for m in range(microbatches):
        if m + warmup < microbatches:
            row.append(ScheduledAction("F", rank, m + warmup))
        row.append(ScheduledAction("B", rank, m))
    return row


def _looped_bfs(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Row:
    stages = range(rank, ranks * virtual_stages, ranks)
    row: Row = [None] * rank
    row += [ScheduledAction("F", stage, m) for stage in stages for m in range(microbatches)]
    row += [None] * (2 * (ranks - 1 - rank))
    row += [ScheduledAction("B", stage, m) for stage in reversed(stages) for m in reversed(range(microbatches))]
    return row


def _interleaved(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Row:
    forward, backward = _depth_first(rank, ranks, microbatches, virtual_stages)
    warmup = _warmup_forwards(rank, ranks, microbatches, virtual_stages, per_hop=2)
    row: Row = [None] * rank
    row += [ScheduledAction("F", *item) for item in forward[:warmup]]
    if warmup:  # the first backward returns after one pass over all stages and two slots per hop
        row += [None] * (ranks * virtual_stages + 2 * (ranks - 1 - rank) - warmup - rank)
    for k, item in enumerate(backward):
        row.append(ScheduledAction("F", *forward[k + warmup]) if k + warmup < len(forward) else None)
        row.append(ScheduledAction("B", *item))
    return row


def _zero_bubble(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Row:
    forward, backward = _depth_first(rank, ranks, microbatches, virtual_stages)
    # Half the lead of 1f1b suffices: the gap that a shorter lead opens is filled by W, put off by `rank` steps.
    warmup = _warmup_forwards(rank, ranks, microbatches, virtual_stages, per_hop=1)
    row: Row = [None] * rank
    row += [ScheduledAction("F", *item) for item in forward[:warmup]]
    row += [None] * (ranks - 1 - rank)
    for k, item in enumerate(backward):
        if k + warmup < len(forward):
            row.append(ScheduledAction("F", *forward[k + warmup]))
        row.append(ScheduledAction("I", *item))
        if k >= rank:
            row.append(ScheduledAction("W", *backward[k - rank]))
    row += [ScheduledAction("W", *item) for item in backward[max(0, len(backward) - rank) :]]
    return row


def _depth_first(
    rank: int, ranks: int, microbatches: int, virtual_stages: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns (stage, micro-batch) of a rank's forwards and backwards: in each round, stage by stage."""
    stages = range(rank, ranks * virtual_stages, ranks)
    size = microbatches // _rounds(ranks, microbatches)
    rounds = [range(start, start + size) for start in range(0, microbatches, size)]
    forward = [(stage, m) for members in rounds for stage in stages for m in members]
    backward = [(stage, m) for members in rounds for stage in reversed(stages) for m in members]
    return forward, backward


def _warmup_forwards(rank: int, ranks: int, microbatches: int, virtual_stages: int, *, per_hop: int) -> int:
    """Returns the forwards before the first backward: a round through all stages but the last, and the way back."""
    size = microbatches // _rounds(ranks, microbatches)
    return min((virtual_stages - 1) * size + per_hop * (ranks - 1 - rank), microbatches * virtual_stages)


def _spaced(rows: list[Row]) -> list[Row]:
    """Returns the same rows with an idle slot wherever a forward would lack its input, all ranks moving in step.

    Backwards are not waited for: torch draws this schedule's idle slots so, and a test compares the two.
    """
    forwards_done: set[tuple[int, int]] = set()  # forwards of the slots before this one
    rows_left = [deque(row) for row in rows]
    spaced: list[Row] = [[] for _ in rows]
    while any(rows_left):
        fresh = []
        for queue, row in zip(rows_left, spaced, strict=True):
            if not queue:
                continue
            head = queue[0]
            if head is not None and head.kind == "F":
                if head.stage and (head.stage - 1, head.microbatch) not in forwards_done:
                    row.append(None)
                    continue
                fresh.append((head.stage, head.microbatch))
            row.append(queue.popleft())
        forwards_done.update(fresh)
    return spaced


class _Writer:
    """Writes the row of a V: counts give the next micro-batch of each kind at each stage."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self._next: Counter[tuple[str, int]] = Counter()
        self._pending: deque[tuple[int, int]] = deque()  # inputs done whose weights are still pending, oldest first

    def take(self, kind: Kind, stage: int) -> ScheduledAction:
        """Returns the next micro-batch of that kind; B and I share one count."""
        count = ("F" if kind == "F" else "B", stage)
        action = ScheduledAction(kind, stage, self._next[count])
        self._next[count] += 1
        if kind == "I":
            self._pending.append((stage, action.microbatch))
        return action

    def add(self, kind: Kind, *stages: int) -> None:
        """Appends one action of that kind at each of the stages, in order."""
        self.row += [self.take(kind, stage) for stage in stages]

    def overlap(self, forward: int, backward: int) -> None:
        """Appends a forward at one stage that a whole backward at the other may overlap."""
        first_part = self.take("F", forward)
        self.row.append(
            ScheduledAction("FB", first_part.stage, first_part.microbatch, (first_part, self.take("B", backward)))
        )

    def weights(self, stage: int | None = None) -> None:
        """Appends the oldest pending weights, if any: of that stage, or of either."""
        for item in self._pending:
            if stage is None or item[0] == stage:
                self._pending.remove(item)
                self.row.append(ScheduledAction("W", *item))
                return


def _zbv(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Row:
    down, up = rank, 2 * ranks - 1 - rank  # the rank's stage on the way down the V, and on the way up
    full = max(microbatches, 2 * ranks - 1)  # laid out for a full pipeline; missing micro-batches stay idle
    write = _Writer([None] * rank)

    def backward(stage: int) -> None:
        write.add("I", stage)
        write.weights(stage)

    write.add("F", *[down] * (2 * (ranks - rank) - 1))
    write.add("F", *[up, down] * rank)
    for _ in range(ranks - rank):
        write.add("F", up)
        backward(up)
    forwards = 2 * ranks - 1 - rank  # on the way down so far
    for k in range(full - ranks):
        if forwards + k < full:
            write.add("F", down)
        backward(down)
        write.add("F", up)
        backward(up)
    # Drain: inputs first, since other ranks wait for them; the weights put off fill the end.
    write.add("I", *[down, up] * rank)
    for _ in range(ranks - rank):
        backward(down)
    for stage in (up, down):
        for _ in range(rank):
            write.weights(stage)
    return [a if a is not None and a.microbatch < microbatches else None for a in write.row]


def _dualpipev(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Row:
    down, up = rank, 2 * ranks - 1 - rank
    above = ranks - 1 - rank  # ranks between this one and the tip of the V
    write = _Writer([])
    # Fill the V, then trade the first backwards from the tip for forwards, their weights at once.
    write.add("F", *[down] * (2 * above))
    write.add("F", *[down, up] * (rank + 1))
    for _ in range(above):
        write.add("I", up)
        write.weights()
        write.add("F", up)
    # The steady state: every forward overlaps a backward of the other direction.
    for k in range(microbatches - 2 * ranks + rank + 1):
        if k == 0 and rank == ranks - 1:  # unpaired, the forward need not wait for a backward still on its way
            write.add("F", down)
            write.add("B", up)
        else:
            write.overlap(down, up)
        write.overlap(up, down)
    for _ in range(above):
        write.add("B", up)
        write.overlap(up, down)
    # Drain: half way through, backwards are split, and the weights put off fill the gaps at the end.
    drain = [up, down] * (rank + 1)
    write.add("B", *drain[: rank + 1])
    write.add("I", *drain[rank + 1 :])
    for _ in range(above):
        write.weights()
        write.add("I", down)
    for _ in range(rank + 1):
        write.weights()
    return write.row


_ROWS: Final[dict[str, Callable[[int, int, int, int], Row]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _interleaved,
    "looped_bfs": _looped_bfs,
    "zero_bubble": _zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
