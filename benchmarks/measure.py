"""Runs two commands in alternating pairs, and computes the median of their ratio with its 95% interval.

A machine's noise comes in waves; the two runs of a pair are close in time, so a wave hits both. The interval is the
binomial one of a median: order statistics, no assumption on the distribution.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
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
    return compare_all(name, {name: ours}, theirs, pairs=pairs, unit=unit, target=target)[name]


def compare_all(
    name: str,
    sides: Mapping[str, Callable[[], float]],
    theirs: Callable[[], float],
    *,
    pairs: int,
    unit: str,
    target: float | None = None,
) -> dict[str, Ratio]:
    """Runs all `pairs` times in turn, each time in the other order, and returns the ratio of each side to `theirs`."""
    measured: dict[str, list[float]] = {side: [] for side in sides}
    base: list[float] = []
    for n in range(pairs):
        order = [(base, theirs), *((measured[side], run) for side, run in sides.items())]
        for times, run in reversed(order) if n % 2 else order:
            times.append(run())
    ratios = {}
    for side, times in measured.items():
        ordered = sorted(x / y for x, y in zip(times, base, strict=True))
        low, high = interval(ordered)
        title = name if side == name else f"{name}, {side}"
        middle, ours, by_hand = (statistics.median(each) for each in (ordered, times, base))
        ratios[side] = Ratio(title, middle, low, high, ours, by_hand, unit, pairs, target)
    return ratios


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
