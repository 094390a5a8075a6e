"""Few devices, one by one, on a grid: a column for each data rank, a row for each pipeline coordinate.

Without a data axis the pipeline goes to the right. The devices that share a sequence or a matrix are in one cell,
framed in the colour of their axis. The exchanges of a row over the data axis are one bar under it, never a line for
each pair.
"""

from __future__ import annotations

from collections.abc import Sequence

from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.ir.plan import PlanView, RankNode
from dslc.compiler.show.canvas import AXIS_COLOURS, FAINT, SKY, Canvas
from dslc.compiler.show.describe import (
    axis_of,
    axis_text,
    class_of,
    coordinates,
    coordinates_text,
    entries_of,
    exchange_time,
    exchanged,
    groups_text,
    memory_of,
    reach,
    span_text,
)
from dslc.compiler.show.legend import HEADING
from dslc.compiler.show.parts import (
    Extent,
    memory_bar,
    operation_text,
    source_box,
    stage_lines,
    summed_text,
    things_text,
)
from dslc.dsl.words import plural

A_LINE = 8  # columns side by side
BOX = 176  # width of a device
FRAME = 8  # a frame around the devices of a cell
BUS = 17  # height of a bar of collectives


class Grid:
    """A box for each device."""

    def __init__(self, canvas: Canvas, plan: PlanView) -> None:
        self.canvas, self.plan = canvas, plan
        self.sizes = {axis: axis_of(plan, axis).size for axis in ("pipeline", "data", "context", "tensor")}
        self.inner = self.sizes["context"] * self.sizes["tensor"]
        self.sideways = self.sizes["data"] == 1  # the pipeline goes to the right
        column_count = self.sizes["pipeline" if self.sideways else "data"]
        self.columns = min(column_count, A_LINE)
        self.lines = -(-column_count // A_LINE)
        self.rows = self.lines * (1 if self.sideways else self.sizes["pipeline"])
        node = plan.ranks[0] if plan.ranks else None
        stage_line_count = max((len(stage_lines(plan, n, 2)) for n in plan.ranks), default=1)
        self.device = 58 + 12.5 * (stage_line_count + len(self._coordinate_lines(0)))
        self.frames = (self.sizes["context"] > 1) + (self.sizes["tensor"] > 1)
        self.cell_w = BOX + 2 * FRAME * self.frames
        self.cell_h = self.inner * (self.device + 6) - 6 + 22 * self.frames * 1.0 + self._inner_frames()
        self.shares_experts = plan.experts is not None and any(exchanged(n, "expert") for n in plan.ranks)
        self.buses = max((len(exchanged(n, "data")) for n in plan.ranks), default=0) + self.shares_experts
        self.whole_cells = plan.topology.processes % self.inner == 0
        splits = self.whole_cells and plan.topology.processes < self.inner * self.sizes["data"]
        self.drop = 20 if splits else 8  # from a cell to the bars under it, below the edge of its machine
        self.gap = 74 if self.sideways and column_count > 1 else 34 if splits else 16
        has_machines = plan.topology.nodes > 1 or self.lines > 1
        self.pitch = self.cell_h + self.buses * (BUS + 5) + (76 if has_machines else 28) + self.drop
        self.top: float = HEADING + 10 + 24 + 18 + 60
        self.left = 12
        self.first = node

    def _inner_frames(self) -> float:
        """Returns the heights of the frames of tensor groups beyond the first in a cell."""
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
        return Extent(
            width=width + bracket,
            height=self.top + (self.rows - 1) * self.pitch + self.cell_h + self.buses * (BUS + 5) + 14 + self.drop,
        )

    def place(self, p: int, d: int) -> tuple[float, float, int]:
        """Returns the upper left corner of a cell, and its row."""
        number = p if self.sideways else d
        line, column = divmod(number, A_LINE)
        row = line if self.sideways else p * self.lines + line
        return self.left + column * (self.cell_w + self.gap), self.top + row * self.pitch, row

    def _machines(self) -> None:
        """Draws a cluster for each machine whose devices are a rectangle of whole cells."""
        plan, per_node = self.plan, self.plan.topology.processes
        if not self.whole_cells:
            return
        for node in range(plan.topology.nodes):
            ranks = range(node * per_node, (node + 1) * per_node)
            places = [self._rank_place(rank) for rank in ranks]
            x, y = min(p[0] for p in places), min(p[1] for p in places)
            right, low = max(p[0] for p in places) + self.cell_w, max(p[1] for p in places) + self.cell_h
            strangers = (self._rank_place(r) for r in range(plan.world_size) if r not in ranks)
            if any(x <= a < right and y <= b < low for a, b in strangers):
                continue
            rows = {self._row_of(rank) for rank in ranks}
            owns_rows = all(self._row_of(r) not in rows for r in range(plan.world_size) if r not in ranks)
            low += 10 + (self.buses * (BUS + 5) + 6 if owns_rows and self.sizes["data"] > 1 else 0)
            name = f"node {node}"
            heading_ = self.canvas.write(name, x - 4, y - 21, self.cell_w, name, size=10.5, bold=True, ink="#555555")
            members = [heading_, *(f"rank {rank}" for rank in ranks)]
            self.canvas.cluster(name, x - 10, y - 26, right - x + 20, low - y + 26, "", members)

    def _rank_place(self, rank: int) -> tuple[float, float]:
        position = coordinates(self.plan, rank)
        return self.place(position["pipeline"], position["data"])[:2]

    def _row_of(self, rank: int) -> int:
        position = coordinates(self.plan, rank)
        return self.place(position["pipeline"], position["data"])[2]

    def _cell(self, p: int, d: int) -> None:
        """Draws the devices that work on the same samples at one pipeline coordinate, in frames by axis."""
        x, y, _ = self.place(p, d)
        node = class_of(self.plan, self._rank(p, d, 0, 0))
        name = f"cell {p}.{d}"
        self.canvas.box(name, x, y, self.cell_w, self.cell_h, fill="none", line="none", style="solid")
        width, low = self.cell_w, y + self.cell_h
        if self.sizes["context"] > 1:
            self._frame(f"context {p}.{d}", "context", x, y, width, low - y, node)
            x, y, width, low = x + FRAME, y + 16, width - 2 * FRAME, low - 6
        for c in range(self.sizes["context"]):
            device_x = x
            if self.sizes["tensor"] > 1:
                high = self.sizes["tensor"] * (self.device + 6) - 6 + 22
                self._frame(f"tensor {p}.{d}.{c}", "tensor", x, y, width, high, node)
                device_x, y = x + FRAME, y + 16
            for t in range(self.sizes["tensor"]):
                self._device(self._rank(p, d, c, t), device_x, y)
                y += self.device + 6
            if self.sizes["tensor"] > 1:
                y += 8

    def _rank(self, p: int, d: int, c: int, t: int) -> int:
        place = {"pipeline": p, "data": d, "context": c, "tensor": t}
        return sum(place[axis.name] * axis.stride for axis in self.plan.axes)

    def _frame(self, name: str, axis: str, x: float, y: float, w: float, h: float, node: RankNode | None) -> None:
        colour, traffic = AXIS_COLOURS[axis], exchanged(node, axis)
        self.canvas.box(name, x, y, w, h, line=colour, pen=1.4, style="rounded")
        text = f"{axis} x{self.sizes[axis]}" + (f": {summed_text(traffic)}" if traffic else "")
        self.canvas.write(f"{name} text", x + 6, y + 2, w - 8, text, size=8.5, ink=colour)

    def _device(self, rank: int, x: float, y: float) -> None:
        plan, canvas = self.plan, self.canvas
        node = class_of(plan, rank)
        name = f"rank {rank}"
        top = plan.topology
        canvas.box(name, x, y, BOX, self.device, style="filled,rounded", line="#777777")
        canvas.write(f"{name} name", x + 7, y + 4, 60, name, size=11, bold=True)
        device = f"local rank {rank % top.processes}"
        device_text = device if self.whole_cells else f"node {rank // top.processes}, {device}"
        canvas.write(f"{name} device", x + 62, y + 5, BOX - 69, device_text, size=9, align="r", ink=FAINT)
        lines = [*self._coordinate_lines(rank), *stage_lines(plan, node, 2)]
        canvas.write(f"{name} holds", x + 7, y + 20, BOX - 12, "\n".join(lines), size=9.5)
        memory = memory_of(plan, node, rank) if node else None
        memory_bar(canvas, plan, name, x + 8, y + self.device - 30, BOX - 16, memory)

    def _coordinate_lines(self, rank: int) -> list[str]:
        """Formats the rank's place in the mesh; all four axes take two lines."""
        words = coordinates_text(self.plan, rank).split(", ") if self.plan.world_size > 1 else []
        per_line = 2 if len(words) > 3 else 3
        return [", ".join(words[n : n + per_line]) for n in range(0, len(words), per_line)]

    def _samples(self) -> None:
        """Draws the share of each data rank, over its cell at the first stage."""
        size = self.plan.data.batch
        for d in range(self.sizes["data"]):
            entries = entries_of(self.plan.data.shares, d)
            x, y, row = self.place(0, d)
            name = f"share {d}"
            text = f"samples {span_text(*entries)} of {size:,}" if entries else "no samples"
            self.canvas.box(name, x + self.cell_w / 2 - 68, y - 60, 136, 17, text, fill="#eaf4fb", line=SKY, size=9.5)
            middle = x + self.cell_w / 2
            if row == 0:
                self.canvas.line("source", name, [(middle, self.top - 78), (middle, y - 60)], colour=SKY, arrow=True)
            self.canvas.line(name, f"cell 0.{d}", [(middle, y - 43), (middle, y - 1)], colour=SKY, arrow=True)

    def _data_buses(self, p: int) -> None:
        """Draws one bar under the row for each exchange of its data ranks, below the bars of the expert axis."""
        node = class_of(self.plan, self._rank(p, 0, 0, 0))
        if self.shares_experts:
            self._expert_buses(p, node)
        groups = f", {self.sizes['tensor']} groups" if self.sizes["tensor"] > 1 else ""
        for n, traffic in enumerate(exchanged(node, "data"), start=self.shares_experts):
            for line in range(self.lines):
                members = [d for d in range(self.sizes["data"]) if d // A_LINE == line]
                x, y, _ = self.place(p, members[0])
                top = y + self.cell_h + self.drop + n * (BUS + 5)
                width = len(members) * (self.cell_w + self.gap) - self.gap
                count = plural(traffic.count, "operation")
                scope = reach(self.plan, traffic)
                groups_label = f" {groups_text(self.plan, self._rank(p, 0, 0, 0), scope)}" if scope else ""
                time = exchange_time(traffic)
                text = f"{axis_text(self.plan, 'data')}{groups}{groups_label}: {operation_text(traffic)} in {count}"
                text += f", {time}" if time else ""
                if width < 5 * len(text):
                    text = f"{scope} {traffic.what} {byte_text(traffic.bytes)}".strip()
                if line:
                    text = f"the same group: {text}"
                name = f"data {p}.{n}.{line}"
                colour = AXIS_COLOURS["data"]
                self.canvas.box(
                    name, x, top, width, BUS, text, fill="#fbeee4", line=colour, size=9.5, style="filled,rounded"
                )
                if n == 0:
                    self._join_cells(p, members, name, top, colour)

    def _expert_buses(self, p: int, node: RankNode | None) -> None:
        """Draws a bar under each group of cells that share experts; a group that goes on in the next line has two."""
        assert self.plan.experts is not None
        size, traffic, colour = self.plan.experts.size, exchanged(node, "expert"), AXIS_COLOURS["expert"]
        bars: dict[tuple[int, int], list[int]] = {}
        for d in range(self.sizes["data"]):
            bars.setdefault((d // A_LINE, d // size), []).append(d)
        groups = f", {self.inner} groups" if self.inner > 1 else ""
        for (line, group_number), cells in bars.items():
            x, y, _ = self.place(p, cells[0])
            top, width = y + self.cell_h + self.drop, len(cells) * (self.cell_w + self.gap) - self.gap
            begins = cells[0] % size == 0
            text = f"expert x{size}{groups}: {summed_text(traffic)}" if begins else "the same group"
            name = f"expert {p}.{group_number}.{line}"
            self.canvas.box(
                name, x, top, width, BUS, text, fill="#f9f0f5", line=colour, size=9.5, style="filled,rounded"
            )
            self._join_cells(p, cells, name, top, colour)

    def _join_cells(self, p: int, cells: Sequence[int], bar: str, top: float, colour: str) -> None:
        for d in cells:
            middle = self.place(p, d)[0] + self.cell_w / 2
            self.canvas.line(f"cell {p}.{d}", bar, [(middle, top - self.drop), (middle, top)], colour=colour, pen=2)

    def _pipeline(self, width: float) -> None:
        """Draws the transfers between stages: an arrow to the right, or one bracket for all columns of two rows."""
        for p in range(self.sizes["pipeline"] - 1):
            node = class_of(self.plan, self._rank(p, 0, 0, 0))
            transfers = exchanged(node, "pipeline")
            size = byte_text(sum(t.bytes for t in transfers)) if transfers else ""
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
                points = [
                    (width - self.left, middle),
                    (right, middle),
                    (right, next_middle),
                    (width - self.left, next_middle),
                ]
                words = things_text(transfers).replace(" and ", " and\n", 1)
                text = f"pipeline\n{words}\n{size} a rank"
                self.canvas.write(f"sent {p}", right + 6, (middle + next_middle) / 2 - 18, 140, text, size=9.5)
                tail, head = f"cell {p}.{self.columns - 1}", f"cell {p + 1}.{self.columns - 1}"
            self.canvas.line(tail, head, points, arrow=True, tip_at_start=True, pen=1.6)
