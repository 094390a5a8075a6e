"""The plan graph as plain data, and back: every node with its record, every edge with its relation, in order.

Fields that have their default are left out: most of a graph are actions, which have few of theirs.
"""

from __future__ import annotations

import hashlib
import json

from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.ir.codec import DecodeError, changed_fields, from_json
from dslc.compiler.ir.records import Estimate, Job, NodeRecord, Relation
from dslc.dsl.record import Record, record


@record
class StoredGraph(Record):
    """Nodes as (name, record), edges as (from, to, relation)."""

    done: tuple[str, ...]
    nodes: tuple[tuple[str, NodeRecord], ...]
    edges: tuple[tuple[str, str, Relation], ...]


def store(plan: PlanGraph) -> dict[str, object]:
    """Returns the graph for `json.dumps`."""
    return {
        "done": plan.done,
        "nodes": [(name, changed_fields(node["record"])) for name, node in plan.graph.nodes.items()],
        "edges": _edges(plan),
    }


def _edges(plan: PlanGraph) -> list[tuple[str, str, object]]:
    """Returns the edges for `json.dumps`; the many that share a relation share its dict."""
    plain: dict[int, object] = {}
    edges: list[tuple[str, str, object]] = []
    for one, others in plan.graph.adjacency():
        for other, edge in others.items():
            relation = edge["relation"]
            if id(relation) not in plain:
                plain[id(relation)] = changed_fields(relation)
            edges.append((one, other, plain[id(relation)]))
    return edges


def plan_hash(plan: PlanGraph) -> str:
    """Returns the identity of a plan: the first 16 hexadecimal digits of SHA-256 over its graph without the estimate.

    Hosts and resumed runs compare plans by this hash. A predicted time is nothing that ranks run, and each host may
    predict it by a calibration of its own.
    """
    nodes = [
        (name, changed_fields(node["record"]))
        for name, node in plan.graph.nodes.items()
        if not isinstance(node["record"], Estimate)
    ]
    return _digest({"done": plan.done, "nodes": nodes, "edges": _edges(plan)})


def hash_without_lines(plan: PlanGraph, *, estimate: bool = True) -> str:
    """Returns a hash of the graph without the names of the job and its file, and without the lines of the job that
    records name. `estimate`: the hash covers the predicted time.
    """
    excluded = (Job,) if estimate else (Job, Estimate)
    records = ((name, node["record"]) for name, node in plan.graph.nodes.items())
    nodes = [
        (name, _without_lines(changed_fields(record))) for name, record in records if not isinstance(record, excluded)
    ]
    return _digest({"done": plan.done, "nodes": nodes, "edges": _edges(plan)})


def _without_lines(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_lines(each) for name, each in value.items() if name != "line"}
    return [_without_lines(each) for each in value] if isinstance(value, list | tuple) else value


def _digest(data: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def restore(data: object) -> PlanGraph:
    """Returns the graph that `store` wrote. Raises DecodeError."""
    kept = from_json(StoredGraph, data)
    made = PlanGraph(done=kept.done)
    for name, node in kept.nodes:
        made.put(name, node)
    for one, other, relation in kept.edges:
        if one not in made.graph or other not in made.graph:
            raise DecodeError(f"an edge from {one} to {other}, one of which is no node")
        made.relate(one, other, relation)
    return made
