"""The parts common to every picture of a plan: a heading with its numbers, and the meaning of the colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dslc.compiler.ir.memory import KINDS, MemoryNode
from dslc.compiler.ir.number_text import byte_text, count_text, percent_text, time_text
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.canvas import AXIS_COLOURS, FAINT, MEMORY_COLOURS, Canvas
from dslc.compiler.show.describe import (
    AXIS_REASONS,
    Shown,
    axis_bytes,
    axis_text,
    bound_text,
    devices_text,
    exchanging_axes,
    known_text,
    link_text,
    members,
    memory_groups,
    mesh_text,
    of_all_dtypes,
    rate_text,
)
from dslc.dsl.words import plural

HEADING = 62  # height of a heading
CLASSES = 6  # columns of the table of memory
_HEAD_LETTERS = 11  # of the ranks in the head of a column
COLUMNS = (("axis", 114), ("operation", 152), ("what", 164), ("count", 46), ("bytes", 66))  # of the table of traffic
TRAFFIC_WIDTH = 20 + sum(width for _, width in COLUMNS)


def summary(plan: PlanView) -> str:
    """Returns devices, mesh, parameters, bubble and time in one line."""
    top = plan.topology
    phrases = [
        f"{devices_text(plan)} on {plural(top.nodes, 'node')}",
        mesh_text(plan),
        f"{known_text(plan.parameters, count_text)} parameters",
    ]
    if plan.schedule:
        phrases.append(f"{plan.schedule.name}, bubble {known_text(plan.bubble, percent_text)}")
    if plan.step_time is not None:
        numbers = [f"step {time_text(plan.step_time)}", rate_text(plan)]
        if plan.mfu is not None:
            numbers.append(f"MFU {percent_text(plan.mfu)}")
        phrases.append(f"{bound_text(plan).strip()}: {', '.join(numbers)}")
    return ", ".join(phrases)


def heading(canvas: Canvas, plan: PlanView, width: float) -> None:
    """Draws the job's name, the plan's hash and the summary, over the picture."""
    canvas.write("title", 0, 0, width * 0.7, plan.job, size=20, bold=True)
    canvas.write("hash", width * 0.7, 8, width * 0.3, f"plan {plan.hash}", size=10, align="r", ink=FAINT)
    text = summary(plan)
    canvas.write("summary", 0, 28, width, text, size=max(9, min(12, width / (0.53 * len(text)))))


def memory_table(canvas: Canvas, plan: PlanView, x: float, y: float) -> tuple[float, float]:
    """Draws bytes by kind and ranks, with the colours of the kinds; returns its width and height."""
    kinds = [kind for kind in KINDS if any(getattr(node.memory, kind) for node in plan.ranks)]
    columns = _some(_memory_columns(plan))
    canvas.write("memory", x, y, 200, "Memory of a rank, at its peak", size=11, bold=True)
    for column, (head, _) in enumerate(columns):
        left = x + 104 + 78 * column
        canvas.write(f"memory {column}", left, y + 17, 76, head, size=9, align="r", ink=FAINT)
    for row, kind in enumerate([*kinds, "peak"]):
        top = y + 31 + 14 * row
        if kind != "peak":
            canvas.box(f"memory {kind}", x + 4, top + 1, 9, 9, fill=MEMORY_COLOURS[kind], line="none")
        canvas.write(f"memory {kind} name", x + 18, top, 86, kind, size=9.5, bold=kind == "peak")
        for column, (_, memory) in enumerate(columns):
            text = byte_text(getattr(memory, kind)) if memory else "…"
            left = x + 104 + 78 * column
            canvas.write(f"memory {kind} {column}", left, top, 76, text, size=9.5, align="r", bold=kind == "peak")
    rows = len(kinds) + 1
    if plan.training.recomputed:
        text = f"recomputed: {plan.training.recomputed}"
        canvas.write("memory recomputed", x + 18, y + 31 + 14 * rows, 400, text, size=9, ink=FAINT)
        rows += 1
    return 104 + 78 * max(2, len(columns)), 31 + 14 * rows


_Column = tuple[str, MemoryNode | None]


def _memory_columns(plan: PlanView) -> list[_Column]:
    """Returns the heads of the columns, and the memory below them: in a large world of the largest share alone."""
    if plan.world_size > 100 and len(plan.ranks) > 1:
        return [(f"pipeline {node.pipeline}", node.memory) for node in plan.ranks]
    return [(_ranks_head(ranks), memory) for ranks, memory in memory_groups(plan)]


def _ranks_head(ranks: str) -> str:
    """Returns `rank 3`, or `ranks 0–3`, in the width of a column."""
    spans = ranks.split(", ")
    head = ", ".join([spans[0], "…"]) if len(ranks) > _HEAD_LETTERS else ranks
    return f"rank{'' if ranks.isdigit() else 's'} {head}"


def _some(columns: Sequence[_Column]) -> list[_Column]:
    """Returns the first and the last of them, and an empty column for those between."""
    return list(columns) if len(columns) <= CLASSES else [*columns[: CLASSES - 2], ("…", None), columns[-1]]


def traffic_table(canvas: Canvas, plan: PlanView, x: float, y: float) -> tuple[float, float]:
    """Draws a rank's exchanges in a step, with the colours of the axes; returns its width and height."""
    maxima: dict[Shown, tuple[int, int]] = {}
    for node in plan.ranks:
        for key, (count, size) in of_all_dtypes(plan, node).items():
            largest = maxima.get(key, (0, 0))
            maxima[key] = max(count, largest[0]), max(size, largest[1])
    canvas.write("traffic", x, y, 300, "Exchanged by a rank in a step, at most", size=11, bold=True)
    place = x + 20
    for n, (name, wide) in enumerate(COLUMNS):
        canvas.write(f"traffic {name}", place, y + 17, wide - 4, name, size=9, align="r" if n > 2 else "l", ink=FAINT)
        place += wide
    ordered_rows = sorted(maxima.items(), key=lambda item: -item[1][1])
    for row, ((axis, scope, operation, content, cadence), (count, size)) in enumerate(ordered_rows):
        top = y + 31 + 14 * row
        canvas.box(f"traffic {row}", x + 4, top + 3, 12, 4, fill=AXIS_COLOURS.get(axis, FAINT), line="none")
        place = x + 20
        axis_label = f"data {scope} {members(plan, scope)}" if scope else axis_text(plan, axis)
        cells = (axis_label, operation, f"{content}, {cadence}" if cadence else content, f"{count:,}", byte_text(size))
        for column, (cell, (_, wide)) in enumerate(zip(cells, COLUMNS, strict=True)):
            align: Literal["l", "r"] = "r" if column > 2 else "l"
            canvas.write(f"traffic {row}.{column}", place, top, wide - 4, cell, size=9.5, align=align)
            place += wide
    if not ordered_rows:
        canvas.write("traffic none", x + 4, y + 31, 200, "nothing" if plan.ranks else "unknown", size=9.5)
    return TRAFFIC_WIDTH, 31 + 14 * max(1, len(ordered_rows))


def axes_table(canvas: Canvas, plan: PlanView, x: float, y: float) -> float:
    """Draws the axes, the innermost first: their links, their traffic, and the reason for their order; returns the
    table's height.
    """
    axes = exchanging_axes(plan)[::-1]
    if not axes:
        return 0
    canvas.write("axes", x, y, TRAFFIC_WIDTH, "Axes: what waits most lies nearest", size=11, bold=True)
    for row, axis in enumerate(axes):
        top, name = y + 19 + 27 * row, f"axis {axis.name}"
        size = axis_bytes(plan, axis.name)
        stride_text = f"neighbours {plural(axis.stride, 'rank')} apart, {link_text(plan, axis)}"
        bytes_text = "" if size is None else f"{byte_text(size)} a rank"
        canvas.box(name, x + 4, top + 3, 12, 4, fill=AXIS_COLOURS[axis.name], line="none")
        canvas.write(f"{name} name", x + 20, top, 90, f"{axis.name} x{axis.size}", size=9.5, bold=True)
        canvas.write(f"{name} links", x + 110, top, 296, stride_text, size=9.5)
        canvas.write(f"{name} bytes", x + TRAFFIC_WIDTH - 108, top, 104, bytes_text, size=9.5, align="r")
        canvas.write(f"{name} why", x + 110, top + 12, TRAFFIC_WIDTH - 110, AXIS_REASONS[axis.name], size=9, ink=FAINT)
    return 19 + 27 * len(axes)


def legend(canvas: Canvas, plan: PlanView, x: float, y: float, width: float) -> None:
    """Draws all tables; the tables of memory and traffic are side by side if they fit into the width."""
    y += axes_table(canvas, plan, x, y) + (16 if plan.world_size > 1 else 0)
    if not plan.ranks:
        canvas.write("unknown", x, y, 400, "memory and traffic: unknown, the network was not traced", size=10)
        return
    wide, high = memory_table(canvas, plan, x, y)
    is_beside = wide + 30 + TRAFFIC_WIDTH <= width
    traffic_table(canvas, plan, x + wide + 30 if is_beside else x, y if is_beside else y + high + 16)
