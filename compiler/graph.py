"""The plan graph: what sits where, what follows what, and what flows between, as one networkx graph.

Nodes have a `kind`:

    node        machines that are alike (`count`)
    device      devices that are alike (`count`, `processes` each machine)
    process     the ranks at one pipeline coordinate (`first`, `last`)
    stage       layers `first` to `last`
    share       data ranks with equal shares of a batch (`batch` full or last, `first_rank`, `ranks`, `samples`)
    action      one thing a process does in a step (`process`, `what`, `stage`, `microbatch`)

Edges have a `relation`: `placement` (stage on process, process on device, device on node), `order` (an action after
another of the same process) and `data` (what one gives another, with `bytes`). The graph is folded by symmetry: what is
alike is one node with a count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import networkx as nx

from dslc.compiler.analyse import Analysis


@dataclass(frozen=True)
class PlanGraph:
    """The graph, and the analysis it was made from. Passes add to it; `done` names those that have run."""

    analysis: Analysis
    graph: nx.DiGraph[str] = field(default_factory=nx.DiGraph)
    done: tuple[str, ...] = ()

    def of_kind(self, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((name, data) for name, data in self.graph.nodes(data=True) if data["kind"] == kind)

    def related(self, relation: str) -> nx.DiGraph[str]:
        """The edges of one relation, as a view."""
        chosen = [(a, b) for a, b, data in self.graph.edges(data=True) if data["relation"] == relation]
        return self.graph.edge_subgraph(chosen)

    def actions(self) -> nx.DiGraph[str]:
        """The actions of a step, with order and data between them."""
        return self.graph.subgraph([name for name, _ in self.of_kind("action")])
