"""Activation memory of a traced module's blocks under `torch.compile`.

Model: torch's compiler recomputes cheap activations in the backward pass (`min_cut_rematerialization_partition`), and
so keeps less than autograd does. Each kind of block goes through the part of the compiler that decides this, without
memory; the compiled code is dropped.

Contract: bytes of a sample by block, as in `LayerMemory.saved`.

Limits: if the compiler cannot trace a block, the figure without a compiler stands, which is an upper bound; the same
goes for layers outside of blocks. Patterns that the compiler replaces beforehand, such as hand-written attention, are
left as they are.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from dslc.compiler.trace.private_torch import trace_backward, tree_flatten, tree_unflatten
from dslc.compiler.trace.run import Run, TracedModule, storage, tensors_of

if TYPE_CHECKING:
    from torch.fx import GraphModule


@dataclass(frozen=True)
class _KeptTensors:
    """By place: the tensors among the block's inputs and outputs that it keeps; and bytes of others."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    others: int


class _FirstCalls(Run):
    """A run that keeps the inputs and the outputs of each layer's first call."""

    def __init__(self, traced: TracedModule, samples: int, low: bool) -> None:
        super().__init__(traced, samples, low)
        self.given: dict[str, object] = {}
        self.made: dict[str, list[torch.Tensor]] = {}

    def enter_module(self, path: str, inputs: object) -> None:
        self.given.setdefault(path, inputs)

    def leave_module(self, path: str, output: object) -> None:
        self.made.setdefault(path, tensors_of(output))


def kept_by_blocks(traced: TracedModule, samples: int, low: bool, saved: dict[str, int]) -> dict[str, int]:
    """Returns the bytes that each block of a module keeps of all samples. Each piece of memory counts at the first
    block that keeps it. `saved`, by layer, tells apart blocks of one class that differ.
    """

    run = _FirstCalls(traced, samples, low)
    with run.running():
        run.called()
    own_storages, kept_bytes = set(run.own), {}
    partitions: dict[Hashable, _KeptTensors | None] = {}
    for path in (path for path in run.given if path in run.cut.blocks):
        module, block_inputs = run.cut.layers[path], tensors_of(run.given[path])
        key = (type(module), saved.get(path), *((t.shape, t.dtype) for t in (*module.parameters(), *block_inputs)))
        if key not in partitions:
            with run.fake, torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
                partitions[key] = _partition(module, run.given[path])
        partition = partitions[key]
        if partition is None:
            continue
        pieces = [*(block_inputs[n] for n in partition.inputs), *(run.made[path][n] for n in partition.outputs)]
        new = {
            storage(piece): piece.untyped_storage().nbytes() for piece in pieces if storage(piece) not in own_storages
        }
        own_storages |= new.keys()
        kept_bytes[path] = partition.others + sum(new.values())
    return kept_bytes


def _partition(module: nn.Module, inputs: object) -> _KeptTensors | None:
    """Partitions the block's work into forward and backward pass by the compiler; returns None if it cannot trace the
    block.
    """

    leaves, form = tree_flatten(inputs)
    input_tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    kept_tensors: list[_KeptTensors] = []

    def function(*flat: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(flat[len(state) :])
        args, kwargs = tree_unflatten([next(rest) if isinstance(x, torch.Tensor) else x for x in leaves], form)
        return tensors_of(torch.func.functional_call(module, dict(zip(state, flat, strict=False)), args, kwargs))

    try:
        trace_backward(
            function,
            [*state.values(), *input_tensors],
            lambda forward, outputs: kept_tensors.append(_kept_tensors(forward, outputs, len(state))),
        )
    except Exception:  # any kind: the user's code is traced
        return None
    return kept_tensors[0] if kept_tensors else None


def _kept_tensors(forward: GraphModule, outputs: int, parameters: int) -> _KeptTensors:
    nodes = forward.graph.find_nodes(op="output")[0].args[0]
    inputs = {node: n - parameters for n, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    output_nodes = {node: n for n, node in enumerate(nodes[:outputs])}
    saved_nodes = [node for node in nodes[outputs:] if isinstance(node.meta.get("val"), torch.Tensor)]
    intermediate = {
        storage(node.meta["val"]): node.meta["val"]
        for node in saved_nodes
        if node not in inputs and node not in output_nodes
    }
    return _KeptTensors(
        inputs=tuple(inputs[node] for node in saved_nodes if inputs.get(node, -1) >= 0),
        outputs=tuple(output_nodes[node] for node in saved_nodes if node in output_nodes and node not in inputs),
        others=sum(tensor.untyped_storage().nbytes() for tensor in intermediate.values()),
    )
