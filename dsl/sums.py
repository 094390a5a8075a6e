"""Sums of floats that are the same in each version of Python."""

from __future__ import annotations

from collections.abc import Iterable


def float_sum(values: Iterable[float]) -> float:
    """Returns the sum from left to right. `sum` does so until Python 3.11, and compensates for rounding since 3.12: a
    plan and its hash would differ in a last digit.
    """
    total: float = 0
    for value in values:
        total += value
    return total
