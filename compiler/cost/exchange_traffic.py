"""Counts what an exchange sends that is no exact sum of gradients (docs/exchanges.md), in collectives of a rank.

Model: each bucket of gradients, momenta or weights goes through the collectives of its rule one after another. If the
exchange is hierarchical a bucket is first summed, or cut, within a node: each of its ranks exchanges a piece of it with
the ranks at its place in other nodes, and the pieces are gathered in the node. Bytes are those of a rank's input.

Contract: `runtime/exchange/` does these and no others, which tests/training/test_collectives.py compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from dslc.compiler.common.buckets import messages
from dslc.compiler.common.low_rank import matrix_of
from dslc.compiler.common.shares import largest
from dslc.compiler.ir.nodes import ParameterNode
from dslc.compiler.ir.records import Factors
from dslc.compiler.ir.traffic import ALWAYS, Among, Payload, TrafficNode, When
from dslc.compiler.placement.exchange import ExchangePolicy

OWN_BUCKETS = ("bytegrad",)  # exchanges of gradients in buckets that no step changes
HEADER = 8  # bytes in front of a row of codes: its minimum and maximum
MAGNITUDE = 4  # bytes in front of a row of signs


class Collective(NamedTuple):
    """A collective: the dtype and bytes of its input, what it carries if that is not what is agreed on, and how often
    it takes place.
    """

    operation: str
    dtype: str
    bytes: int
    what: Payload = Payload.NOTHING
    times: int = 1


Rule = Callable[[int, ExchangePolicy], Iterable[Collective]]  # of so many numbers


def weights_of(exchange: ExchangePolicy, sizes: Sequence[int]) -> Iterator[TrafficNode]:
    """Yields the exchanges of momenta or weights in buckets of these numbers, and the sums of gradients beside them."""
    steadily = When(after=exchange.alone)
    if exchange.alone:
        yield _node(
            "all_reduce", Payload.GRADIENTS, "float32", [4 * size for size in sizes], when=When(until=exchange.alone)
        )
    if exchange.pieces > 1:
        yield _node("all_reduce", Payload.GRADIENTS, "float32", [4 * size for size in sizes], "node", steadily)
        if not exchange.every:
            yield _node("all_reduce", Payload.ROUND_END, "float32", [8], "node", steadily)
    when = When(every=exchange.every, after=exchange.alone)
    yield from _by_rule(exchange, [largest(size, exchange.pieces) for size in sizes], when)
    if exchange.pieces > 1:
        pieces = [4 * largest(size, exchange.pieces) for size in sizes]
        yield _node("all_gather", exchange.agrees, "float32", pieces, "node", when)


def over_replicas(operation: str, what: Payload) -> bool:
    """True of the exchanges of `fully_shard` that are among replicas; others are among the shards of one."""
    return what == Payload.SCALE_OF_SUMS or (operation, what) == ("all_reduce", Payload.GRADIENTS)


def gradients_of(exchange: ExchangePolicy, buckets: Sequence[Sequence[ParameterNode]]) -> Iterator[TrafficNode]:
    """Yields the exchanges of gradients in buckets of these parameters."""
    if exchange.kind == "powersgd":
        yield from _factors([(sum(q.count for q in each), factors_of(each, exchange)) for each in buckets])
        return
    sizes = [sum(q.count for q in each) for each in buckets]
    pieces = [largest(size, exchange.pieces) for size in sizes]
    if exchange.pieces > 1:
        whole = [4 * exchange.pieces * piece for piece in pieces]
        yield _node("reduce_scatter", Payload.GRADIENTS, "float32", whole, "node")
    yield from _by_rule(exchange, pieces, ALWAYS)
    if exchange.pieces > 1:
        yield _node("all_gather", Payload.GRADIENTS, "float32", [4 * piece for piece in pieces], "node")


def _by_rule(exchange: ExchangePolicy, numbers_of: Sequence[int], when: When) -> Iterator[TrafficNode]:
    among: Among = "nodes" if exchange.pieces > 1 else ""
    sent = [list(RULES[exchange.kind](numbers, exchange)) for numbers in numbers_of]
    for each in zip(*sent, strict=True):  # the same collective of all buckets
        first = each[0]
        sizes = [one.bytes for one in each]
        if first.operation in ("send", "receive"):
            sizes = [part for size in sizes for part in messages(size)]
        yield _node(
            first.operation,
            first.what or exchange.agrees,
            first.dtype,
            sizes * first.times,
            among,
            when,
        )


def _node(
    operation: str, what: Payload, dtype: str, sizes: Sequence[int], among: Among = "", when: When = ALWAYS
) -> TrafficNode:
    return TrafficNode(
        operation=operation,
        axis="data",
        what=what,
        dtype=dtype,
        count=len(sizes),
        bytes=sum(sizes),
        among=among,
        when=when,
    )


# ------------------------------------------------------------------------------------------------------ the rules


def _fp16(numbers: int, exchange: ExchangePolicy) -> Iterable[Collective]:
    return Collective("all_reduce", "float32", 4, Payload.SCALE), Collective("all_reduce", "float16", 2 * numbers)


def _bf16(numbers: int, exchange: ExchangePolicy) -> Iterable[Collective]:
    return (Collective("all_reduce", "bfloat16", 2 * numbers),)


def _mean(numbers: int, exchange: ExchangePolicy) -> Iterable[Collective]:
    return (Collective("all_reduce", "float32", 4 * numbers),)


def _bytegrad(numbers: int, exchange: ExchangePolicy) -> Iterable[Collective]:
    row = HEADER + largest(numbers, exchange.members)
    return Collective("all_to_all", "uint8", exchange.members * row), Collective("all_gather", "uint8", row)


def _signs(numbers: int, exchange: ExchangePolicy) -> Iterable[Collective]:
    row = MAGNITUDE + largest(largest(numbers, exchange.members), 8)
    return Collective("all_to_all", "uint8", exchange.members * row), Collective("all_gather", "uint8", row)


def factors_of(parameters: Iterable[ParameterNode], exchange: ExchangePolicy | None) -> Factors | None:
    """Returns the factors of parameters whose gradients are exchanged together; None unless some are matrices."""
    if exchange is None or exchange.kind != "powersgd":
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


def _factors(buckets: Sequence[tuple[int, Factors | None]]) -> Iterator[TrafficNode]:
    first = [numbers if found is None else numbers - found.numbers + found.first for numbers, found in buckets]
    yield _node("all_reduce", Payload.GRADIENTS, "float32", [4 * numbers for numbers in first])
    yield _node(
        "all_reduce", Payload.SECOND_FACTORS, "float32", [4 * found.second for _, found in buckets if found is not None]
    )


def _with_peers(numbers: int, exchange: ExchangePolicy) -> Iterable[Collective]:
    if exchange.arguments["peers"] == "all":
        return _mean(numbers, exchange)
    return Collective("send", "float32", 4 * numbers), Collective("receive", "float32", 4 * numbers)


def _in_a_ring(numbers: int, exchange: ExchangePolicy) -> Iterable[Collective]:
    coded = HEADER + numbers
    return Collective("send", "uint8", coded, times=2), Collective("receive", "uint8", coded, times=2)


def _mean_of_round(numbers: int, exchange: ExchangePolicy) -> Iterable[Collective]:
    return (Collective("all_reduce", "float32", 4 * numbers + 4),)  # and whether the rank is done


RULES: dict[str, Rule] = {
    "bytegrad": _bytegrad,
    "fp16": _fp16,
    "bf16": _bf16,
    "local_sgd": _mean,
    "diloco": _mean,
    "decentralized": _with_peers,
    "low_precision_decentralized": _in_a_ring,
    "async_average": _mean_of_round,
    "qadam": _bytegrad,
    "onebit_adam": _signs,
}
