"""The axes along which ranks lie, and the place of a rank on them."""

from __future__ import annotations

from collections.abc import Mapping

AXES = ("pipeline", "data", "context", "tensor")  # outermost first: neighbours on the last one have adjacent ranks


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Returns a rank's place on each axis, of the axes' sizes."""
    by_axis = {}
    for axis in reversed(AXES):
        rank, by_axis[axis] = divmod(rank, sizes[axis])
    return {axis: by_axis[axis] for axis in AXES}


def crosses_nodes(size: int, stride: int, nodes: int, processes: int) -> bool:
    """True if some neighbours on an axis, `stride` ranks apart, are on different nodes of `processes` ranks."""
    return nodes > 1 and size > 1 and processes % (size * stride) != 0  # groups of size * stride ranks interleave
