"""The axes along which ranks lie, and the place of a rank on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

AXES = ("pipeline", "data", "context", "tensor")  # outermost first: neighbours on the last one have adjacent ranks


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Returns a rank's place on each axis, of the axes' sizes."""
    by_axis = {}
    for axis in reversed(AXES):
        rank, by_axis[axis] = divmod(rank, sizes[axis])
    return {axis: by_axis[axis] for axis in AXES}


Digits: TypeAlias = Mapping[str, int]  # sizes of axes, or of parts of axes, outermost first


def neighbours(digits: Digits, names: Iterable[str], rank: int) -> tuple[int, ...]:
    """Returns the ranks that differ from `rank` along some axes alone, itself among them."""
    ranks, stride = [rank], 1
    for name in reversed(list(digits)):
        if name in names:
            own = rank // stride % digits[name]
            ranks = [other + (n - own) * stride for n in range(digits[name]) for other in ranks]
        stride *= digits[name]
    return tuple(sorted(ranks))


def crosses_nodes(size: int, stride: int, nodes: int, processes: int) -> bool:
    """True if some neighbours on an axis, `stride` ranks apart, are on different nodes of `processes` ranks."""
    return nodes > 1 and size > 1 and processes % (size * stride) != 0  # groups of size * stride ranks interleave
