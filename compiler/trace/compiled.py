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

from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dslc.compiler.trace.run import Run, storage, tensors_of

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.fx import GraphModule


@dataclass
class _FirstCall:
    """The first call of a block."""

    given: object
    output: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _KeptTensors:
    """By place: the tensors among the block's inputs and outputs that it keeps; and bytes of others."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    others: int


def kept_by_blocks(run: Run, saved: dict[str, int]) -> dict[str, int]:
    """Returns the bytes that each block of `run`'s module keeps of all its samples. Each piece of memory counts at the
    first block that keeps it. `saved`, by layer, tells apart blocks of one class that differ.
    """
    import torch

    calls: dict[str, _FirstCall] = {}
    with ExitStack() as around:
        for path in sorted(run.cut.blocks & run.cut.layers.keys()):
            module = run.cut.layers[path]
            around.callback(module.register_forward_pre_hook(_entering(calls, path), with_kwargs=True).remove)
            around.callback(module.register_forward_hook(_leaving(calls, path)).remove)
        around.enter_context(run.fake)
        around.enter_context(torch.autocast("cpu", dtype=torch.bfloat16, enabled=run.low))
        run.called()
    held, found = set(run.own), {}
    known: dict[Hashable, _KeptTensors | None] = {}
    for path, call in calls.items():
        module, given = run.cut.layers[path], tensors_of(call.given)
        alike = (type(module), saved.get(path), *((t.shape, t.dtype) for t in (*module.parameters(), *given)))
        if alike not in known:
            with run.fake, torch.autocast("cpu", dtype=torch.bfloat16, enabled=run.low):
                known[alike] = _partition(module, call.given)
        kept = known[alike]
        if kept is None:
            continue
        pieces = [*(given[n] for n in kept.inputs), *(call.output[n] for n in kept.outputs)]
        new = {storage(piece): piece.untyped_storage().nbytes() for piece in pieces if storage(piece) not in held}
        held |= new.keys()
        found[path] = kept.others + sum(new.values())
    return found


def _entering(calls: dict[str, _FirstCall], path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        calls.setdefault(path, _FirstCall((args, kwargs)))

    return hook


def _leaving(calls: dict[str, _FirstCall], path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        calls[path].output = calls[path].output or tensors_of(output)

    return hook


def _partition(module: nn.Module, given: object) -> _KeptTensors | None:
    """Partitions the block's work into forward and backward pass by the compiler; returns None if it cannot trace the
    block.
    """
    import torch

    from dslc.compiler.trace.private_torch import trace_backward, tree_flatten, tree_unflatten

    leaves, form = tree_flatten(given)
    taken = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found: list[_KeptTensors] = []

    def function(*flat: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(flat[len(state) :])
        args, kwargs = tree_unflatten([next(rest) if isinstance(x, torch.Tensor) else x for x in leaves], form)
        return tensors_of(torch.func.functional_call(module, dict(zip(state, flat, strict=False)), args, kwargs))

    try:
        trace_backward(
            function,
            [*state.values(), *taken],
            lambda forward, outputs: found.append(_kept_tensors(forward, outputs, len(state))),
        )
    except Exception:  # any kind: the user's code is traced
        return None
    return found[0] if found else None


def _kept_tensors(forward: GraphModule, outputs: int, parameters: int) -> _KeptTensors:
    import torch

    nodes = forward.graph.find_nodes(op="output")[0].args[0]
    inputs = {node: n - parameters for n, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    given = {node: n for n, node in enumerate(nodes[:outputs])}
    kept = [node for node in nodes[outputs:] if isinstance(node.meta.get("val"), torch.Tensor)]
    others = {storage(node.meta["val"]): node.meta["val"] for node in kept if node not in inputs and node not in given}
    return _KeptTensors(
        inputs=tuple(inputs[node] for node in kept if inputs.get(node, -1) >= 0),
        outputs=tuple(given[node] for node in kept if node in given and node not in inputs),
        others=sum(tensor.untyped_storage().nbytes() for tensor in others.values()),
    )
