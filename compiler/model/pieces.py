"""Keys and values that a network of a function's gathers over a context axis: their numbers, and their memory.

Model: every call of attention that tracing saw (compiler/trace/sharding/context_parallel_check.py) gathers its keys and
values. As for dslc's own layers (attention_layers.py), sizes cover all ranks' pieces together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dslc.compiler.ir.memory import LayerMemory
from dslc.compiler.ir.nodes import LayerNode, ModelGraph

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import AttentionFacts


def gathers_by_layer(graph: ModelGraph) -> dict[str, list[tuple[int, AttentionFacts]]]:
    """Returns the calls of attention of a network that a function makes, by the layer that makes them: the numbers of
    keys and values of whole sequences that a rank of the tensor axis gathers over the context axis, for each sample.
    """
    facts = graph.traced
    calls = facts.pieces.attention if facts is not None and facts.pieces is not None else ()
    cut = facts.shares.attended if facts is not None and facts.shares is not None else ()
    own_numbers = cut if len(cut) == len(calls) else tuple(call.numbers for call in calls)
    calls_by_layer: dict[str, list[tuple[int, AttentionFacts]]] = {}
    for numbers, call in zip(own_numbers, calls, strict=True):
        calls_by_layer.setdefault(call.layer, []).append((numbers, call))
    return calls_by_layer


def with_gathers(layer: LayerNode, calls: Sequence[tuple[int, AttentionFacts]], pieces: int) -> LayerNode:
    """Returns a layer with the keys and values of whole sequences that its attention gathers, keeps and, one call after
    another, puts in order; and the masks of its causal attention.
    """
    gathered = sum(pieces * numbers for numbers, _ in calls)
    most = max((pieces * numbers for numbers, _ in calls), default=0)
    masks = sum(call.length * call.length // pieces for _, call in calls if call.causal)
    return replace(
        layer,
        float32=with_more_bytes(layer.float32, 4 * gathered, 12 * most),
        autocast=with_more_bytes(layer.autocast, 2 * gathered, 6 * most),
        masks=layer.masks + masks,
    )


def with_more_bytes(memory: LayerMemory, gathered: int, most: int) -> LayerMemory:
    """Returns memory with `gathered` more bytes that are kept, and `most` beside them while the layer works."""
    work = memory.working
    if work is not None:
        back = tuple(replace(moment, bytes=moment.bytes + most) for moment in work.backward)
        work = replace(work, forward=work.forward + gathered + most, dropping=work.dropping + most, backward=back)
    return replace(memory, saved=memory.saved + gathered, selective=memory.selective + gathered, working=work)
