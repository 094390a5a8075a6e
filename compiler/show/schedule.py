"""A step over time: a row for each pipeline coordinate, a box for each forward and backward of a micro-batch.

Lengths are the predicted times, where a plan has them; a time that nobody measured is left out. Else they are by the
stages' FLOPs, with the backward twice as long as the forward, since a plan keeps their sum. The exchange of gradients
and the update then have a fixed length. Bubbles are white, and a rank's idle share stands at the end of its row. A long
step is shown by its beginning and its end. Without a pipeline there is one row: micro-batches one after another.

The strip under a row shows the activations that the rank holds at each moment, relative to the most that any rank
holds. A micro-batch's activations at a stage are held from its forward until its backward (or the backward of the
weights) is done. Beside the strip stands the most that this rank holds, and of how many micro-batches, counted at each
of its stages.
"""

from __future__ import annotations

import itertools

from dslc.compiler.cost.schedule_cost import timeline
from dslc.compiler.ir.number_text import byte_text, percent_text, time_text
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.ir.records import Estimate
from dslc.compiler.show.canvas import FAINT, GREY, MEMORY_COLOURS, Canvas
from dslc.compiler.show.describe import axis_of, bound_text, class_of, known_text, schedule_table, span_text
from dslc.compiler.show.legend import HEADING, heading
from dslc.dsl.record import Record, record
from dslc.dsl.sums import float_sum
from dslc.dsl.words import plural

LABEL, WIDTH, ROW, STRIP, PITCH = 116, 1000, 26, 16, 54
BESIDE = 118  # width of the text at the end of a row
LEAST = 13  # width of a short box
PIECES = 44  # boxes of a row that are shown before any are left out
SHOWN_ROWS = 12
COLOURS = {  # by kind, the first two stages of a rank
    "E": ("#c9e5f7", "#c9e5f7"),
    "F": ("#8cc8ee", "#c9e5f7"),
    "B": ("#eeb85a", "#f7ddb0"),
    "I": ("#eeb85a", "#f7ddb0"),
    "W": ("#6cc3a8", "#bfe5d9"),
    "exchange": ("#ecb08a", "#ecb08a"),
    "update": (GREY, GREY),
    "rest": ("#eeeeee", "#eeeeee"),
}
NAMES = {
    "E": "outputs ahead",
    "F": "forward",
    "B": "backward",
    "I": "backward of the input",
    "W": "backward of the weights",
}


@record
class ScheduleBox(Record):
    """One box of a row, times in seconds or, where they are by FLOPs, in units of the mean forward."""

    kind: str
    stage: int
    text: str
    start: float
    end: float


@record
class HeldActivations(Record):
    """The activations of a rank between two moments: their bytes, and the micro-batches at its stages that they belong
    to.
    """

    start: float
    end: float
    pieces: int
    bytes: int


def draw_schedule(plan: PlanView) -> str:
    """Returns the picture as DOT text."""
    canvas = Canvas(plan.job)
    layout = schedule_layout(plan)
    rows, window = layout.rows, layout.window
    peak_bytes = max((span.bytes for spans in layout.held for span in spans), default=0)
    y: float = HEADING + 34
    canvas.write("caption", 0, HEADING + 6, LABEL + WIDTH, _caption(plan), size=10.5)
    for place, number in enumerate(layout.visible_rows):
        top = y + place * PITCH
        if number is None:
            more = len(rows) - len(layout.visible_rows) + 1
            canvas.write("more rows", 0, top + 16, 200, f"… {more} more", size=10, ink=FAINT)
            continue
        _draw_row(canvas, plan, number, rows[number], top, window)
        _draw_held(canvas, number, layout.held[number], peak_bytes, top + ROW + 2, window)
        _draw_end(canvas, number, layout.idle[number], layout.held[number], LABEL + window.width + 8, top)
    y += len(layout.visible_rows) * PITCH
    time_label = f"{time_text(window.total)}{bound_text(plan)}" if known_times(plan) else "time"
    canvas.write("time", LABEL, y, window.width, time_label, size=9.5, align="r", ink=FAINT)
    _legend(canvas, rows, peak_bytes, y + 18, is_timed=known_times(plan) is not None)
    heading(canvas, plan, LABEL + window.width + BESIDE)
    return canvas.text()


@record
class TimeWindow(Record):
    """The times that are shown, and their places."""

    total: float
    scale: float

    GAP = 46

    @property
    def fits_width(self) -> bool:
        return self.total * self.scale <= 1.5 * WIDTH

    @property
    def width(self) -> float:
        return self.total * self.scale if self.fits_width else WIDTH

    def places(self, start: float, end: float) -> list[tuple[float, float]]:
        """Returns the beginning and end of a piece, or of its visible parts."""
        left, right = start * self.scale, end * self.scale
        if self.fits_width:
            return [(left, right)]
        half_width, cut_width = (WIDTH - self.GAP) / 2, self.total * self.scale - WIDTH
        intervals = []
        if left < half_width:
            intervals.append((left, min(right, half_width)))
        if right - cut_width > half_width + self.GAP:
            intervals.append((max(left - cut_width, half_width + self.GAP), right - cut_width))
        return intervals

    @property
    def spans(self) -> list[tuple[float, float, float, float]]:
        """The parts of a row that show times: the places where each begins and ends, and the times there."""
        parts = self.places(0.0, self.total)
        if self.fits_width:
            return [(*parts[0], 0.0, self.total)]
        (left, cut), (after, right) = parts
        return [
            (left, cut, 0.0, cut / self.scale),
            (after, right, self.total - (right - after) / self.scale, self.total),
        ]


@record
class ScheduleLayout(Record):
    """The boxes of each pipeline coordinate with their times, and which of them are drawn where.

    `held` are the activations of a row, `idle` the share of the passes' time in which it waits; a None in
    `visible_rows` stands for the rows that are left out.
    """

    rows: list[list[ScheduleBox]]
    held: list[list[HeldActivations]]
    idle: list[float]
    window: TimeWindow
    visible_rows: list[int | None]


def schedule_layout(plan: PlanView) -> ScheduleLayout:
    """Returns what is drawn of a step."""
    work = pass_rows(plan)
    busy_until = max((row[-1].end for row in work if row), default=1.0)
    rows = [row + end_boxes(plan, p, row[-1].end) for p, row in enumerate(work)]
    lengths = sorted(p.end - p.start for row in rows for p in row if p.end > p.start)
    total = max((row[-1].end for row in rows if row), default=1.0)
    is_short = max(map(len, rows)) <= PIECES
    scale = WIDTH / total if is_short else max(WIDTH / total, LEAST / lengths[len(lengths) // 4])
    return ScheduleLayout(
        rows=rows,
        held=[_held_activations(plan, row) for row in work],
        idle=[1 - float_sum(piece.end - piece.start for piece in row) / busy_until for row in work],
        window=TimeWindow(total=total, scale=scale),
        visible_rows=_visible_rows(len(rows)),
    )


def _visible_rows(rows: int) -> list[int | None]:
    if rows <= SHOWN_ROWS:
        return list(range(rows))
    return [*range(SHOWN_ROWS - 4), None, rows - 2, rows - 1]


def _caption(plan: PlanView) -> str:
    data = plan.data
    is_even = len({share.samples for share in data.shares}) < 2 and not data.most_share
    pieces = f"{plural(data.microbatches, 'micro-batch')} of {'' if is_even else 'at most '}{data.microbatch}"
    if plan.schedule:
        bubble, stages = known_text(plan.bubble, percent_text), plural(len(plan.stages), "stage")
        return f"{plan.schedule.name}, {pieces}, {stages}: bubble {bubble}"
    return f"{pieces}, one after another, no bubble"


def pass_rows(plan: PlanView) -> list[list[ScheduleBox]]:
    """Returns the passes of a step at each pipeline coordinate."""
    return _pipeline_rows(plan) if plan.schedule else [_one_row(plan)]


def known_times(plan: PlanView) -> Estimate | None:
    """Returns the predicted times of a step; None where there are none, and lengths are by FLOPs."""
    return plan.step if plan.step_time is not None else None


def _pipeline_rows(plan: PlanView) -> list[list[ScheduleBox]]:
    forward, backward, message = _stage_times(plan)
    time = timeline(schedule_table(plan), forward, backward, send=message)
    return [
        [ScheduleBox(kind=a.kind, stage=a.stage, text=str(a.microbatch), start=s, end=e) for a, s, e in spans]
        for spans in time.spans
    ]


def _stage_times(plan: PlanView) -> tuple[list[float], list[float], float]:
    """Returns each stage's time of a micro-batch, forward and backward, and the time of a message."""
    step = known_times(plan)
    if step is not None:
        return [stage.forward for stage in step.stages], [stage.backward for stage in step.stages], step.message
    mean = sum(stage.flops for stage in plan.stages) / 3 / len(plan.stages)
    forward = [stage.flops / 3 / mean if mean else 1.0 for stage in plan.stages]
    return forward, [2 * seconds for seconds in forward], 0.0


def _one_row(plan: PlanView) -> list[ScheduleBox]:
    count, step = plan.data.microbatches, known_times(plan)
    early_forwards = range(count if plan.data.ahead else 0)
    forward, backward = (step.stages[0].forward, step.stages[0].backward) if step else (1.0, 2.0)
    if step and plan.data.ahead:
        forward /= 2  # the times of a stage hold both of its forward passes
    row = [
        ScheduleBox(kind="E", stage=0, text=str(m), start=m * forward, end=(m + 1) * forward) for m in early_forwards
    ]
    for m in range(count):
        start = len(early_forwards) * forward + m * (forward + backward)
        row.append(ScheduleBox(kind="F", stage=0, text=str(m), start=start, end=start + forward))
        row.append(ScheduleBox(kind="B", stage=0, text=str(m), start=start + forward, end=start + forward + backward))
    return row


def _held_activations(plan: PlanView, row: list[ScheduleBox]) -> list[HeldActivations]:
    """Returns the activations of a rank from moment to moment, to the end of its row."""
    stage_bytes = [stage.kept for stage in plan.stages] or [0]
    changes = []
    for piece in row:
        if piece.kind == "F":
            changes.append((piece.start, 1, stage_bytes[piece.stage]))
        elif piece.kind in ("B", "W"):
            changes.append((piece.end, -1, -stage_bytes[piece.stage]))
    spans: list[HeldActivations] = []
    pieces, size = 0, 0
    for (start, piece_change, size_change), (end, _, _) in itertools.pairwise(
        sorted(changes, key=lambda change: change[:2])
    ):
        pieces, size = pieces + piece_change, size + size_change
        if end > start:
            spans.append(HeldActivations(start=start, end=end, pieces=pieces, bytes=size))
    return spans


def end_boxes(plan: PlanView, pipeline: int, start: float) -> list[ScheduleBox]:
    """Returns the boxes after the last backward: of a predicted length, or of a fixed one."""
    node, step = next((n for n in plan.ranks if n.pipeline == pipeline), None), known_times(plan)
    size = sum(t.bytes for t in node.traffic if t.axis == "data") if node else 0
    exposed_time, update = (step.ends[pipeline].exposed, step.ends[pipeline].update) if step else (2.5, 2.5)
    boxes = []
    if size and exposed_time:
        boxes.append(ScheduleBox(kind="exchange", stage=0, text=byte_text(size), start=start, end=start + exposed_time))
        start += exposed_time
    if update:
        boxes.append(ScheduleBox(kind="update", stage=0, text="update", start=start, end=start + update))
        start += update
    if step and step.samples + step.rest > 0:
        boxes.append(ScheduleBox(kind="rest", stage=0, text="rest", start=start, end=start + step.samples + step.rest))
    return boxes


def _draw_row(
    canvas: Canvas, plan: PlanView, number: int, row: list[ScheduleBox], y: float, window: TimeWindow
) -> None:
    ranks_per_row = plan.world_size // axis_of(plan, "pipeline").size
    first_rank, last_rank = number * ranks_per_row, (number + 1) * ranks_per_row - 1
    name = f"pipeline {number}" if plan.schedule else "each rank"
    canvas.write(f"row {number} name", 0, y, LABEL - 4, name, size=10.5, bold=True)
    ranks = f"rank{'s' if first_rank != last_rank else ''} {span_text(first_rank, last_rank)}"
    canvas.write(f"row {number} ranks", 0, y + 13, LABEL - 4, ranks, size=9, ink=FAINT)
    canvas.box(f"row {number}", LABEL, y, window.width, ROW, line="#cccccc")
    node = class_of(plan, first_rank)
    stage_colours = {stage: n for n, stage in enumerate(node.stages)} if node else {}
    for n, piece in enumerate(row):
        colour = COLOURS[piece.kind][min(1, stage_colours.get(piece.stage, 0))]
        tip = (
            f"{NAMES[piece.kind]}, stage {piece.stage}, micro-batch {piece.text}" if piece.kind in NAMES else piece.kind
        )
        for part, (left, right) in enumerate(window.places(piece.start, piece.end)):
            text = piece.text if right - left >= 6 * len(piece.text) else ""
            name = f"row {number}.{n}" + (f".{part}" if part else "")
            canvas.box(
                name, LABEL + left, y, right - left, ROW, text, fill=colour, line="#ffffff", size=9, pen=0.8, tip=tip
            )
    if not window.fits_width:
        middle = LABEL + (WIDTH - window.GAP) / 2
        canvas.box(f"row {number} gap", middle, y - 1, window.GAP, ROW + 2, "…", line="#ffffff", size=14, ink=FAINT)


def _draw_held(
    canvas: Canvas, number: int, spans: list[HeldActivations], peak_bytes: int, y: float, window: TimeWindow
) -> None:
    """Draws the strip under a row, as high as the bytes held."""
    canvas.box(f"held {number}", LABEL, y + STRIP - 0.5, window.width, 0.5, fill=GREY, line="none")
    for n, span in enumerate(spans):
        high = STRIP * span.bytes / peak_bytes if peak_bytes else 0.0
        if high < 0.05:
            continue
        tip = f"holds {span.pieces}: {byte_text(span.bytes)}"
        for part, (left, right) in enumerate(window.places(span.start, span.end)):
            name = f"held {number}.{n}" + (f".{part}" if part else "")
            colour = MEMORY_COLOURS["activations"]
            canvas.box(name, LABEL + left, y + STRIP - high, right - left, high, fill=colour, line="none", tip=tip)


def _draw_end(canvas: Canvas, number: int, idle: float, spans: list[HeldActivations], x: float, y: float) -> None:
    """Draws the idle share and the most activations of a rank at the end of its row."""
    canvas.write(f"row {number} idle", x, y + 7, BESIDE - 8, f"idle {percent_text(max(0.0, idle))}", size=9.5)
    top = max(spans, key=lambda span: span.bytes, default=None)
    if top is not None and top.bytes:
        text = f"holds {top.pieces}: {byte_text(top.bytes)}"
        canvas.write(f"row {number} holds", x, y + ROW + 4, BESIDE - 8, text, size=9.5)


def _legend(canvas: Canvas, rows: list[list[ScheduleBox]], peak_bytes: int, y: float, is_timed: bool) -> None:
    kinds = {piece.kind for row in rows for piece in row}
    split = "I" in kinds
    scale = "" if is_timed else " (not to scale)"
    names = NAMES | {
        "exchange": f"exchange of gradients{scale}",
        "update": f"update{scale}",
        "rest": "samples and rest",
    }
    x: float = LABEL
    for kind, name in names.items():
        if kind not in kinds or (kind == "I" and "B" in kinds):
            continue
        text = "backward, whole or of the input" if kind == "B" and split else name
        canvas.box(f"key {kind}", x, y + 1, 10, 10, fill=COLOURS[kind][0], line="none")
        canvas.write(f"key {kind} name", x + 15, y, 6.2 * len(text), text, size=9.5)
        x += 34 + 5.6 * len(text)
    if peak_bytes:
        canvas.box("key held", LABEL, y + 17, 10, 10, fill=MEMORY_COLOURS["activations"], line="none")
        text = f"activations held for the backward pass; a full strip is {byte_text(peak_bytes)}"
        canvas.write("key held name", LABEL + 15, y + 16, 6.2 * len(text), text, size=9.5)
    if any(piece.stage >= len(rows) for row in rows for piece in row):
        canvas.write("key later", LABEL, y + 32, 400, "paler: a rank's later stages", size=9.5, ink=FAINT)
