"""A step over time: a row for each pipeline coordinate, a box for each forward and backward of a micro-batch.

Lengths are by the stages' FLOPs, with the backward twice as long as the forward, since a plan keeps their sum; bubbles
are white, and a rank's idle share stands at the end of its row. The exchange of gradients and the update, after the
last backward, are drawn at a fixed length. A long step is shown by its beginning and its end. Without a pipeline there
is one row: micro-batches one after another.

The strip under a row shows the activations that the rank holds at each moment, relative to the most that any rank
holds. A micro-batch's activations at a stage are held from its forward until its backward (or the backward of the
weights) is done. Beside the strip stands the most that this rank holds, and of how many micro-batches, counted at each
of its stages.
"""

from __future__ import annotations

import itertools

from dslc.compiler.cost.schedule_cost import timeline
from dslc.compiler.ir.number_text import byte_text, percent_text
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.canvas import FAINT, GREY, MEMORY_COLOURS, Canvas
from dslc.compiler.show.describe import axis_of, class_of, schedule_table, span_text
from dslc.compiler.show.legend import HEADING, heading
from dslc.dsl.record import Record, record
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
    """One box of a row, times in units of the mean forward."""

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
    work = _pipeline_rows(plan) if plan.schedule else [_one_row(plan)]
    held = [_held_activations(plan, row) for row in work]
    most = max((span.bytes for spans in held for span in spans), default=0)
    busy_until = max((row[-1].end for row in work if row), default=1.0)
    rows = [row + _update_pieces(plan, p, row[-1].end) for p, row in enumerate(work)]
    lengths = sorted(p.end - p.start for row in rows for p in row if p.end > p.start)
    total = max((row[-1].end for row in rows if row), default=1.0)
    short = max(map(len, rows)) <= PIECES
    scale = WIDTH / total if short else max(WIDTH / total, LEAST / lengths[len(lengths) // 4])
    window = _Window(total=total, scale=scale)
    shown = _visible_rows(len(rows))
    y: float = HEADING + 34
    canvas.write("caption", 0, HEADING + 6, LABEL + WIDTH, _caption(plan), size=10.5)
    for place, number in enumerate(shown):
        top = y + place * PITCH
        if number is None:
            canvas.write("more rows", 0, top + 16, 200, f"… {len(rows) - len(shown) + 1} more", size=10, ink=FAINT)
            continue
        _draw_row(canvas, plan, number, rows[number], top, window)
        _draw_held(canvas, number, held[number], most, top + ROW + 2, window)
        idle = 1 - sum(piece.end - piece.start for piece in work[number]) / busy_until
        _draw_end(canvas, number, idle, held[number], LABEL + window.width + 8, top)
    y += len(shown) * PITCH
    canvas.write("time", LABEL, y, window.width, "time", size=9.5, align="r", ink=FAINT)
    _legend(canvas, rows, most, y + 18)
    heading(canvas, plan, LABEL + window.width + BESIDE)
    return canvas.text()


@record
class _Window(Record):
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
        half, back = (WIDTH - self.GAP) / 2, self.total * self.scale - WIDTH
        found = []
        if left < half:
            found.append((left, min(right, half)))
        if right - back > half + self.GAP:
            found.append((max(left - back, half + self.GAP), right - back))
        return found


def _visible_rows(rows: int) -> list[int | None]:
    if rows <= SHOWN_ROWS:
        return list(range(rows))
    return [*range(SHOWN_ROWS - 4), None, rows - 2, rows - 1]


def _caption(plan: PlanView) -> str:
    pieces = plural(plan.data.microbatches, "micro-batch")
    if plan.schedule:
        bubble, stages = percent_text(plan.schedule.bubble), plural(len(plan.stages), "stage")
        return f"{plan.schedule.name}, {pieces} of {plan.data.microbatch}, {stages}: bubble {bubble}"
    return f"{pieces} of {plan.data.microbatch}, one after another, no bubble"


def _pipeline_rows(plan: PlanView) -> list[list[ScheduleBox]]:
    mean = sum(stage.flops for stage in plan.stages) / 3 / len(plan.stages)
    forward = [stage.flops / 3 / mean if mean else 1.0 for stage in plan.stages]
    time = timeline(schedule_table(plan), forward, [2 * f for f in forward])
    return [
        [ScheduleBox(kind=a.kind, stage=a.stage, text=str(a.microbatch), start=s, end=e) for a, s, e in spans]
        for spans in time.spans
    ]


def _one_row(plan: PlanView) -> list[ScheduleBox]:
    count = plan.data.microbatches
    ahead = range(count if plan.data.ahead else 0)
    row = [ScheduleBox(kind="E", stage=0, text=str(m), start=float(m), end=m + 1.0) for m in ahead]
    for m in range(count):
        start = len(ahead) + 3.0 * m
        row.append(ScheduleBox(kind="F", stage=0, text=str(m), start=start, end=start + 1))
        row.append(ScheduleBox(kind="B", stage=0, text=str(m), start=start + 1, end=start + 3))
    return row


def _held_activations(plan: PlanView, row: list[ScheduleBox]) -> list[HeldActivations]:
    """Returns the activations of a rank from moment to moment, to the end of its row."""
    kept = [stage.kept for stage in plan.stages] or [0]
    changes = []
    for piece in row:
        if piece.kind == "F":
            changes.append((piece.start, 1, kept[piece.stage]))
        elif piece.kind in ("B", "W"):
            changes.append((piece.end, -1, -kept[piece.stage]))
    found: list[HeldActivations] = []
    pieces, size = 0, 0
    for (start, more, added), (end, _, _) in itertools.pairwise(sorted(changes, key=lambda change: change[:2])):
        pieces, size = pieces + more, size + added
        if end > start:
            found.append(HeldActivations(start=start, end=end, pieces=pieces, bytes=size))
    return found


def _update_pieces(plan: PlanView, pipeline: int, start: float) -> list[ScheduleBox]:
    """Returns the pieces after the last backward, at a fixed length."""
    node = next((n for n in plan.ranks if n.pipeline == pipeline), None)
    size = sum(t.bytes for t in node.traffic if t.axis == "data") if node else 0
    length = 2.5
    pieces = [ScheduleBox(kind="update", stage=0, text="update", start=start + (length if size else 0), end=0)]
    if size:
        pieces.insert(0, ScheduleBox(kind="exchange", stage=0, text=byte_text(size), start=start, end=start + length))
    last = pieces[-1]
    pieces[-1] = ScheduleBox(kind=last.kind, stage=0, text=last.text, start=last.start, end=last.start + length)
    return pieces


def _draw_row(canvas: Canvas, plan: PlanView, number: int, row: list[ScheduleBox], y: float, window: _Window) -> None:
    each = plan.world_size // axis_of(plan, "pipeline").size
    first, last = number * each, (number + 1) * each - 1
    name = f"pipeline {number}" if plan.schedule else "each rank"
    canvas.write(f"row {number} name", 0, y, LABEL - 4, name, size=10.5, bold=True)
    ranks = f"rank{'s' if first != last else ''} {span_text(first, last)}"
    canvas.write(f"row {number} ranks", 0, y + 13, LABEL - 4, ranks, size=9, ink=FAINT)
    canvas.box(f"row {number}", LABEL, y, window.width, ROW, line="#cccccc")
    node = class_of(plan, first)
    own = {stage: n for n, stage in enumerate(node.stages)} if node else {}
    for n, piece in enumerate(row):
        colour = COLOURS[piece.kind][min(1, own.get(piece.stage, 0))]
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


def _draw_held(canvas: Canvas, number: int, spans: list[HeldActivations], most: int, y: float, window: _Window) -> None:
    """Draws the strip under a row, as high as the bytes held."""
    canvas.box(f"held {number}", LABEL, y + STRIP - 0.5, window.width, 0.5, fill=GREY, line="none")
    for n, span in enumerate(spans):
        high = STRIP * span.bytes / most if most else 0.0
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


def _legend(canvas: Canvas, rows: list[list[ScheduleBox]], most: int, y: float) -> None:
    kinds = {piece.kind for row in rows for piece in row}
    split = "I" in kinds
    names = NAMES | {"exchange": "exchange of gradients (not to scale)", "update": "update (not to scale)"}
    x: float = LABEL
    for kind, name in names.items():
        if kind not in kinds or (kind == "I" and "B" in kinds):
            continue
        text = "backward, whole or of the input" if kind == "B" and split else name
        canvas.box(f"key {kind}", x, y + 1, 10, 10, fill=COLOURS[kind][0], line="none")
        canvas.write(f"key {kind} name", x + 15, y, 6.2 * len(text), text, size=9.5)
        x += 34 + 5.6 * len(text)
    if most:
        canvas.box("key held", LABEL, y + 17, 10, 10, fill=MEMORY_COLOURS["activations"], line="none")
        text = f"activations held for the backward pass; a full strip is {byte_text(most)}"
        canvas.write("key held name", LABEL + 15, y + 16, 6.2 * len(text), text, size=9.5)
    if any(piece.stage >= len(rows) for row in rows for piece in row):
        canvas.write("key later", LABEL, y + 32, 400, "paler: a rank's later stages", size=9.5, ink=FAINT)
