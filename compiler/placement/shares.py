"""Divides a count into parts: samples over ranks, a rank's samples over micro-batches, layers over stages, rows over
shards.

Pieces are contiguous, and their sizes differ by at most one, the larger first. torch's own shards (`torch.chunk`) are
all as large as the first, except the last ones, which have the remainder. `largest` is true of both.
"""

from __future__ import annotations


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


def equal_share_runs(count: int, parts: int) -> tuple[tuple[int, int, int], ...]:
    """Returns the parts whose pieces have one size: (first part, parts, size), without parts that get nothing."""
    size, larger = largest(count, parts), count % parts or parts
    runs = (0, larger, size), (larger, parts - larger, size - 1)
    return tuple(run for run in runs if run[1] and run[2])
