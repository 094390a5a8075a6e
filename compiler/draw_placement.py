"""Where everything sits: machines, devices, layers, samples, memory, and what they exchange.

Few devices are drawn one by one on a grid: a column for each data rank, a row for each pipeline coordinate (without a data
axis the pipeline goes to the right). The devices that share a sequence or a matrix stand in one cell, framed in the colour
of their axis. What a row exchanges over the data axis is one bar under it, never a line for each pair. Many devices are
drawn as one box for each pipeline coordinate, with a chip for each of its collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dslc.compiler.cost import TrafficNode
from dslc.compiler.describe import (
    MEMORY_KINDS,
    axis_of,
    class_of,
    coordinates,
    coordinates_text,
    entries_of,
    known,
    limit_of,
    parts,
    plural,
    span_text,
    stage_layers,
    stages_of,
)
from dslc.compiler.draw_canvas import AXIS_COLOURS, FAINT, GREY, MEMORY_COLOURS, SKY, Canvas
from dslc.compiler.draw_legend import HEADING, heading, legend
from dslc.compiler.plan import Plan, RankNode
from dslc.compiler.units import byte_text, percent_text

MOST_BOXES = 16  # devices drawn one by one
A_LINE = 8  # columns side by side
LEAST_WIDTH = 860
BOX = 176  # width of a device
FRAME = 8  # a frame around the devices of a cell
BUS = 17  # height of a bar of collectives
WORDS = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather"}


def draw_placement(plan: Plan) -> str:
    """The picture as DOT text."""
    canvas = Canvas(plan.job)
    drawn = _Grid(canvas, plan).draw() if plan.world_size <= MOST_BOXES else _Folded(canvas, plan).draw()
    width = max(LEAST_WIDTH, drawn.width)
    heading(canvas, plan, width)
    legend(canvas, plan, drawn.height + 24, width)
    return canvas.text()


@dataclass(frozen=True, kw_only=True)
class Extent:
    width: float
    height: float


def operation_text(traffic: TrafficNode) -> str:
    """`all-reduce gradients, 3 GiB in 2 operations`."""
    operation = " + ".join(WORDS.get(word, word) for word in traffic.operation.split(" + "))
    return f"{operation} {traffic.what}, {byte_text(traffic.bytes)} in {traffic.count:,}"


def exchanged(node: RankNode | None, axis: str) -> list[TrafficNode]:
    return [t for t in node.traffic if t.axis == axis and t.count] if node else []


def memory_bar(canvas: Canvas, plan: Plan, name: str, x: float, y: float, w: float, node: RankNode | None) -> None:
    """The bytes of a rank by kind, against what it may hold; else against the rank that holds most."""
    if node is None:
        canvas.write(f"{name} memory", x, y, w, "memory unknown", size=9, ink=FAINT)
        return
    limit = limit_of(plan)
    whole = limit or max(other.memory.peak for other in plan.ranks)
    whole = max(1, whole, node.memory.peak)
    parts_ = [(MEMORY_COLOURS[kind], getattr(node.memory, kind) / whole) for kind in MEMORY_KINDS]
    tip = ", ".join(f"{kind} {byte_text(getattr(node.memory, kind))}" for kind in MEMORY_KINDS)
    canvas.bar(f"{name} bar", x, y, w, 9, parts_, tip)
    peak = node.memory.peak
    text = f"{byte_text(peak)} of {byte_text(limit)}, {percent_text(peak / limit)}" if limit else f"{byte_text(peak)} at the peak"
    canvas.write(f"{name} memory", x, y + 11, w, text, size=9)


def stage_lines(plan: Plan, node: RankNode | None, most: int) -> list[str]:
    if node is None:
        return ["layers unknown"]
    stages = stages_of(plan, node)
    if len(plan.stages) == 1:
        return [stage_layers(plan, stages[0])]
    lines = [f"stage {s.index}: {stage_layers(plan, s)}" for s in stages[:most]]
    return lines if len(stages) <= most else [*lines[:-1], f"and {plural(len(stages) - most + 1, 'stage')} more"]


def source_box(canvas: Canvas, plan: Plan, y: float, width: float) -> str:
    """Where the samples come from."""
    data = plan.data
    order = "shuffled each epoch" if data.shuffle else "in order"
    text = f"{data.source}: {known(data.train, 'samples')}, {order}; {data.batch:,} in each batch"
    return canvas.box("source", 0, y, width, 24, text, fill="#eaf4fb", line=SKY, style="filled,rounded", size=10.5)


# --------------------------------------------------------------------------------------------------- few devices


class _Grid:
    """A box for each device."""

    def __init__(self, canvas: Canvas, plan: Plan) -> None:
        self.canvas, self.plan = canvas, plan
        self.sizes = {axis: axis_of(plan, axis).size for axis in ("pipeline", "data", "context", "tensor")}
        self.inner = self.sizes["context"] * self.sizes["tensor"]
        self.sideways = self.sizes["data"] == 1  # the pipeline goes to the right
        across = self.sizes["pipeline" if self.sideways else "data"]
        self.columns = min(across, A_LINE)
        self.lines = -(-across // A_LINE)
        self.rows = self.lines * (1 if self.sideways else self.sizes["pipeline"])
        node = plan.ranks[0] if plan.ranks else None
        most = max((len(stage_lines(plan, n, 2)) for n in plan.ranks), default=1)
        self.device = 58 + 12.5 * (most + (1 if plan.world_size > 1 else 0))
        self.frames = (self.sizes["context"] > 1) + (self.sizes["tensor"] > 1)
        self.cell_w = BOX + 2 * FRAME * self.frames
        self.cell_h = self.inner * (self.device + 6) - 6 + 22 * self.frames * 1.0 + self._inner_frames()
        self.buses = max((len(exchanged(n, "data")) for n in plan.ranks), default=0)
        self.whole_cells = plan.topology.processes % self.inner == 0
        splits = self.whole_cells and plan.topology.nodes > 1
        self.gap = 74 if self.sideways and across > 1 else 34 if splits else 16
        self.pitch = self.cell_h + self.buses * (BUS + 5) + 84
        self.top = HEADING + 10 + 24 + 50
        self.left = 12
        self.first = node

    def _inner_frames(self) -> float:
        """Heights of the frames of tensor groups beyond the first in a cell."""
        return 30 * (self.sizes["context"] - 1) if self.frames == 2 else 0

    def draw(self) -> Extent:
        plan = self.plan
        width = self.left * 2 + self.columns * (self.cell_w + self.gap) - self.gap
        bracket = 0 if self.sideways or self.sizes["pipeline"] == 1 else 160
        source_box(self.canvas, plan, HEADING + 10, width)
        self._machines()
        for p in range(self.sizes["pipeline"]):
            for d in range(self.sizes["data"]):
                self._cell(p, d)
            self._data_buses(p)
        self._samples()
        self._pipeline(width)
        return Extent(width=width + bracket, height=self.top + self.rows * self.pitch - 40)

    def place(self, p: int, d: int) -> tuple[float, float, int]:
        """The upper left corner of a cell, and its row."""
        number = p if self.sideways else d
        line, column = divmod(number, A_LINE)
        row = line if self.sideways else p * self.lines + line
        return self.left + column * (self.cell_w + self.gap), self.top + row * self.pitch, row

    def _machines(self) -> None:
        """A cluster for each machine whose devices are a rectangle of whole cells."""
        plan, each = self.plan, self.plan.topology.processes
        if not self.whole_cells:
            return
        for node in range(plan.topology.nodes):
            ranks = range(node * each, (node + 1) * each)
            places = [self._rank_place(rank) for rank in ranks]
            x, y = min(p[0] for p in places), min(p[1] for p in places)
            right, low = max(p[0] for p in places) + self.cell_w, max(p[1] for p in places) + self.cell_h
            strangers = (self._rank_place(r) for r in range(plan.world_size) if r not in ranks)
            if any(x <= a < right and y <= b < low for a, b in strangers):
                continue
            rows = {self._row_of(rank) for rank in ranks}
            whole = all(self._row_of(r) not in rows for r in range(plan.world_size) if r not in ranks)
            low += 10 + (self.buses * (BUS + 5) + 6 if whole and self.sizes["data"] > 1 else 0)
            name = f"node {node}"
            heading_ = self.canvas.write(name, x - 4, y - 21, self.cell_w, name, size=10.5, bold=True, ink="#555555")
            members = [heading_, *(f"rank {rank}" for rank in ranks)]
            self.canvas.cluster(name, x - 10, y - 26, right - x + 20, low - y + 26, "", members)

    def _rank_place(self, rank: int) -> tuple[float, float]:
        at = coordinates(self.plan, rank)
        return self.place(at["pipeline"], at["data"])[:2]

    def _row_of(self, rank: int) -> int:
        at = coordinates(self.plan, rank)
        return self.place(at["pipeline"], at["data"])[2]

    def _cell(self, p: int, d: int) -> None:
        """The devices that work on the same samples at one pipeline coordinate, in frames by axis."""
        x, y, _ = self.place(p, d)
        node = class_of(self.plan, self._rank(p, d, 0, 0))
        name = f"cell {p}.{d}"
        self.canvas.box(name, x, y, self.cell_w, self.cell_h, fill="none", line="none", style="solid")
        width, low = self.cell_w, y + self.cell_h
        if self.sizes["context"] > 1:
            self._frame(f"context {p}.{d}", "context", x, y, width, low - y, node)
            x, y, width, low = x + FRAME, y + 16, width - 2 * FRAME, low - 6
        for c in range(self.sizes["context"]):
            inside = x
            if self.sizes["tensor"] > 1:
                high = self.sizes["tensor"] * (self.device + 6) - 6 + 22
                self._frame(f"tensor {p}.{d}.{c}", "tensor", x, y, width, high, node)
                inside, y = x + FRAME, y + 16
            for t in range(self.sizes["tensor"]):
                self._device(self._rank(p, d, c, t), inside, y)
                y += self.device + 6
            if self.sizes["tensor"] > 1:
                y += 8

    def _rank(self, p: int, d: int, c: int, t: int) -> int:
        place = {"pipeline": p, "data": d, "context": c, "tensor": t}
        return sum(place[axis.name] * axis.stride for axis in self.plan.axes)

    def _frame(self, name: str, axis: str, x: float, y: float, w: float, h: float, node: RankNode | None) -> None:
        colour = AXIS_COLOURS[axis]
        said = " and ".join(byte_text(t.bytes) for t in exchanged(node, axis))
        self.canvas.box(name, x, y, w, h, line=colour, pen=1.4, style="rounded")
        text = f"{axis} x{self.sizes[axis]}" + (f": {exchanged(node, axis)[0].what}, {said}" if said else "")
        self.canvas.write(f"{name} text", x + 6, y + 2, w - 8, text, size=8.5, ink=colour)

    def _device(self, rank: int, x: float, y: float) -> None:
        plan, canvas = self.plan, self.canvas
        node = class_of(plan, rank)
        name = f"rank {rank}"
        top = plan.topology
        canvas.box(name, x, y, BOX, self.device, style="filled,rounded", line="#777777")
        canvas.write(f"{name} name", x + 7, y + 4, 60, name, size=11, bold=True)
        device = f"{top.device}:{rank % top.processes}"
        where = device if self.whole_cells else f"node {rank // top.processes}, {device}"
        canvas.write(f"{name} device", x + 62, y + 5, BOX - 69, where, size=9, align="r", ink=FAINT)
        lines = [coordinates_text(plan, rank)] if plan.world_size > 1 else []
        lines += stage_lines(plan, node, 2)
        canvas.write(f"{name} holds", x + 7, y + 20, BOX - 12, "\n".join(lines), size=9.5)
        memory_bar(canvas, plan, name, x + 8, y + self.device - 30, BOX - 16, node)

    def _samples(self) -> None:
        """The share of each data rank, over its cell at the first stage."""
        size = self.plan.data.batch
        for d in range(self.sizes["data"]):
            got = entries_of(self.plan.data.shares, d)
            x, y, row = self.place(0, d)
            name = f"share {d}"
            text = f"samples {span_text(*got)} of {size:,}" if got else "no samples"
            self.canvas.box(name, x + self.cell_w / 2 - 68, y - 60, 136, 17, text, fill="#eaf4fb", line=SKY, size=9.5)
            middle = x + self.cell_w / 2
            if row == 0:
                self.canvas.line("source", name, [(middle, self.top - 74), (middle, y - 60)], colour=SKY, arrow=True)
            self.canvas.line(name, f"cell 0.{d}", [(middle, y - 43), (middle, y - 1)], colour=SKY, arrow=True)

    def _data_buses(self, p: int) -> None:
        """One bar under the row for each thing that its data ranks exchange."""
        node = class_of(self.plan, self._rank(p, 0, 0, 0))
        groups = f", {self.inner} groups" if self.inner > 1 else ""
        for n, traffic in enumerate(exchanged(node, "data")):
            for line in range(self.lines):
                members = [d for d in range(self.sizes["data"]) if d // A_LINE == line]
                x, y, _ = self.place(p, members[0])
                top = y + self.cell_h + 8 + n * (BUS + 5)
                width = len(members) * (self.cell_w + self.gap) - self.gap
                text = f"data x{self.sizes['data']}{groups}: {operation_text(traffic)}"
                if width < 5 * len(text):
                    text = f"{traffic.what} {byte_text(traffic.bytes)}"
                name = f"data {p}.{n}.{line}"
                colour = AXIS_COLOURS["data"]
                self.canvas.box(name, x, top, width, BUS, text, fill="#fbeee4", line=colour, size=9.5, style="filled,rounded")
                if n == 0:
                    for d in members:
                        middle = self.place(p, d)[0] + self.cell_w / 2
                        self.canvas.line(f"cell {p}.{d}", name, [(middle, top - 8), (middle, top)], colour=colour, pen=2)

    def _pipeline(self, width: float) -> None:
        """What stages hand on: an arrow to the right, or one bracket for all columns of two rows."""
        for p in range(self.sizes["pipeline"] - 1):
            node = class_of(self.plan, self._rank(p, 0, 0, 0))
            sent = exchanged(node, "pipeline")
            size = byte_text(sum(t.bytes for t in sent)) if sent else ""
            (x, y, row), (x2, y2, row2) = self.place(p, 0), self.place(p + 1, 0)
            middle, next_middle = y + self.cell_h / 2, y2 + self.cell_h / 2
            tail, head = f"cell {p}.0", f"cell {p + 1}.0"
            if self.sideways and row == row2:
                points = [(x + self.cell_w, middle), (x2, middle)]
                self.canvas.write(f"sent {p}", x + self.cell_w + 2, middle - 15, self.gap - 4, size, size=9, align="c")
            elif self.sideways:
                low = y + self.cell_h + 18
                points = [(x + 40, y + self.cell_h), (x + 40, low), (x2 + 40, low), (x2 + 40, y2)]
                self.canvas.write(f"sent {p}", x2 + 46, low - 14, 120, size, size=9)
            else:
                right = width + 14
                points = [(width - self.left, middle), (right, middle), (right, next_middle), (width - self.left, next_middle)]
                text = f"pipeline\n{sent[0].what if sent else ''}\n{size} a rank"
                self.canvas.write(f"sent {p}", right + 6, (middle + next_middle) / 2 - 18, 140, text, size=9.5)
                tail, head = f"cell {p}.{self.columns - 1}", f"cell {p + 1}.{self.columns - 1}"
            self.canvas.line(tail, head, points, arrow=True, pen=1.6)


# -------------------------------------------------------------------------------------------------- many devices


class _Folded:
    """A box for the ranks of each pipeline coordinate."""

    WIDE = 370
    MOST = 7

    def __init__(self, canvas: Canvas, plan: Plan) -> None:
        self.canvas, self.plan = canvas, plan
        self.count = axis_of(plan, "pipeline").size
        self.each = plan.world_size // self.count
        most = max((len(stage_lines(plan, n, 3)) for n in plan.ranks), default=1)
        chips = max((len(self._chips(n)) for n in plan.ranks), default=0)
        self.high = max(72 + 12.5 * most, chips * 27 + 4)

    def draw(self) -> Extent:
        y: float = HEADING + 10
        source_box(self.canvas, self.plan, y, self.WIDE + 12)
        self._samples(y + 24)
        y += 24 + 66
        before = "share"
        for p in self._shown():
            if p is None:
                name = self.canvas.write("more", 40, y, self.WIDE, self._between(), size=11, ink="#555555")
                y += 34
            else:
                name = self._row(p, y)
                y += self.high + 48
            if before != "share":
                self._arrow(before, name, p, y - (34 if p is None else self.high + 48))
            before = name
        return Extent(width=self.WIDE + 390, height=y - 26)

    def _shown(self) -> Sequence[int | None]:
        if self.count <= self.MOST:
            return range(self.count)
        return [0, 1, 2, None, self.count - 2, self.count - 1]

    def _between(self) -> str:
        hidden = self.plan.ranks[3:-2]
        peaks = [node.memory.peak for node in hidden]
        text = f"… pipeline 3–{self.count - 3}, alike, ranks {span_text(3 * self.each, (self.count - 2) * self.each - 1)}"
        return f"{text}: {byte_text(min(peaks))} to {byte_text(max(peaks))}" if peaks else text

    def _samples(self, y: float) -> None:
        shares = parts(self.plan.data.shares)
        text = "; ".join(
            f"{plural(part.ranks, 'data rank')} x {part.samples:,} samples"
            + (f": {span_text(*part.entries(part.first))}, …, {span_text(*part.entries(part.last))}" if part.ranks > 1 else "")
            for part in shares
        )
        middle = self.WIDE / 2
        self.canvas.box("share", 20, y + 16, self.WIDE - 40, 18, text, fill="#eaf4fb", line=SKY, size=9.5)
        self.canvas.line("source", "share", [(middle, y), (middle, y + 16)], colour=SKY, arrow=True)
        self.canvas.line("share", "pipeline 0", [(middle, y + 34), (middle, y + 66)], colour=SKY, arrow=True)

    def _row(self, p: int, y: float) -> str:
        """The ranks at one pipeline coordinate; two edges behind the box say that it stands for many."""
        canvas, plan = self.canvas, self.plan
        node = next((n for n in plan.ranks if n.pipeline == p), None)
        first, last = p * self.each, (p + 1) * self.each - 1
        name = f"pipeline {p}"
        for n in (2, 1):
            canvas.box(f"{name} behind {n}", 5 * n, y + 5 * n, self.WIDE, self.high, line=GREY, style="filled,rounded")
        canvas.box(name, 0, y, self.WIDE, self.high, style="filled,rounded", line="#777777")
        canvas.write(f"{name} name", 9, y + 5, 210, f"ranks {span_text(first, last)}, x{self.each:,}", size=12, bold=True)
        processes = plan.topology.processes
        nodes = range(first // processes, last // processes + 1)
        where = f"node{'s' if len(nodes) > 1 else ''} {span_text(nodes[0], nodes[-1])}"
        canvas.write(f"{name} where", 220, y + 7, self.WIDE - 229, where, size=9.5, align="r", ink=FAINT)
        within = " x ".join(f"{a.name} {a.size}" for a in plan.axes if a.name != "pipeline" and a.size > 1)
        lines = [(f"pipeline {p}: " if self.count > 1 else "") + within, *stage_lines(plan, node, 3)]
        canvas.write(f"{name} holds", 9, y + 23, self.WIDE - 18, "\n".join(lines), size=10)
        memory_bar(canvas, plan, name, 10, y + self.high - 31, self.WIDE - 20, node)
        self._chip_boxes(name, node, y)
        return name

    def _chips(self, node: RankNode | None) -> list[tuple[str, TrafficNode]]:
        return [(axis, t) for axis in ("data", "context", "tensor") for t in exchanged(node, axis)]

    def _chip_boxes(self, name: str, node: RankNode | None, y: float) -> None:
        """What the ranks of the box exchange among themselves."""
        for n, (axis, traffic) in enumerate(self._chips(node)):
            colour, top, left = AXIS_COLOURS[axis], y + 3 + 27 * n, self.WIDE + 44
            self.canvas.box(f"{name} {axis} {n}", left, top, 336, 22, line=colour, style="filled,rounded", pen=1.3)
            where = "between nodes" if axis_of(self.plan, axis).between_nodes else "within a node"
            text = f"{axis} x{axis_of(self.plan, axis).size}: {operation_text(traffic)}, {where}"
            self.canvas.write(f"{name} {axis} {n} text", left + 6, top + 5, 326, text, size=9)
            middle = top + 11
            self.canvas.line(name, f"{name} {axis} {n}", [(self.WIDE, middle), (left, middle)], colour=colour, pen=2)

    def _arrow(self, before: str, name: str, p: int | None, y: float) -> None:
        above = y - (16 if before == "more" else 48 - 10)
        middle = 60.0
        self.canvas.line(before, name, [(middle, above), (middle, y)], arrow=True, pen=1.6)
        node = next((n for n in self.plan.ranks if n.pipeline == (p or 0) - 1), None)
        sent = exchanged(node, "pipeline")
        if sent and before != "more":
            text = f"{sent[0].what}, {byte_text(sum(t.bytes for t in sent))} a rank"
            self.canvas.write(f"{name} sent", middle + 10, (above + y) / 2 - 6, 300, text, size=9.5)
