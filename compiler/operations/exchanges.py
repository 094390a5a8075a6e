"""The operations of an exchange that is no exact sum of gradients (docs/exchanges.md).

Model: each bucket of gradients, momenta or weights goes through the collectives of its rule one after another. If the
exchange is hierarchical a bucket is first summed, or cut, within a node. Each of the node's ranks exchanges a piece
with the ranks at its place in other nodes; the pieces are then gathered in the node. Bytes count a rank's input.

Contract: `runtime/exchange/` does these and no others, which tests/training/test_collectives.py compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from dslc.compiler.ir.actions import ALWAYS, Among, Cadence, Payload
from dslc.compiler.ir.records import Weights
from dslc.compiler.operations import moments as m
from dslc.compiler.operations.coordinate import Coordinate
from dslc.compiler.operations.exchange_rules import RULES
from dslc.compiler.operations.moments import Moment, RankGroup, StepOperation, operation
from dslc.compiler.placement.buckets import messages
from dslc.compiler.placement.exchange import ExchangePolicy
from dslc.compiler.placement.shares import largest


def local(place: Coordinate, weights: Mapping[str, Weights]) -> Iterator[StepOperation]:
    """Yields the exchanges of momenta or weights of ranks that step alone, and their sums of gradients."""
    exchange = place.sharding.exchange
    assert exchange is not None, "ranks that step by themselves exchange something"
    trained = {name: each.trained for name, each in weights.items() if each.trained}
    node, summed = _node(exchange), [4 * numbers for numbers in trained.values()]
    first, later = Cadence(until=exchange.alone), Cadence(after=exchange.alone)
    when = Cadence(every=exchange.every, after=exchange.alone)
    if exchange.alone:
        data = place.along("data")
        yield operation("all_reduce", Payload.GRADIENTS, data, m.BEFORE_UPDATE, summed, when=first, weights=trained)
    if exchange.pieces > 1:
        yield operation("all_reduce", Payload.GRADIENTS, node, m.BEFORE_UPDATE, summed, when=later, weights=trained)
        if not exchange.every:
            yield operation("all_reduce", Payload.ROUND_END, node, m.BEFORE_PASSES, [8], when=later)
    moment = m.BEFORE_UPDATE
    if exchange.agrees is Payload.WEIGHTS:
        moment = m.BEFORE_PASSES if exchange.ahead else m.AFTER_UPDATE
    pieces = [largest(numbers, exchange.pieces) for numbers in trained.values()]
    yield from _by_rule(exchange, pieces, moment, when, trained)
    if exchange.pieces > 1:
        sizes = [4 * piece for piece in pieces]
        yield operation("all_gather", exchange.agrees, node, moment, sizes, when=when, weights=trained)


def exchanged_gradients(exchange: ExchangePolicy, trained: Mapping[str, Weights]) -> Iterator[StepOperation]:
    """Yields the exchanges of the gradients of these groups."""
    if RULES[exchange.kind].factored:
        yield from _factors(exchange, trained)
        return
    node, pieces = _node(exchange), [largest(each.trained or 0, exchange.pieces) for each in trained.values()]
    if exchange.pieces > 1:
        sizes = [4 * exchange.pieces * piece for piece in pieces]
        yield operation("reduce_scatter", Payload.GRADIENTS, node, m.BEFORE_UPDATE, sizes, weights=trained)
    yield from _by_rule(exchange, pieces, m.BEFORE_UPDATE, ALWAYS, trained)
    if exchange.pieces > 1:
        sizes = [4 * piece for piece in pieces]
        yield operation("all_gather", Payload.GRADIENTS, node, m.BEFORE_UPDATE, sizes, weights=trained)


def _by_rule(
    exchange: ExchangePolicy, numbers_of: Sequence[int], moment: Moment, when: Cadence, weights: Iterable[str]
) -> Iterator[StepOperation]:
    rows = [list(RULES[exchange.kind].collectives(numbers, exchange)) for numbers in numbers_of]
    for collectives in zip(*rows, strict=True):  # the same collective of all buckets
        first = collectives[0]
        sizes = [each.bytes for each in collectives]
        if first.operation in ("send", "receive"):
            sizes = [part for size in sizes for part in messages(size)]
        yield operation(
            first.operation,
            first.what or exchange.agrees,
            _members(exchange),
            moment,
            sizes,
            dtype=first.dtype,
            times=first.times,
            when=when,
            weights=() if first.what else weights,
        )


def _node(exchange: ExchangePolicy) -> RankGroup:
    return RankGroup(axis="data", ranks=exchange.pieces, stride=1, among="node")


def _members(exchange: ExchangePolicy) -> RankGroup:
    """Returns the ranks that exchange with each other: one of each member."""
    among: Among = "nodes" if exchange.pieces > 1 else ""
    return RankGroup(axis="data", ranks=exchange.members, stride=exchange.pieces, among=among)


def _factors(exchange: ExchangePolicy, trained: Mapping[str, Weights]) -> Iterator[StepOperation]:
    factors = {name: each.factors for name, each in trained.items() if each.factors is not None}
    first = [
        each.trained or 0 if each.factors is None else (each.trained or 0) - each.factors.numbers + each.factors.first
        for each in trained.values()
    ]
    second, group = [4 * each.second for each in factors.values()], _members(exchange)
    yield operation(
        "all_reduce", Payload.GRADIENTS, group, m.BEFORE_UPDATE, [4 * numbers for numbers in first], weights=trained
    )
    yield operation("all_reduce", Payload.SECOND_FACTORS, group, m.BEFORE_UPDATE, second, weights=factors)
