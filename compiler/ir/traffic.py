"""What one rank exchanges in a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrafficNode:
    """What one rank does on one axis in a step: `count` operations, handed `bytes` in all."""

    operation: str  # all_reduce, reduce_scatter, all_gather, broadcast, send, receive
    axis: str  # or `all` of them
    what: str  # gradients, parameters, batch statistics, activations, …
    dtype: str
    count: int
    bytes: int


def handed_in(exchanged: Iterable[TrafficNode]) -> int:
    """The bytes that a rank hands in, all in all."""
    return sum(node.bytes for node in exchanged if node.operation != "receive")
