"""The exchanges of one rank in a step."""

from __future__ import annotations

from collections.abc import Iterable

from dslc.dsl.record import Record, record


@record
class TrafficNode(Record):
    """The exchanges of one rank on one axis in a step: `count` operations, with `bytes` of input in all."""

    operation: str  # all_reduce, reduce_scatter, all_gather, broadcast, send, receive
    axis: str  # or `all` of them
    what: str  # gradients, parameters, batch statistics, activations, …
    dtype: str
    count: int
    bytes: int


def handed_in(exchanged: Iterable[TrafficNode]) -> int:
    """Returns the bytes of a rank's input, in all."""
    return sum(node.bytes for node in exchanged if node.operation != "receive")
