"""The memory of an exchange that is no exact sum of gradients: what it keeps from step to step, and what it works in.

Contract: `runtime/exchange/` keeps these tensors and no others, which tests/training/test_memory.py compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.nodes import ParameterNode
from dslc.compiler.operations.buckets import buckets
from dslc.compiler.operations.exchanges import factors_of
from dslc.compiler.placement.buckets import in_buckets
from dslc.compiler.placement.exchange import ExchangePolicy
from dslc.compiler.placement.shares import largest

Bytes = Callable[[Sequence[ParameterNode], ExchangePolicy], int]


def kept_bytes(exchange: ExchangePolicy, parameters: Sequence[ParameterNode]) -> int:
    """Returns the bytes that a rank keeps for the exchange of these parameters."""
    return _KEPT[exchange.kind](parameters, exchange) if exchange.kind in _KEPT else 0


def passing_bytes(exchange: ExchangePolicy, parameters: Sequence[ParameterNode]) -> int:
    """Returns the bytes that exist while the exchange goes on."""
    return _PASSING[exchange.kind](parameters, exchange) if exchange.kind in _PASSING else 0


def summed_bytes(exchange: ExchangePolicy, parameters: Sequence[ParameterNode]) -> int:
    """Returns the bytes of the gradients laid out in buckets, all at once, where an exchange of weights or momenta sums
    gradients exactly: in its first steps, and within a node in each.
    """
    if exchange.agrees is Payload.GRADIENTS or not (exchange.alone or exchange.pieces > 1):
        return 0
    return 4 * exchange.pieces * sum(_pieces(parameters, exchange))


def _pieces(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> list[int]:
    """Returns the numbers of this rank's piece of each bucket of momenta or weights."""
    sizes = [q.count for q in sorted(parameters, key=lambda q: q.name)]
    return [largest(sum(sizes[n] for n in bucket), exchange.pieces) for bucket in in_buckets(sizes)]


def _outer(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> int:
    return 2 * 4 * sum(q.count for q in parameters)  # weights and momentum, whole on each rank


def _copy(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> int:
    return 4 * sum(_pieces(parameters, exchange))


def _copies(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> int:
    return sum(2 * 4 * piece + 4 for piece in _pieces(parameters, exchange))


def _replicas(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> int:
    return 3 * _copy(parameters, exchange)


def _averaged(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> int:
    return _copy(parameters, exchange) * (2 if exchange.arguments["peers"] == "shift_one" else 1)


def _coded(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> int:
    """Returns the bytes of a bucket while it is compressed: the difference, the same scaled, and the codes."""
    return 9 * max(_pieces(parameters, exchange), default=0)


def _under_way(sizes: Sequence[int]) -> int:
    """Returns the most numbers of buckets that are under way at once: one in each of its two collectives, and the one
    that begins.
    """
    return max((sum(sizes[n : n + 3]) for n in range(len(sizes))), default=0)


def _errors(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> int:
    """Returns the bytes of the errors of a rank's chunks, and of the chunk that it owns."""
    chunks = [8 * largest(piece, 8 * exchange.members) for piece in _pieces(parameters, exchange)]
    return sum(4 * (exchange.members + 1) * chunk for chunk in chunks)


def _in_codes(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> int:
    """Returns the bytes of momenta laid out in buckets, of the codes that are sent and received, and of a piece in
    float32 as it is coded or restored, twice.
    """
    pieces = _pieces(parameters, exchange)
    return (4 * exchange.pieces + 2) * _under_way(pieces) + 8 * max(pieces, default=0)


def _in_signs(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> int:
    """Returns the bytes of momenta laid out in buckets, and of a piece in float32 as its signs are restored, with an
    index of each byte.
    """
    pieces = _pieces(parameters, exchange)
    return 4 * exchange.pieces * _under_way(pieces) + 5 * max(pieces, default=0)


def _in_flight(begun: int, later: int) -> Bytes:
    """Returns the function for an exchange of gradients that takes `begun` bytes for each number of a bucket as it
    begins, and `later` until it ends: the largest bucket begins while the others are under way, and while the gradient
    that has filled it exists beside it.
    """

    def bucket_bytes(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> int:
        sizes = [size // 4 for size in buckets(4 * q.count for q in reversed(parameters))]
        most = max(sizes, default=0)
        return 4 * max((q.count for q in parameters), default=0) + begun * most + later * (sum(sizes[-3:]) - most)

    return bucket_bytes


def _kept_factors(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> int:
    """Returns the bytes of the errors of this rank, and of the second factors."""
    found = factors_of(parameters, exchange)
    return 4 * (found.numbers + found.second) if found is not None else 0


_KEPT: dict[str, Bytes] = {
    "diloco": _outer,
    "decentralized": _averaged,
    "low_precision_decentralized": _replicas,
    "async_average": _copies,
    "onebit_adam": _errors,
    "powersgd": _kept_factors,
}
_PASSING: dict[str, Bytes] = {
    "low_precision_decentralized": _coded,
    "qadam": _in_codes,
    "onebit_adam": _in_signs,
    "fp16": _in_flight(begun=6, later=2),  # what is scaled, and cast
    "bf16": _in_flight(begun=6, later=2),
    "bytegrad": _in_flight(begun=9, later=6),  # a copy, what is rounded, and codes
    "powersgd": _in_flight(begun=4, later=4),  # a copy with the errors
}
