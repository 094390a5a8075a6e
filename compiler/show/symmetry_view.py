"""Many devices: a box for the ranks of each pipeline coordinate, with a chip for each of their collectives."""

from __future__ import annotations

from collections.abc import Sequence

from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.ir.plan import PlanView, RankNode
from dslc.compiler.show.canvas import AXIS_COLOURS, FAINT, GREY, SKY, Canvas
from dslc.compiler.show.describe import (
    SAME_EXPERTS,
    axis_of,
    axis_text,
    exchange_groups,
    exchanged,
    exchanging_axes,
    members,
    mesh_text,
    parts,
    ranks_text,
    reach,
    span_text,
)
from dslc.compiler.show.legend import HEADING
from dslc.compiler.show.parts import Extent, exchange_lines, memory_bar, source_box, stage_lines, things_text
from dslc.dsl.words import plural

CHIP = 396  # width of a box beside the ranks, with their exchanges


class Folded:
    """A box for the ranks of each pipeline coordinate."""

    WIDE = 370
    MOST = 7

    def __init__(self, canvas: Canvas, plan: PlanView) -> None:
        self.canvas, self.plan = canvas, plan
        self.count = axis_of(plan, "pipeline").size
        self.each = plan.world_size // self.count
        stage_line_count = max((len(stage_lines(plan, n, 3)) for n in plan.ranks), default=1)
        chips = max((len(self._chips(n)) for n in plan.ranks), default=0)
        self.high = max(72 + 12.5 * stage_line_count, chips * 27 + 4)

    def draw(self) -> Extent:
        y: float = HEADING + 10
        source_box(self.canvas, self.plan, y, self.WIDE + 12)
        self._samples(y + 24)
        y += 24 + 66
        name_above = "share"
        for p in self._visible_pipelines():
            if p is None:
                name = self.canvas.write("more", 40, y, self.WIDE, self._elision_text(), size=11, ink="#555555")
                y += 34
            else:
                name = self._row(p, y)
                y += self.high + 48
            if name_above != "share":
                self._arrow(name_above, name, p, y - (34 if p is None else self.high + 48))
            name_above = name
        return Extent(width=self.WIDE + 54 + CHIP, height=y - 26)

    def _visible_pipelines(self) -> Sequence[int | None]:
        if self.count <= self.MOST:
            return range(self.count)
        return [0, 1, 2, None, self.count - 2, self.count - 1]

    def _elision_text(self) -> str:
        hidden = self.plan.ranks[3:-2]
        peaks = [node.memory.peak for node in hidden]
        text = (
            f"… pipeline 3–{self.count - 3}, alike, ranks {span_text(3 * self.each, (self.count - 2) * self.each - 1)}"
        )
        return f"{text}: {byte_text(min(peaks))} to {byte_text(max(peaks))}" if peaks else text

    def _samples(self, y: float) -> None:
        shares = parts(self.plan.data.shares)
        text = "; ".join(
            f"{plural(part.ranks, 'data rank')} x {part.samples:,} samples"
            + (
                f": {span_text(*part.entries(part.first))}, …, {span_text(*part.entries(part.last))}"
                if part.ranks > 1
                else ""
            )
            for part in shares
        )
        middle = self.WIDE / 2
        self.canvas.box("share", 20, y + 16, self.WIDE - 40, 18, text, fill="#eaf4fb", line=SKY, size=9.5)
        self.canvas.line("source", "share", [(middle, y), (middle, y + 16)], colour=SKY, arrow=True)
        self.canvas.line("share", "pipeline 0", [(middle, y + 34), (middle, y + 66)], colour=SKY, arrow=True)

    def _row(self, p: int, y: float) -> str:
        """Draws the ranks at one pipeline coordinate; two edges behind the box show that it stands for many."""
        canvas, plan = self.canvas, self.plan
        node = next((n for n in plan.ranks if n.pipeline == p), None)
        first_rank, last_rank = p * self.each, (p + 1) * self.each - 1
        name = f"pipeline {p}"
        for n in (2, 1):
            canvas.box(f"{name} behind {n}", 5 * n, y + 5 * n, self.WIDE, self.high, line=GREY, style="filled,rounded")
        canvas.box(name, 0, y, self.WIDE, self.high, style="filled,rounded", line="#777777")
        canvas.write(
            f"{name} name",
            9,
            y + 5,
            210,
            f"ranks {span_text(first_rank, last_rank)}, x{self.each:,}",
            size=12,
            bold=True,
        )
        processes = plan.topology.processes
        nodes = range(first_rank // processes, last_rank // processes + 1)
        nodes_text = f"node{'s' if len(nodes) > 1 else ''} {span_text(nodes[0], nodes[-1])}"
        canvas.write(f"{name} where", 220, y + 7, self.WIDE - 229, nodes_text, size=9.5, align="r", ink=FAINT)
        mesh_label = mesh_text(plan, omitted_axis="pipeline")
        lines = [(f"pipeline {p}: " if self.count > 1 else "") + mesh_label, *stage_lines(plan, node, 3)]
        canvas.write(f"{name} holds", 9, y + 23, self.WIDE - 18, "\n".join(lines), size=10)
        memory = node.memory if node else None  # of the largest share
        memory_bar(canvas, plan, name, 10, y + self.high - 31, self.WIDE - 20, memory)
        self._chip_boxes(name, node, y)
        return name

    def _chips(self, node: RankNode | None) -> list[tuple[str, str]]:
        """Returns the chips by axis; for replicas, exchanges within one and across them apart."""
        chips = []
        for axis in ("data", "expert", "context", "tensor"):
            traffic = exchanged(node, axis)
            for scope in ("", "within", "across", SAME_EXPERTS):
                scope_traffic = [t for t in traffic if reach(self.plan, t) == scope]
                if scope_traffic and node is not None:
                    scope_text, end = self._between_whom(axis, scope, node.first)
                    chips += [(axis, f"{scope_text}: {line}{end}") for line in exchange_lines(scope_traffic)]
        return chips

    def _between_whom(self, axis: str, scope: str, rank: int) -> tuple[str, str]:
        """Returns the text before an exchange and after it: its ranks, and its links."""
        if not scope:
            spans_nodes = next(each.between_nodes for each in exchanging_axes(self.plan) if each.name == axis)
            return axis_text(self.plan, axis), ", between nodes" if spans_nodes else ""
        ranks = exchange_groups(self.plan, rank, scope)[0]
        spans_nodes = len({member // self.plan.topology.processes for member in ranks}) > 1
        who = f"{members(self.plan, scope)} ranks"
        who = f"{who} with the {scope}" if scope == SAME_EXPERTS else f"{scope} {who}"
        return f"{who} ({ranks_text(ranks)}; …)", ", between nodes" if spans_nodes else ""

    def _chip_boxes(self, name: str, node: RankNode | None, y: float) -> None:
        """Draws the exchanges among the ranks of the box."""
        for n, (axis, line) in enumerate(self._chips(node)):
            colour, top, left = AXIS_COLOURS[axis], y + 3 + 27 * n, self.WIDE + 44
            self.canvas.box(f"{name} {axis} {n}", left, top, CHIP, 22, line=colour, style="filled,rounded", pen=1.3)
            self.canvas.write(f"{name} {axis} {n} text", left + 6, top + 5, CHIP - 10, line, size=9)
            middle = top + 11
            self.canvas.line(name, f"{name} {axis} {n}", [(self.WIDE, middle), (left, middle)], colour=colour, pen=2)

    def _arrow(self, name_above: str, name: str, p: int | None, y: float) -> None:
        start_y = y - (16 if name_above == "more" else 48 - 10)
        middle = 60.0
        self.canvas.line(name_above, name, [(middle, start_y), (middle, y)], arrow=True, tip_at_start=True, pen=1.6)
        node = next((n for n in self.plan.ranks if n.pipeline == (p or 0) - 1), None)
        transfers = exchanged(node, "pipeline")
        if transfers and name_above != "more":
            text = f"{things_text(transfers)}, {byte_text(sum(t.bytes for t in transfers))} a rank"
            self.canvas.write(f"{name} sent", middle + 10, (start_y + y) / 2 - 6, 300, text, size=9.5)
