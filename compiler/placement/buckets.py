"""The buckets in which weights and momenta are exchanged, and gradients whose rounding depends on their bucket; and
the messages in which two ranks send each other a bucket; and the matrices of low rank that stand for gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod

MOST = 25 * 2**18  # numbers: 25 MiB in float32
LONGEST = 2**18  # bytes of a message: two long ones that cross on one connection of gloo's take almost twice as long


def in_buckets(sizes: Iterable[int], most: int = MOST) -> tuple[range, ...]:
    """Returns the tensors of these sizes, by their places, in buckets: one is full as soon as it holds `most` numbers
    or more. No step changes them, so that what is kept of a bucket is of the same tensors for ever.
    """
    buckets: list[range] = []
    start = bytes_of_bucket = n = 0
    for n, size in enumerate(sizes, 1):
        bytes_of_bucket += size
        if bytes_of_bucket >= most:
            buckets.append(range(start, n))
            start, bytes_of_bucket = n, 0
    return (*buckets, range(start, n)) if start < n else tuple(buckets)


def messages(size: int) -> list[int]:
    """Returns the bytes of the messages in which two ranks send each other `size` bytes."""
    return [min(LONGEST, size - start) for start in range(0, size, LONGEST)]


def names_in_backward_order(names: Iterable[str]) -> list[str]:
    """Returns names of parameters in reverse order, numbers in them by their size: about as backward passes go."""
    return sorted(names, key=_parts, reverse=True)


def _parts(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def matrix_of(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Returns the rows and columns (first, rest) of a gradient; None if its factors would be no fewer numbers."""
    if len(shape) < 2:
        return None
    rows, columns = shape[0], prod(shape[1:])
    return (rows, columns) if (rows + columns) * rank < rows * columns else None
