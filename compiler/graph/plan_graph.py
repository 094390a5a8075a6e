"""The plan graph: places, order and transfers, as one networkx graph.

Each node and each edge carries one record (ir/records.py), a node as `record`, an edge as `relation`. The job's
constants are nodes too, so that the programs of the ranks are made from the graph alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import networkx as nx

from dslc.compiler.ir.actions import Action, StagePass
from dslc.compiler.ir.records import Axis, Devices, Network, NextActionEdge, Relation

Record = TypeVar("Record")


@dataclass(frozen=True)
class PlanGraph:
    """The graph. Passes add to it; `done` names the passes that have run."""

    graph: nx.DiGraph[str] = field(default_factory=nx.DiGraph)
    done: tuple[str, ...] = ()
    _names: dict[type, dict[str, None]] = field(default_factory=dict)  # of the nodes of a kind, in order

    # ---------------------------------------------------------------------------------------------------- records

    def put(self, name: str, record: object) -> None:
        """Adds a node, or replaces its record."""
        self.graph.add_node(name, record=record)
        self._names.setdefault(type(record), {})[name] = None

    def node_record(self, name: str, kind: type[Record]) -> Record:
        found = self.graph.nodes[name]["record"]
        assert isinstance(found, kind), f"{name} is {type(found).__name__}"
        return found

    def change(self, name: str, /, **values: object) -> None:
        self.put(name, replace(self.graph.nodes[name]["record"], **values))

    def of_kind(self, kind: type[Record]) -> Iterator[tuple[str, Record]]:
        """Yields names and records of all nodes of a kind, in the order in which they were added."""
        nodes = self.graph.nodes
        names = self._names[kind] if kind in self._names else nodes if kind.__subclasses__() else ()
        records = ((name, nodes[name]["record"]) for name in names if name in nodes)
        return ((name, record) for name, record in records if isinstance(record, kind))

    def find(self, kind: type[Record]) -> Record | None:
        """Returns the record of the only node of a kind, or None."""
        found = [record for _, record in self.of_kind(kind)]
        assert len(found) <= 1, f"{len(found)} nodes are {kind.__name__}"
        return found[0] if found else None

    def one(self, kind: type[Record]) -> Record:
        """Returns the record of the only node of a kind."""
        found = self.find(kind)
        assert found is not None, f"no node is {kind.__name__}"
        return found

    def axis(self, name: str) -> Axis:
        return next(axis for axis in self.one(Devices).axes if axis.name == name)

    # ------------------------------------------------------------------------------------------------------ edges

    def relate(self, one: str, other: str, relation: Relation) -> None:
        self.graph.add_edge(one, other, relation=relation)

    def related(self, relation: type[Relation]) -> nx.DiGraph[str]:
        """Returns the edges of one relation, as a view."""
        edges = self.graph.edges(data=True)
        return self.graph.edge_subgraph([(a, b) for a, b, data in edges if isinstance(data["relation"], relation)])

    def line(self, names: list[str], instead_of: list[str]) -> None:
        """Puts actions of a process into this order."""
        self.graph.remove_edges_from(pairwise(instead_of))
        self.graph.add_edges_from(pairwise(names), relation=NextActionEdge())

    def lines(self) -> tuple[dict[int, list[str]], str]:
        """Returns the actions of each process in order; and, if they do not form one line, the place of the fault."""
        members: dict[int, int] = {}
        after: dict[str, str] = {}
        process_of = {name: action.process for name, action in self.of_kind(Action)}
        led: set[str] = set()
        for name, others in self.graph.adjacency():
            if name not in process_of:
                continue
            process = process_of[name]
            members[process] = members.get(process, 0) + 1
            for other, edge in others.items():
                if not isinstance(edge["relation"], NextActionEdge):
                    continue
                if name in after:
                    return {}, f"both {after[name]} and {other} follow {name}"
                if other in led:
                    return {}, f"{other} follows {name} and another"
                if process_of.get(other) != process:
                    return {}, f"{other} follows {name}, of another process"
                after[name] = other
                led.add(other)
        heads: dict[int, list[str]] = {process: [] for process in members}
        for name, process in process_of.items():
            if name not in led:
                heads[process].append(name)
        for process, row in heads.items():
            if len(row) != 1:
                return {}, f"process {process}: " + (f"{row[0]} and {row[1]} both begin" if row else "a ring")
            while row[-1] in after:
                row.append(after[row[-1]])
            if len(row) != members[process]:
                return {}, f"process {process}: {len(row)} of {members[process]} actions follow {row[0]}"
        return heads, ""


def unknown(plan: PlanGraph) -> bool:
    """True if the stages of a model are unknown because it was not traced."""
    return plan.find(Network) is None and plan.axis("pipeline").size > 1


def passes_in(line: Iterable[Action]) -> tuple[str, ...]:
    """Returns the emitted passes of a process in torch's notation: `3F0` is the forward of micro-batch 0 at stage 3;
    two that overlap are one, `(3F1;3B0)OVERLAP_F_B`.
    """
    row: list[str] = []
    for action in line:
        if action.emitted:
            overlaps = isinstance(action, StagePass) and action.overlaps
            row.append(f"({row.pop()};{action})OVERLAP_F_B" if overlaps else str(action))
    return tuple(row)
