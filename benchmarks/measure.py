"""Runs two commands in alternating pairs, and computes the median of their ratio with its 95% interval.

A machine's noise comes in waves; the two runs of a pair are close in time, so a wave hits both. The interval is the
binomial one of a median: order statistics, no assumption on the distribution.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """`ours` over `theirs`. A target is met when the interval's lower end is at or below it."""

    name: str
    median: float
    low: float
    high: float
    ours: float
    theirs: float
    unit: str
    pairs: int
    target: float | None

    def __str__(self) -> str:
        met = (
            ""
            if self.target is None
            else f"; target {self.target:.2f} {'met' if self.low <= self.target else 'MISSED'}"
        )
        return (
            f"{self.name}: {self.median:.3f} [{self.low:.3f}, {self.high:.3f}] "
            f"({self.ours:.4g} over {self.theirs:.4g} {self.unit}, {self.pairs} pairs{met})"
        )


def compare(
    name: str,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    *,
    pairs: int = 30,
    unit: str = "s",
    target: float | None = None,
) -> Ratio:
    """Runs both `pairs` times, alternating which goes first."""
    a: list[float] = []
    b: list[float] = []
    for n in range(pairs):
        for which in ((a, ours), (b, theirs)) if n % 2 else ((b, theirs), (a, ours)):
            which[0].append(which[1]())
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    low, high = interval(ratios)
    return Ratio(
        name, statistics.median(ratios), low, high, statistics.median(a), statistics.median(b), unit, pairs, target
    )


def interval(ordered: list[float]) -> tuple[float, float]:
    """The 95% interval of the median of an ordered sample."""
    n = len(ordered)
    tail = 0.0
    k = 0
    while k < n // 2:
        tail += math.comb(n, k) / 2**n
        if tail > 0.025:
            break
        k += 1
    k = max(k - 1, 0)
    return ordered[k], ordered[n - 1 - k]
