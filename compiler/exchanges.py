"""Where in a step the collectives of `traffic` stand: beside which of a process's actions.

`traffic` counts them as torch issues them; here each count is dealt out over the actions that cause it, so that the
sum is kept. All ranks of a process do the same, so that what stands at one place is issued by all of them in the same
order; how the operations within one action follow one another is torch's own matter, and is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dslc.compiler.sharding import Sharding, low_precision
from dslc.compiler.traffic import TrafficNode
from dslc.dsl.job import JobSpec


class Place(NamedTuple):
    """Right before or after the action at `position` of a line."""

    position: int
    after: bool


def exchanges(
    job: JobSpec, sharding: Sharding, traffic: TrafficNode, line: Sequence[dict[str, Any]]
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Collectives as the data of action nodes, each with its place in `line`."""
    places = _places(sharding, traffic, line)
    for n, place in enumerate(places):
        before, after = (traffic.count * m // len(places) for m in (n, n + 1))
        count = after - before
        if count:
            yield (
                place,
                {
                    "what": traffic.operation,
                    "axis": traffic.axis,
                    "carries": traffic.what,
                    "dtype": dtype_of(job, traffic),
                    "count": count,
                    "bytes": traffic.bytes * after // traffic.count - traffic.bytes * before // traffic.count,
                },
            )


def _places(sharding: Sharding, traffic: TrafficNode, line: Sequence[dict[str, Any]]) -> list[Place]:
    at: dict[str, list[int]] = {}
    for n, data in enumerate(line):
        at.setdefault(data["what"], []).append(n)
    passes = sorted(at["F"] + at.get("B", []) + at.get("I", []))
    weights = sorted(at.get("B", []) + at.get("W", []))
    update, unshard, reduce = at["update"], at.get("UNSHARD"), at.get("REDUCE_GRAD")
    match traffic.axis, traffic.operation, traffic.what:
        case ("tensor" | "context", _, _) | (_, _, "batch statistics"):
            return [Place(n, True) for n in passes]
        case _, "broadcast", "parameters":
            return [Place(update[0], True)]
        case _, "all_gather", "parameters":
            if unshard:
                return [Place(n, True) for n in unshard]
            return [Place(n, False) for n in (passes if sharding.reshard else passes[:1])]
        case _, _, "buffers" | "count of what is kept":
            return [Place(passes[0], False)]
        case _, "reduce_scatter", "gradients":
            if reduce:
                return [Place(n, True) for n in reduce]
            return [Place(n, True) for n in (weights[-1:] if sharding.accumulate else weights)]
    return [Place(update[0], False)]


def dtype_of(job: JobSpec, traffic: TrafficNode) -> str:
    """In what the numbers of a collective are sent."""
    low = "float32"
    if low_precision(job):
        low = "bfloat16" if job.train.precision.word == "bf16" else "float16"
    match traffic.what:
        case "activations" | "keys and values":
            return low
        case "parameters" if traffic.operation == "all_gather":
            return low if getattr(job.train.precision, "level", "O1") == "O2" else "float32"
        case "batch statistics":
            return "float64"
        case "count of what is kept":
            return "int64"
    return "float32"
