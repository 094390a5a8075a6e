"""Nothing in a plan graph is decoration: changing any single attribute changes the hash, and makes a proposition fail
by name, or changes the program of the ranks, or is one of `SHOWN` and changes what is shown.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

import pytest
from helpers.module_facts import FACTS, analysed
from helpers.planning import JOBS, compiled

from dslc.compiler.emit import emit, places
from dslc.compiler.graph.build import build_graph
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.plan_view import plan_view
from dslc.compiler.graph.verify import Unsound, verify
from dslc.compiler.ir.actions import Action, Collective
from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.program import ModelStep
from dslc.compiler.ir.records import Devices, NextActionEdge, PlacementEdge, TransferEdge, Weights
from dslc.compiler.placement.schedules import NAMES
from dslc.dsl.language.blocks import DevicesSpec

PLANS: dict[str, tuple[str, ...]] = {
    "one process": (
        "devices.cpus=1",
        "parallelism.pipeline=1",
        "parallelism.data=1",
        "data.validation=10%",
        "train.early_stopping=lowest(loss)",
        "train.max_time=2h",
        "train.clip=value(0.5)",
        "train.ema=ema(0.9, every = 2 steps)",
        "checkpoint.best=highest(loss)",
    ),
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
        "train.clip=1.0",
    ),
    "tensor": ("devices.cpus=2", "parallelism.pipeline=1", "parallelism.data=1", "parallelism.tensor=2"),
    "context": ("devices.cpus=2", "parallelism.pipeline=1", "parallelism.data=1", "parallelism.context=2"),
    "four axes": ("devices.cpus=16", "parallelism.tensor=2", "parallelism.context=2"),
    **{
        name: (f"parallelism.schedule={name}", "data.batch=16", "model.network.layers=6", "memory.limit=64GiB")
        for name in NAMES
    },
    "context and shards": (
        "devices.cpus=4",
        "parallelism.pipeline=1",
        "parallelism.context=2",
        "parallelism.zero=3",
        "train.clip=1.0",
    ),
    "tensor and shards": (
        "devices.cpus=4",
        "parallelism.pipeline=1",
        "parallelism.tensor=2",
        "parallelism.sequence=true",
        "parallelism.zero=3",
        "train.precision=fp16",
        "memory.recompute=full",
    ),
    "shared weights": (
        "devices.cpus=8",
        "parallelism.tensor=2",
        "parallelism.zero=1",
        "model.network.tie=true",
        "model.loss.ignore=0",
        "train.on_nonfinite=skip",
        "train.clip=1.0",
    ),
    "gradients kept in 16 bits": (
        "devices.cpus=2",
        "parallelism.pipeline=1",
        "parallelism.zero=2",
        "train.precision=bf16(level = O2)",
    ),
    "batch norm": (
        "devices.cpus=2",
        "parallelism.pipeline=1",
        "data.source=digits()",
        "model.network=[conv2d(4), batch_norm(), flatten(), linear(10)]",
    ),
    **{
        exchange: (
            *("devices.nodes=2", "devices.cpus=2", "parallelism.pipeline=1", "parallelism.data=4"),
            f"parallelism.gradients={exchange}",
        )
        for exchange in (
            *("fp16()", "bf16()", "powersgd(rank = 2)", "bytegrad()"),
            *("local_sgd(period = 4)", "diloco(period = 4)", "decentralized(interval = 2)"),
            *("decentralized(peers = shift_one)", "decentralized(peers = shift_one, hierarchical = false)"),
            *("low_precision_decentralized()", "low_precision_decentralized(interval = 2, hierarchical = false)"),
            *("async_average(warmup = 3 steps)", "async_average(hierarchical = false)"),
        )
    },
    "samples compared": (
        "devices.cpus=4",
        "parallelism.pipeline=1",
        "parallelism.data=4",
        "parallelism.zero=3",
        "data.source=digits()",
        "data.batch=16",
        "model.network=[flatten(), linear(10)]",
        "model.loss=contrastive(over = all)",
    ),
    "outputs ahead": (
        "devices.nodes=2",
        "devices.cpus=2",
        "parallelism.pipeline=1",
        "parallelism.data=4",
        "parallelism.microbatches=2",
        "data.source=digits()",
        "data.batch=16",
        "model.network=[flatten(), linear(10)]",
        "model.loss=contrastive(over = node)",
    ),
    "bf16 over replicas": (
        *("devices.cpus=4", "parallelism.pipeline=1", "parallelism.data=4", "parallelism.zero=3"),
        *("parallelism.replicas=2", "parallelism.gradients=bf16()"),
    ),
    "fp16 over replicas": (
        *("devices.cpus=4", "parallelism.pipeline=1", "parallelism.data=4", "parallelism.zero=3"),
        *("parallelism.replicas=2", "parallelism.gradients=fp16()", "parallelism.microbatches=2"),
    ),
    "fp16 of shards": (
        *("devices.cpus=2", "parallelism.pipeline=1", "parallelism.data=2", "parallelism.zero=2"),
        *("parallelism.gradients=fp16()", "parallelism.microbatches=2"),
    ),
    "fp16 of sharded stages": ("parallelism.zero=2", "parallelism.schedule=zbv", "model.network.layers=6")
    + ("parallelism.gradients=fp16()",),
    "powersgd beside zero 1": (
        *("devices.cpus=2", "parallelism.pipeline=1", "parallelism.data=2", "parallelism.zero=1"),
        "parallelism.gradients=powersgd(rank = 1)",
    ),
    **{
        optimizer: (
            *("devices.nodes=2", "devices.cpus=2", "parallelism.pipeline=1", "parallelism.data=4"),
            f"train.optimizer={optimizer}",
        )
        for optimizer in ("qadam(warmup = 5)", "onebit_adam(freeze = 5)")
    },
    "momenta on one node": (
        *("devices.cpus=3", "data.batch=24", "parallelism.pipeline=1", "parallelism.data=3"),
        "train.optimizer=onebit_adam(freeze = 5)",
    ),
    "sharded stages": ("parallelism.zero=2", "parallelism.schedule=zbv", "model.network.layers=6"),
}


OWN = "a network of the user's own"  # with buffers, and a parameter that no step uses

NAMES_OF_PLANS = (*PLANS, OWN)

# The contents of exchanges.
CONTENTS = {
    *("activations", "activations, again", "gradients of activations", "keys and values"),
    *("gradients of keys and values", "parts of the loss", "parameters", "gradients", "gradients beside pieces"),
    *("gradients of shared weights", "which parameters were used", "buffers", "batch statistics"),
    *("count of what is kept", "norm of the gradient", "whether a gradient is not finite"),
    *("scale of the gradients", "scale of sums of gradients", "second factors of the gradients", "momenta", "weights"),
    *("outputs", "targets", "gradients of outputs", "whether a round of averages is over"),
}


SHOWN = {  # attributes that no rank needs
    *("Network.layers", "Network.parameters", "Network.trained", "Stage.kept", "Process.flops"),  # sizes, for a reader
    *("Schedule.bubble", "Schedule.equal_bubble", "Schedule.virtual_stages"),  # the table has the passes themselves
    *("Devices.model", "Machines.counts"),  # the hardware by name; counts for which other plans are made
    "Batches.most_share",  # the program has it in its data step
}


def planned(name: str) -> PlanGraph:
    if name != OWN:
        return build_graph(compiled(JOBS / "pipeline.plt", *PLANS[name]).analysis)
    some_unused = replace(FACTS, batch_norm=False, unused=("blocks.1.weight",))
    analysis, report = analysed(some_unused, devices=DevicesSpec(cpus=2))
    assert analysis is not None, report.errors
    return build_graph(analysis)


def test_every_exchange_is_in_a_plan() -> None:
    found = {action.carries for name in NAMES_OF_PLANS for _, action in planned(name).of_kind(Collective)}
    assert found == CONTENTS


def changed(value: Any) -> Iterator[Any]:
    """Yields values that differ from this one in one attribute. None and an empty tuple count as missing attributes."""
    match value:
        case bool():
            yield not value
        case int() | float():
            yield value + 1
        case StrEnum():
            yield next(member for member in type(value) if member is not value)
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
                other = replace(record, **{field.name: value})  # the other attributes are as they were
                assert to_json(other) != to_json(record), "the hash is over the records as JSON"
                plan.put(name, other)
                yield f"{type(record).__name__}.{field.name}"
        plan.put(name, record)
        for neighbour, edge in list(plan.graph.adj[name].items()):
            relation = edge["relation"]
            for value in (*changed(relation), PlacementEdge(), NextActionEdge(), TransferEdge(bytes=0)):
                if value != relation:
                    plan.relate(name, neighbour, value)
                    yield f"{type(relation).__name__} from {type(record).__name__}"
            plan.relate(name, neighbour, relation)


class Baseline:
    """A plan before a change: its program, and its view."""

    def __init__(self, plan: PlanGraph) -> None:
        self.program, self.view = (emit(plan, ""), places(plan)), plan_view(plan)

    def noticed_by(self, plan: PlanGraph) -> str:
        """Returns what notices a change: a proposition that fails, `program` or `view`; "" if nothing does."""
        try:
            verify(plan)
        except Unsound as error:
            return error.proposition
        if (emit(plan, ""), places(plan)) != self.program:
            return "program"
        return "view" if replace(plan_view(plan), hash=self.view.hash) != self.view else ""


def some(plan: PlanGraph) -> list[str]:
    """Returns all nodes, but of actions that do alike, and of weights that are treated alike, the first alone; and the
    model, which is half of all attributes and the same in all these plans, on one device alone.
    """
    alike: dict[object, str] = {}
    for name, record in plan.graph.nodes(data="record"):
        match record:
            case Action():
                attributes = ("operation", "axis", "carries", "overlaps")
                alike.setdefault((type(record), *(getattr(record, each, None) for each in attributes)), name)
            case Weights():
                alike.setdefault((record.dtype, record.freed, record.trained is None, record.pieces), name)
            case ModelStep() if plan.one(Devices).count > 1:
                pass
            case _:
                alike[name] = name
    return list(alike.values())


def hold(plan: PlanGraph, names: Iterable[str]) -> Counter[str]:
    """Counts the changes that each proposition notices, and the program. Asserts that every change is noticed."""
    baseline = Baseline(plan)
    by: Counter[str] = Counter()
    unnoticed: Counter[tuple[str, str]] = Counter()
    for what in mutate(plan, names):
        found = baseline.noticed_by(plan)
        by[found] += 1
        if not found or (found == "view" and what not in SHOWN):
            unnoticed[what, found] += 1
    assert not unnoticed
    verify(plan)
    return by


@pytest.mark.cases(12)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES_OF_PLANS)
def test_every_attribute_counts(name: str) -> None:
    plan = planned(name)
    hold(plan, some(plan))


@pytest.mark.long
def test_every_attribute_of_every_node_and_edge_counts() -> None:
    """Prints, for the plans together, how many attributes there are, and what noticed that one was changed."""
    by: Counter[str] = Counter()
    kinds: set[str] = set()
    for name in NAMES_OF_PLANS:
        plan = planned(name)
        by += hold(plan, list(plan.graph))
        kinds |= set(mutate(plan, list(plan.graph)))
    proved = by.total() - by["program"] - by["view"]
    print(f"{by.total()} attributes of {len(kinds)} kinds in {len(NAMES_OF_PLANS)} plans, each changed alone:")
    print(f"{proved} are noticed by a proposition; {dict(by.most_common())}")
