"""The exchanges that are no exact sum of gradients, one by one: their collectives, and their memory.

Contract: `runtime/exchange/` does these collectives and no others, which tests/training/test_collectives.py compares,
and keeps these tensors and no others, which tests/training/test_memory.py compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.nodes import ParameterNode
from dslc.compiler.ir.records import Factors
from dslc.compiler.operations.buckets import buckets
from dslc.compiler.placement.buckets import in_buckets, matrix_of
from dslc.compiler.placement.exchange import ExchangePolicy
from dslc.compiler.placement.shares import largest
from dslc.dsl.record import Record, record


class Exchanged(NamedTuple):
    """A collective: dtype and bytes of its input, its content if not what is agreed on, and how often it runs."""

    operation: str
    dtype: str
    bytes: int
    what: Payload = Payload.NOTHING
    times: int = 1


Rule = Callable[[int, ExchangePolicy], Iterable[Exchanged]]  # of so many numbers
Bytes = Callable[[Sequence[ParameterNode], ExchangePolicy], int]


@record
class ExchangeRule(Record):
    """An exchange: its collectives for one bucket, the bytes that a rank keeps for it, and the bytes that exist while
    it runs.

    `sums_in` is the dtype of an exchange that only rounds, and so goes with every engine. `row` are the bytes of
    numbers that are sent as codes; `factored`: matrices are sent as two
    factors. `averaged` counts the members of a mean (0: all), and `neighbours` the members that each one sends a
    message to. `fixed_buckets`: no step changes its buckets of gradients. `flag` are the bytes in a mean that say
    whether a rank is done.
    """

    collectives: Rule
    kept: Bytes = lambda parameters, exchange: 0
    passing: Bytes = lambda parameters, exchange: 0
    sums_in: str = ""
    row: Callable[[int], int] | None = None
    factored: bool = False
    averaged: int = 0
    neighbours: int = 1
    fixed_buckets: bool = False
    flag: int = 0


def kept_bytes(exchange: ExchangePolicy, parameters: Sequence[ParameterNode]) -> int:
    """Returns the bytes that a rank keeps for the exchange of these parameters."""
    return RULES[exchange.kind].kept(parameters, exchange)


def passing_bytes(exchange: ExchangePolicy, parameters: Sequence[ParameterNode]) -> int:
    """Returns the bytes that exist while the exchange goes on."""
    return RULES[exchange.kind].passing(parameters, exchange)


def summed_bytes(exchange: ExchangePolicy, parameters: Sequence[ParameterNode]) -> int:
    """Returns the bytes of the gradients laid out in buckets, all at once, where an exchange of weights or momenta sums
    gradients exactly: in its first steps, and within a node in each.
    """
    if exchange.agrees is Payload.GRADIENTS or not (exchange.alone or exchange.pieces > 1):
        return 0
    return 4 * exchange.pieces * sum(_pieces(parameters, exchange))


# -------------------------------------------------------------------------------------------------- the collectives


def coded_row(numbers: int) -> int:
    """Returns the bytes of numbers in 8 bits each, behind their minimum and maximum."""
    return 8 + numbers


def signed_row(numbers: int) -> int:
    """Returns the bytes of the signs of numbers, behind their magnitude."""
    return 4 + largest(numbers, 8)


def _fp16(numbers: int, exchange: ExchangePolicy) -> Iterable[Exchanged]:
    return Exchanged("all_reduce", "float32", 4, Payload.SCALE), Exchanged("all_reduce", "float16", 2 * numbers)


def _bf16(numbers: int, exchange: ExchangePolicy) -> Iterable[Exchanged]:
    return (Exchanged("all_reduce", "bfloat16", 2 * numbers),)


def _mean(numbers: int, exchange: ExchangePolicy) -> Iterable[Exchanged]:
    return (Exchanged("all_reduce", "float32", 4 * numbers),)


def _bytegrad(numbers: int, exchange: ExchangePolicy) -> Iterable[Exchanged]:
    row = coded_row(largest(numbers, exchange.members))
    return Exchanged("all_to_all", "uint8", exchange.members * row), Exchanged("all_gather", "uint8", row)


def _signs(numbers: int, exchange: ExchangePolicy) -> Iterable[Exchanged]:
    row = signed_row(largest(numbers, exchange.members))
    return Exchanged("all_to_all", "uint8", exchange.members * row), Exchanged("all_gather", "uint8", row)


def _with_peers(numbers: int, exchange: ExchangePolicy) -> Iterable[Exchanged]:
    if exchange.arguments["peers"] == "all":
        return _mean(numbers, exchange)
    return Exchanged("send", "float32", 4 * numbers), Exchanged("receive", "float32", 4 * numbers)


def _in_a_ring(numbers: int, exchange: ExchangePolicy) -> Iterable[Exchanged]:
    coded = coded_row(numbers)
    return Exchanged("send", "uint8", coded, times=2), Exchanged("receive", "uint8", coded, times=2)


def _mean_of_round(numbers: int, exchange: ExchangePolicy) -> Iterable[Exchanged]:
    return (Exchanged("all_reduce", "float32", 4 * numbers + RULES[exchange.kind].flag),)


def factors_of(parameters: Iterable[ParameterNode], exchange: ExchangePolicy | None) -> Factors | None:
    """Returns the factors of parameters whose gradients are exchanged together; None unless some are matrices."""
    if exchange is None or not RULES[exchange.kind].factored:
        return None
    rank = exchange.arguments["rank"]
    shapes = [shape for q in parameters if (shape := matrix_of(q.shape, rank)) is not None]
    if not shapes:
        return None
    return Factors(
        numbers=sum(rows * columns for rows, columns in shapes),
        first=rank * sum(rows for rows, _ in shapes),
        second=rank * sum(columns for _, columns in shapes),
    )


# ------------------------------------------------------------------------------------------------------- the memory


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
    """Returns the most numbers of buckets under way: one in each of its two collectives, and a bucket that begins."""
    return max((sum(sizes[n : n + 3]) for n in range(len(sizes))), default=0)


def _errors(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> int:
    """Returns the bytes of the errors of a rank's chunks, and of the chunk that it owns."""
    chunks = [8 * largest(piece, 8 * exchange.members) for piece in _pieces(parameters, exchange)]
    return sum(4 * (exchange.members + 1) * chunk for chunk in chunks)


def _in_codes(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> int:
    """Returns the bytes of momenta laid out in buckets, and of the codes that are sent and received. A piece in float32
    is added twice, as it is coded or restored.
    """
    pieces = _pieces(parameters, exchange)
    return (4 * exchange.pieces + 2) * _under_way(pieces) + 8 * max(pieces, default=0)


def _in_signs(parameters: Sequence[ParameterNode], exchange: ExchangePolicy) -> int:
    """Returns the bytes of momenta in buckets, and of a piece restored from signs, with an index of each byte."""
    pieces = _pieces(parameters, exchange)
    return 4 * exchange.pieces * _under_way(pieces) + 5 * max(pieces, default=0)


def _in_flight(begun: int, later: int) -> Bytes:
    """Returns the function for an exchange of gradients. It takes `begun` bytes for each number of a bucket as it
    begins, and `later` until it ends. The largest bucket begins while the other buckets are under way, and while the
    gradient that has filled it still exists.
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


RULES: Mapping[str, ExchangeRule] = {
    "fp16": ExchangeRule(
        collectives=_fp16, sums_in="float16", passing=_in_flight(begun=6, later=2)
    ),  # scaled, and cast
    "bf16": ExchangeRule(collectives=_bf16, sums_in="bfloat16", passing=_in_flight(begun=6, later=2)),
    "bytegrad": ExchangeRule(
        collectives=_bytegrad,
        row=coded_row,
        fixed_buckets=True,
        passing=_in_flight(begun=9, later=6),  # a copy, what is rounded, and codes
    ),
    "powersgd": ExchangeRule(
        collectives=_mean,
        factored=True,
        kept=_kept_factors,
        passing=_in_flight(begun=4, later=4),  # a copy with the errors
    ),
    "local_sgd": ExchangeRule(collectives=_mean),
    "diloco": ExchangeRule(collectives=_mean, kept=_outer),
    "decentralized": ExchangeRule(collectives=_with_peers, kept=_averaged, averaged=2),
    "low_precision_decentralized": ExchangeRule(
        collectives=_in_a_ring, row=coded_row, kept=_replicas, passing=_coded, averaged=3, neighbours=2
    ),
    "async_average": ExchangeRule(collectives=_mean_of_round, kept=_copies, flag=4),
    "qadam": ExchangeRule(collectives=_bytegrad, row=coded_row, passing=_in_codes),
    "onebit_adam": ExchangeRule(collectives=_signs, row=signed_row, kept=_errors, passing=_in_signs),
}
