"""The memory of an exchange that is no exact sum of gradients: what it keeps from step to step, and what it works in.

Contract: `runtime/exchange/` keeps these tensors and no others, which tests/training/test_memory.py compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dslc.compiler.common.buckets import in_buckets
from dslc.compiler.common.shares import largest
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


def _pieces(parameters: Sequence[ParameterNode], exchange: Exchange) -> list[int]:
    """Returns the numbers of a rank's piece of each bucket (runtime/exchange/exchange.py)."""
    order = sorted(parameters, key=lambda q: q.name)
    buckets = in_buckets(q.count for q in order)
    return [largest(_numbers(order[each.start : each.stop]), exchange.pieces) for each in buckets]


def _outer(parameters: Sequence[ParameterNode], exchange: Exchange) -> int:
    return 2 * 4 * _numbers(parameters)  # weights and momentum, whole on each rank


def _copy(parameters: Sequence[ParameterNode], exchange: Exchange) -> int:
    return 4 * sum(_pieces(parameters, exchange))


def _copies(parameters: Sequence[ParameterNode], exchange: Exchange) -> int:
    return sum(2 * 4 * piece + 4 for piece in _pieces(parameters, exchange))


def _replicas(parameters: Sequence[ParameterNode], exchange: Exchange) -> int:
    return 3 * _copy(parameters, exchange)


def _averaged(parameters: Sequence[ParameterNode], exchange: Exchange) -> int:
    return _copy(parameters, exchange) * (2 if exchange.arguments["peers"] == "shift_one" else 1)


def _coded(parameters: Sequence[ParameterNode], exchange: Exchange) -> int:
    """Returns the bytes of a bucket while it is compressed: the difference, the same scaled, and the codes."""
    return 9 * max(_pieces(parameters, exchange), default=0)


_KEPT: dict[str, Bytes] = {
    "diloco": _outer,
    "decentralized": _averaged,
    "low_precision_decentralized": _replicas,
    "async_average": _copies,
}
_PASSING: dict[str, Bytes] = {"low_precision_decentralized": _coded}
