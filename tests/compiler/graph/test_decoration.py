"""Nothing in a plan graph is decoration: changing any single attribute makes a proposition fail by name, or changes the
program of the ranks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
from helpers.planning import JOBS, compiled

from dslc.compiler.emit import emit, places
from dslc.compiler.graph.graph import PlanGraph
from dslc.compiler.graph.passes import build_graph
from dslc.compiler.graph.verify import Unsound, verify
from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.ir.records import Action, Follows, Hands, Placed
from dslc.compiler.placement.schedules import NAMES

PLANS: dict[str, tuple[str, ...]] = {
    "one process": ("devices.cpus=1", "parallelism.pipeline=1", "parallelism.data=1"),
    "ddp": ("devices.cpus=2", "parallelism.pipeline=1", "parallelism.data=2"),
    **{
        f"zero {zero}": ("devices.cpus=2", "parallelism.pipeline=1", "parallelism.data=2", f"parallelism.zero={zero}")
        for zero in (1, 2, 3)
    },
    "replicas": (
        "devices.cpus=4",
        "parallelism.pipeline=1",
        "parallelism.data=4",
        "parallelism.zero=3",
        "parallelism.replicas=2",
    ),
    "tensor": ("devices.cpus=2", "parallelism.pipeline=1", "parallelism.data=1", "parallelism.tensor=2"),
    "context": ("devices.cpus=2", "parallelism.pipeline=1", "parallelism.data=1", "parallelism.context=2"),
    "four axes": ("devices.cpus=16", "parallelism.tensor=2", "parallelism.context=2"),
    **{
        name: (f"parallelism.schedule={name}", "data.batch=16", "model.network.layers=6", "memory.limit=64GiB")
        for name in NAMES
    },
    "sharded stages": ("parallelism.zero=2", "parallelism.schedule=zbv", "model.network.layers=6"),
}


def changed(value: Any) -> Iterator[Any]:
    """Yields values that differ from this one in one attribute. None and an empty tuple count as missing attributes."""
    match value:
        case bool():
            yield not value
        case int() | float():
            yield value + 1
        case str():
            yield f"{value}_"
        case tuple():
            for at, item in enumerate(value):
                yield from ((*value[:at], other, *value[at + 1 :]) for other in changed(item))
        case Mapping():
            for key, item in value.items():
                yield from ({**value, key: other} for other in changed(item))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from (
                    dataclasses.replace(value, **{field.name: other}) for other in changed(getattr(value, field.name))
                )


def mutate(plan: PlanGraph, names: Iterable[str]) -> Iterator[str]:
    """Changes each attribute of these nodes, and of the edges from them, in turn: yields its name, then undoes the
    change.
    """
    for name in names:
        record = plan.graph.nodes[name]["record"]
        for field in dataclasses.fields(record):
            for value in changed(getattr(record, field.name)):
                plan.change(name, **{field.name: value})
                yield f"{type(record).__name__}.{field.name}"
        plan.put(name, record)
        for other, edge in list(plan.graph.adj[name].items()):
            relation = edge["relation"]
            for value in (*changed(relation), Placed(), Follows(), Hands(bytes=0)):
                if value != relation:
                    plan.relate(name, other, value)
                    yield f"{type(relation).__name__} from {type(record).__name__}"
            plan.relate(name, other, relation)


def noticed(plan: PlanGraph, told: tuple[JobProgram, tuple[RankPlace, ...]]) -> str:
    """Returns the proposition that fails, or `program`; "" if nothing notices the change."""
    try:
        verify(plan)
    except Unsound as found:
        return found.proposition
    return "" if (emit(plan, ""), places(plan)) == told else "program"


def some(plan: PlanGraph) -> list[str]:
    """Returns all nodes, but only the first of the actions of a process that do the same."""
    alike: dict[object, str] = {}
    record: Any
    for name, record in plan.graph.nodes(data="record"):
        action = isinstance(record, Action)
        alike.setdefault((record.process, record.what, record.carries, record.overlaps) if action else name, name)
    return list(alike.values())


def hold(plan: PlanGraph, names: Iterable[str]) -> Counter[str]:
    """Counts the changes that each proposition notices, and the program. Asserts that every change is noticed."""
    told = emit(plan, ""), places(plan)
    by: Counter[str] = Counter()
    unnoticed: Counter[str] = Counter()
    for what in mutate(plan, names):
        found = noticed(plan, told)
        by[found] += 1
        if not found:
            unnoticed[what] += 1
    assert not unnoticed
    verify(plan)
    return by


@pytest.mark.parametrize("name", PLANS)
def test_every_attribute_counts(name: str) -> None:
    plan = build_graph(compiled(JOBS / "pipeline.plt", *PLANS[name]).analysis)
    hold(plan, some(plan))


@pytest.mark.long
def test_every_attribute_of_every_node_and_edge_counts() -> None:
    """Prints, for the plans together, how many changes there were and what noticed them."""
    by: Counter[str] = Counter()
    for settings in PLANS.values():
        plan = build_graph(compiled(JOBS / "pipeline.plt", *settings).analysis)
        by += hold(plan, list(plan.graph))
    print(f"{by.total()} changes: {dict(by)}")
