"""The plan graph: what sits where, what follows what, and what flows between, as one networkx graph.

Nodes have a `kind`:

    node        machines that are alike (`count`)
    device      devices that are alike (`count`, `processes` each machine, `gpus` the ones of a machine that are named)
    process     ranks that do the same (`index`, `pipeline` their coordinate, `first`, `last`; `traffic`; `memory`)
    stage       layers `first` to `last` (`index`; `held`, the most micro-batches whose activations it holds)
    share       data ranks with equal shares of a batch (`batch` full or last, `first_rank`, `ranks`, `samples`)
    action      one thing a process does in a step (`process`, `what`, `stage`, `microbatch`; -1 where it is of none)

What an action is, its `what` says:

    F, B, I, W                      a stage's forward, its backward, or the two halves of it, on one micro-batch
    SEND_F, RECV_F, SEND_B, RECV_B  a message between stages (`shape`, `dtype`, `bytes`)
    UNSHARD, REDUCE_GRAD            where a pipeline gathers a stage's parameters, and agrees on its gradients
    all_reduce, all_gather, …       collectives (`axis`, `carries`, `dtype`; `count` of them, of `bytes` in all)
    send, receive                   the same of gradients of weights that two stages share
    update                          the optimizer's step

Edges have a `relation`: `placement` (stage on process, process on device, device on node), `order` (an action after
another of the same process: they form one line) and `data` (what one gives another, with `bytes`). The graph is folded
by symmetry: what is alike is one node with a count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import networkx as nx

from dslc.compiler.rules.analysis import Analysis

COMPUTE = frozenset({"F", "B", "I", "W"})
MESSAGES = frozenset({"SEND_F", "RECV_F", "SEND_B", "RECV_B"})
LOCAL = COMPUTE | {"UNSHARD", "REDUCE_GRAD", "update"}  # what a process does alone


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

    def line(self, names: list[str], instead_of: list[str]) -> None:
        """Puts actions of a process into this order."""
        self.graph.remove_edges_from(pairwise(instead_of))
        self.graph.add_edges_from(pairwise(names), relation="order")

    def lines(self) -> tuple[dict[int, list[str]], str]:
        """The actions of each process in order; and if they do not form one line, where not."""
        members: dict[int, int] = {}
        after: dict[str, str] = {}
        process_of = {name: data["process"] for name, data in self.of_kind("action")}
        led: set[str] = set()
        for name, others in self.graph.adjacency():
            if name not in process_of:
                continue
            process = process_of[name]
            members[process] = members.get(process, 0) + 1
            for other, edge in others.items():
                if edge["relation"] != "order":
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
    """Whether nothing can be said of a step: the stages of a model that was not traced."""
    return plan.analysis.pipeline is None and plan.analysis.layout.sizes["pipeline"] > 1
