"""Parts shared by pictures of few and of many devices: bars of memory, names of stages, the source of the data."""

from __future__ import annotations

from collections.abc import Sequence

from dslc.compiler.ir.actions import TrafficNode
from dslc.compiler.ir.memory import KINDS, MemoryNode
from dslc.compiler.ir.number_text import byte_text, percent_text
from dslc.compiler.ir.plan import PlanView, RankNode
from dslc.compiler.show.canvas import FAINT, MEMORY_COLOURS, SKY, Canvas, fitted
from dslc.compiler.show.describe import limit_of, number_text, stage_layers, stages_of
from dslc.dsl.record import Record, record
from dslc.dsl.words import plural

WORDS = {name: name.replace("_", "-") for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")}


@record
class Extent(Record):
    width: float
    height: float


def operation_text(traffic: TrafficNode) -> str:
    """Formats an operation: `all-reduce gradients, 3 GiB`."""
    return f"{WORDS.get(traffic.operation, traffic.operation)} {traffic.what}, {byte_text(traffic.bytes)}"


def things_text(traffic: Sequence[TrafficNode]) -> str:
    """Names the contents: `activations and gradients`."""
    return " and ".join(dict.fromkeys(t.what for t in traffic))


def summed_text(traffic: Sequence[TrafficNode]) -> str:
    """Formats a sum: `activations, 3 GiB`; of several contents `3 GiB in 12 operations`."""
    size = byte_text(sum(t.bytes for t in traffic))
    things = {t.what for t in traffic}
    return f"{things.pop()}, {size}" if len(things) == 1 else f"{size} in {sum(t.count for t in traffic):,} operations"


def exchange_lines(traffic: Sequence[TrafficNode]) -> list[str]:
    """Returns a line for each exchange, or for each kind of operation if there are many."""
    if len(traffic) <= 2:
        return [operation_text(t) for t in traffic]
    kinds = dict.fromkeys(t.operation for t in traffic)
    return [f"{WORDS.get(kind, kind)} {summed_text([t for t in traffic if t.operation == kind])}" for kind in kinds]


def memory_bar(
    canvas: Canvas, plan: PlanView, name: str, x: float, y: float, w: float, memory: MemoryNode | None
) -> None:
    """Draws the bytes of a rank by kind, relative to its limit; else to the rank that holds most."""
    if memory is None:
        canvas.write(f"{name} memory", x, y, w, "memory unknown", size=9, ink=FAINT)
        return
    limit = limit_of(plan)
    full_bytes = limit or max(rank_node.memory.peak for rank_node in plan.ranks)
    full_bytes = max(1, full_bytes, memory.peak)
    shares = [(MEMORY_COLOURS[kind], getattr(memory, kind) / full_bytes) for kind in KINDS]
    tip = ", ".join(f"{kind} {byte_text(getattr(memory, kind))}" for kind in KINDS)
    canvas.bar(f"{name} bar", x, y, w, 9, shares, tip)
    peak = memory.peak
    text = (
        f"{byte_text(peak)} of {byte_text(limit)}, {percent_text(peak / limit)}"
        if limit
        else f"{byte_text(peak)} at the peak"
    )
    canvas.write(f"{name} memory", x, y + 11, w, text, size=9)


def stage_lines(plan: PlanView, node: RankNode | None, limit: int) -> list[str]:
    if node is None:
        return ["layers unknown"]
    stages = stages_of(plan, node)
    if len(plan.stages) == 1:
        return [stage_layers(plan, stages[0])]
    lines = [f"stage {s.index}: {stage_layers(plan, s)}" for s in stages[:limit]]
    return lines if len(stages) <= limit else [*lines[:-1], f"and {plural(len(stages) - limit + 1, 'stage')} more"]


def source_box(canvas: Canvas, plan: PlanView, y: float, width: float) -> str:
    """Draws the source of the samples."""
    data = plan.data
    source_text = f"{number_text(data.train)} samples, {data.order}"
    if data.stream is not None:
        source_text = f"a stream of {plural(data.stream.shards, 'shard')}, {'shuffled' if data.shuffle else 'in order'}"
    variants = (
        f"{data.source}: {source_text}; {data.batch:,} in each batch",
        f"{data.source}: {source_text}",
        source_text,
    )
    text = next(
        (variant for variant in variants if fitted(variant, width - 16, 10) == variant),
        fitted(source_text, width - 16, 10),
    )
    return canvas.box(
        "source",
        0,
        y,
        width,
        24,
        text,
        fill="#eaf4fb",
        line=SKY,
        style="filled,rounded",
        size=10.5 if 5.9 * len(text) < width else 9,
    )
