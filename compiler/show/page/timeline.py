"""The step over time as data, for a cursor in the schedule: what each drawn row does and holds at a moment.

A plan has what a rank holds between two steps (`MemoryNode.rest`), and the activations that it keeps at a moment for
the backward pass (`StageNode.kept`), as in the strips of the picture. Where the job was analysed, each pass also has
the most that the rank holds during it (memory_moments.py): with what layers work in, gradients made in the step and
gathered parameters. A plan alone does not have that.
"""

from __future__ import annotations

from collections.abc import Sequence

from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.describe import axis_of
from dslc.compiler.show.page.memory_moments import MemoryMoments
from dslc.compiler.show.schedule import ScheduleBox, known_times, schedule_layout
from dslc.dsl.record import Record, record


@record
class TimelineRow(Record):
    """A drawn row of the schedule: ranks `first` to `last` at one pipeline coordinate.

    `passes` are (kind, stage, micro-batch, start, end, most bytes), the last None where it is not known; `held` are
    (start, end, micro-batches, bytes of activations). `rest` is the memory between two steps, and `peak` the highest,
    at `moment`, of the ranks that hold most; None where the plan does not know.
    """

    pipeline: int
    first: int
    last: int
    rest: int | None
    peak: int | None
    moment: str
    passes: tuple[tuple[str, int, str, float, float, int | None], ...]
    held: tuple[tuple[float, float, int, int], ...]


@record
class PageTimeline(Record):
    """`spans` are the parts of a row that show times: their ends from the row's left edge, and the times there. Times
    are seconds where `timed`, else in units of the mean forward pass.
    """

    timed: bool
    total: float
    spans: tuple[tuple[float, float, float, float], ...]
    rows: tuple[TimelineRow, ...]


def timeline(plan: PlanView, moments: Sequence[MemoryMoments] = ()) -> PageTimeline:
    """Returns the step as the schedule view draws it, with the memory of its moments by pipeline coordinate."""
    layout = schedule_layout(plan)
    ranks_of_row = plan.world_size // axis_of(plan, "pipeline").size
    rows = []
    for number in layout.visible_rows:
        if number is None:
            continue
        nodes = [node.memory for node in plan.ranks if node.pipeline == number]
        memory = max(nodes, key=lambda node: node.peak, default=None)
        memories = moments[number] if moments else None
        rows.append(
            TimelineRow(
                pipeline=number,
                first=number * ranks_of_row,
                last=(number + 1) * ranks_of_row - 1,
                rest=memory.rest if memory else None,
                peak=memory.peak if memory else None,
                moment=memory.moment if memory else "",
                passes=tuple(
                    (box.kind, box.stage, box.text, _short(box.start), _short(box.end), _most_bytes(box, memories))
                    for box in layout.rows[number]
                ),
                held=tuple((_short(h.start), _short(h.end), h.pieces, h.bytes) for h in layout.held[number]),
            )
        )
    return PageTimeline(
        timed=known_times(plan) is not None,
        total=_short(layout.window.total),
        spans=tuple((_short(a), _short(b), _short(c), _short(d)) for a, b, c, d in layout.window.spans),
        rows=tuple(rows),
    )


def _most_bytes(box: ScheduleBox, moments: MemoryMoments | None) -> int | None:
    if moments is None:
        return None
    if box.kind == "E":
        return moments.ahead
    if len(box.kind) > 1:  # the exchange, the update and the rest of the step
        return moments.end
    return moments.actions.get((box.kind, box.stage, int(box.text)))


def _short(value: float) -> float:
    """Returns the number to seven digits, which keep the page small."""
    return float(f"{value:.7g}")
