"""Parameters that a forward pass uses twice, with uses of other parameters between.

A schedule that splits the backward pass computes the gradients of a stage's weights by themselves, from the gradients
of the operations that use them. From a later use torch goes through all operations between to the earlier one, and
frees what they have saved; other weights that are used between come too late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor
from torch.autograd.graph import Node

from dslc.runtime.pipeline.recording import ModuleTensor, Recording, full

Repeated = tuple[str, ...]  # a parameter, the layers in which it is used again, and a parameter between
MOST = 64  # uses of a parameter that are looked at


def repeated_uses(
    recording: Recording, tensors: list[Tensor], names: Mapping[int, ModuleTensor]
) -> tuple[Repeated, ...]:
    """Returns the parameters used again after others, from the recording's tensors by number."""
    order = _upstream_first(*(tensors[number].grad_fn for number in recording.outputs))
    owners = _owners(recording, tensors)
    leaves: dict[Node, frozenset[int]] = {}  # parameters from which alone a node is computed
    origins: dict[Node, dict[str, None]] = {}  # the layers of these nodes, which have the parameter, too
    uses: dict[int, list[Node]] = defaultdict(list)
    for node in order:
        sources = [source for source, _ in node.next_functions if source is not None]
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[node], origins[node] = frozenset({id(variable)}), {}
        elif sources and all(source in leaves for source in sources) and len({leaves[s] for s in sources}) == 1:
            leaves[node] = leaves[sources[0]]
            origins[node] = dict.fromkeys(name for source in sources for name in origins[source])
            origins[node] |= {owners[node]: None} if node in owners else {}
        else:
            for parameter in dict.fromkeys(
                source_parameter for source in sources for source_parameter in leaves.get(source, ())
            ):
                if parameter in names:
                    uses[parameter].append(node)
    users: dict[object, list[int]] = defaultdict(list)
    for parameter, nodes in uses.items():
        for node in nodes:
            users[node].append(parameter)
    repeated: dict[Repeated, None] = {}
    for parameter, nodes in uses.items():
        for later_use in nodes[:MOST] if len(nodes) > 1 else ():
            upstream = _upstream_first(later_use)
            upstream_nodes = set(upstream[:-1])
            for earlier_use in (node for node in nodes if node in upstream_nodes):
                places = dict.fromkeys(
                    name
                    for use in (earlier_use, later_use)
                    for name in (*_layers_before(use, parameter, leaves, origins), owners.get(use, ""))
                )
                for other_parameter in (
                    other_parameter
                    for node in _nodes_between(earlier_use, upstream)
                    for other_parameter in users.get(node, ())
                ):
                    if other_parameter != parameter:
                        repeated[(full(names[parameter]), *places, full(names[other_parameter]))] = None
    return tuple(repeated)


def _layers_before(
    use: Node, parameter: int, leaves: Mapping[Node, frozenset[int]], origins: Mapping[Node, Mapping[str, None]]
) -> list[str]:
    """Returns the layers between a parameter and an operation that uses it, all computed from the parameter alone."""
    sources = [source for source, _ in use.next_functions if source is not None]
    sources = [source for source in sources if parameter in leaves.get(source, ())]
    return [name for source in sources for name in origins[source]]


def _nodes_between(first_use: Node, upstream: list[Node]) -> list[Node]:
    """Returns the nodes of `upstream` that depend on `first_use`, without the last node."""
    dependents = {first_use}
    nodes = []
    for node in upstream[:-1]:
        if any(source in dependents for source, _ in node.next_functions):
            dependents.add(node)
            nodes.append(node)
    return nodes


def _upstream_first(*ends: Node | None) -> list[Node]:
    """Returns the nodes of the graph of autograd that `ends` depend on, and these, each after those it depends on."""
    order: list[Node] = []
    visited: set[Node] = set()
    stack = [(end, False) for end in reversed(ends) if end is not None]
    while stack:
        node, is_expanded = stack.pop()
        if is_expanded:
            order.append(node)
        elif node not in visited:
            visited.add(node)
            stack.append((node, True))
            stack += [(source, False) for source, _ in node.next_functions if source is not None]
    return order


def _owners(recording: Recording, tensors: list[Tensor]) -> dict[object, str]:
    """Returns for each node the layer that makes it, or the layer that began last before the node was made."""
    starts = {number: name for name, number in recording.starts.items()}
    owners: dict[object, str] = {}
    layer = next(iter(recording.starts), "")
    for number, call in enumerate(recording.calls):
        layer = starts.get(number, layer)
        for result in call.gives:
            stack = [tensors[result].grad_fn]
            while stack:
                node = stack.pop()
                if node is not None and node not in owners:
                    owners[node] = layer
                    stack += [source for source, _ in node.next_functions]
    return owners
