"""The memory of an exchange that is no exact sum of gradients: what it keeps from step to step, and what it works in.

Contract: `runtime/exchange/` keeps these tensors and no others, which tests/training/test_memory.py compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dslc.compiler.cost.exchange_traffic import factors_of
from dslc.compiler.cost.traffic import buckets
from dslc.compiler.ir.nodes import ParameterNode
from dslc.compiler.placement.exchange import Exchange

Bytes = Callable[[Sequence[ParameterNode], Exchange], int]


def kept_bytes(exchange: Exchange, parameters: Sequence[ParameterNode]) -> int:
    """Returns the bytes that a rank keeps for the exchange of these parameters."""
    return _KEPT[exchange.kind](parameters, exchange) if exchange.kind in _KEPT else 0


def passing_bytes(exchange: Exchange, parameters: Sequence[ParameterNode]) -> int:
    """Returns the bytes that exist while the exchange goes on."""
    return _PASSING[exchange.kind](parameters, exchange) if exchange.kind in _PASSING else 0


def _numbers(parameters: Sequence[ParameterNode]) -> int:
    return sum(q.count for q in parameters)


def _in_flight(begun: int, later: int) -> Bytes:
    """Returns the function for an exchange of gradients that takes `begun` bytes for each number of a bucket as it
    begins, and `later` until it ends: the largest bucket begins while the others are under way, and while the gradient
    that has filled it exists beside it.
    """

    def found(parameters: Sequence[ParameterNode], exchange: Exchange) -> int:
        sizes = [size // 4 for size in buckets(4 * q.count for q in reversed(parameters))]
        most = max(sizes, default=0)
        return 4 * max((q.count for q in parameters), default=0) + begun * most + later * (sum(sizes[-3:]) - most)

    return found


def _kept_factors(parameters: Sequence[ParameterNode], exchange: Exchange) -> int:
    """Returns the bytes of the errors of this rank, and of the second factors."""
    found = factors_of(parameters, exchange)
    return 4 * (found.numbers + found.second) if found is not None else 0


_KEPT: dict[str, Bytes] = {"powersgd": _kept_factors}
_PASSING: dict[str, Bytes] = {
    "fp16": _in_flight(begun=6, later=2),  # what is scaled, and cast
    "bf16": _in_flight(begun=6, later=2),
    "bytegrad": _in_flight(begun=9, later=6),  # a copy, what is rounded, and codes
    "powersgd": _in_flight(begun=4, later=4),  # a copy with the errors
}
