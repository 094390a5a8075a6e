"""Divides a count into parts: samples over ranks, a rank's samples over micro-batches, layers over stages, rows over
shards.

Pieces are contiguous, and their sizes differ by at most one, the larger first. torch's own shards (`torch.chunk`) are
all as large as the first, except the last ones, which have the remainder. `largest` is true of both. `deal` divides in
proportion to weights, by largest remainders.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import isqrt

MOST_TRIED = 10_000  # as a divisor: each that is found gives a second one


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, in order. Of a number above `MOST_TRIED` squared some are left out."""
    low = [n for n in range(1, min(isqrt(number), MOST_TRIED) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def piece(count: int, parts: int, part: int) -> tuple[int, int]:
    """Returns the piece [start, stop) of 0 … count - 1 that goes to one of `parts` parts."""
    size, larger = divmod(count, parts)
    start = part * size + min(part, larger)
    return start, start + size + (part < larger)


def pieces(count: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Returns all pieces [start, stop), in order."""
    return tuple(piece(count, parts, part) for part in range(parts))


def largest(count: int, parts: int) -> int:
    """Returns the size of the first piece, which no other exceeds."""
    return -(-count // parts)


def deal(count: int, weights: Sequence[int], unit: int = 1) -> tuple[int, ...]:
    """Divides a multiple of `unit` in proportion to weights of at least 1, into multiples of `unit`.

    A share differs from its exact proportion by less than a unit. But if there is a unit for everyone, no share is
    empty: the largest shares give what is missing. Of equal remainders the first is rounded up.
    """
    units, total = count // unit, sum(weights)
    shares = [units * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda n: (-(units * weights[n] % total), n))
    for n in by_remainder[: units - sum(shares)]:
        shares[n] += 1
    if units >= len(weights):
        for n in (n for n, share in enumerate(shares) if not share):
            giver = max(range(len(weights)), key=lambda other: (shares[other], -weights[other], other))
            shares[giver] -= 1
            shares[n] = 1
    return tuple(unit * share for share in shares)


def deal_within(count: int, weights: Sequence[int], unit: int, most: int) -> tuple[int, ...]:
    """Divides as `deal` does, but into shares of at most `most`, a multiple of `unit`: the others take the rest.

    `most` times the weights must be `count` or more.
    """
    shares = deal(count, weights, unit)
    full = [n for n, share in enumerate(shares) if share >= most]
    if not full or max(shares) == most:
        return shares
    others = [n for n in range(len(weights)) if n not in full]
    rest = deal_within(count - most * len(full), [weights[n] for n in others], unit, most)
    found = dict(zip(others, rest, strict=True))
    return tuple(found.get(n, most) for n in range(len(weights)))


def share_runs(shares: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Returns the neighbours whose shares have one size: (first part, parts, size), without parts that get nothing."""
    runs, first = [], 0
    for size, group in groupby(shares):
        parts = len(list(group))
        runs += [(first, parts, size)] if size else []
        first += parts
    return tuple(runs)


def equal_share_runs(count: int, parts: int) -> tuple[tuple[int, int, int], ...]:
    """Returns the parts whose pieces have one size: (first part, parts, size), without parts that get nothing."""
    size, larger = largest(count, parts), count % parts or parts
    runs = (0, larger, size), (larger, parts - larger, size - 1)
    return tuple(run for run in runs if run[1] and run[2])
