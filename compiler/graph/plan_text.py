"""A plan graph as text after any pass: each node with its values, its place, and the nodes that it hands to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.ir.actions import Action
from dslc.compiler.ir.records import PlacementEdge, TransferEdge
from dslc.dsl.record import Record

_MOST = 8  # items of a list that are shown


def plan_text(plan: PlanGraph) -> str:
    """Returns the nodes in the order in which passes added them, and then the actions of each process in order."""
    nodes, edges = plan.graph.number_of_nodes(), plan.graph.number_of_edges()
    lines = [f"after {plan.done[-1]}: {nodes} nodes, {edges} edges"]
    for name, node in plan.graph.nodes.items():
        if not isinstance(node["record"], Action):
            lines += _node_lines(plan, name, node["record"])
    for process, row in plan.lines()[0].items():
        lines.append(f"actions of process {process}")
        for name in row:
            lines += [f"  {line}" for line in _node_lines(plan, name, plan.node_record(name, Action))]
    return "\n".join(lines) + "\n"


def _node_lines(plan: PlanGraph, name: str, node: Record) -> Iterator[str]:
    yield f"{name}: {type(node).__name__} {' '.join(_values(node))}".rstrip()
    for other, edge in plan.graph.adj[name].items():
        match edge["relation"]:
            case PlacementEdge():
                yield f"  on {other}"
            case TransferEdge(bytes=size):
                yield f"  hands {size} bytes to {other}"


def _values(node: Record, *, nested: bool = False) -> Iterator[str]:
    for name in node.record_shown:
        value = getattr(node, name)
        if name not in node.record_defaults or value != node.record_defaults[name]:
            yield f"{name}={_text(value, nested=nested)}"


def _text(value: object, *, nested: bool) -> str:
    match value:
        case Record():
            return f"{type(value).__name__}({'…' if nested else ', '.join(_values(value, nested=True))})"
        case tuple():
            more = [f"… {len(value)} in all"] if len(value) > _MOST else []
            return f"[{', '.join([*(_text(item, nested=nested) for item in value[:_MOST]), *more])}]"
        case Mapping():
            return f"{{{', '.join(f'{key}: {_text(item, nested=nested)}' for key, item in value.items())}}}"
        case str():
            return repr(str(value))
        case float():
            return f"{value:g}"
    return str(value)
