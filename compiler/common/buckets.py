"""The buckets in which weights and momenta are exchanged."""

from __future__ import annotations

from collections.abc import Iterable

MOST = 25 * 2**18  # numbers: 25 MiB in float32


def in_buckets(sizes: Iterable[int], most: int = MOST) -> tuple[range, ...]:
    """Returns the tensors of these sizes, by their places, in buckets: one is full as soon as it holds `most` numbers
    or more. No step changes them, so that what is kept of a bucket is of the same tensors for ever.
    """
    found: list[range] = []
    first = held = n = 0
    for n, size in enumerate(sizes, 1):
        held += size
        if held >= most:
            found.append(range(first, n))
            first, held = n, 0
    return (*found, range(first, n)) if first < n else tuple(found)
