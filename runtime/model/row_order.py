"""The order in which ranks hold the rows of a column in parts, such as joined queries, keys and values.

Model: of each part every rank of the tensor axis has an equal piece; one after another these pieces are its share of
the rows. DTensor knows contiguous shares alone. So the tensor is permuted for DTensor: first the pieces of rank 0, of
all parts, then the pieces of rank 1. Whatever moves numbers between a rank and a whole tensor converts: initial values,
weights of files, checkpoints, exported weights.

Contract: `begin` says which parameters of this process are permuted, by their names in the plain model. Names that it
does not know are in the order of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dslc.compiler.ir.program import TensorParallelStep

Rows = tuple[slice, slice]  # of a rank's part, and the same in the whole tensor

_SEGMENTS: dict[
    str, tuple[slice, ...]
] = {}  # by parameter: rows of the whole tensor, in the order in which they are held


def begin(step: TensorParallelStep | None) -> None:
    """Notes the parameters that are permuted; forgets the parameters of an earlier job."""
    _SEGMENTS.clear()
    for module, parts in step.parts if step is not None else ():
        assert step is not None
        segments = tuple(_segments(parts, step.size))
        _SEGMENTS.update({f"{module}.{name}": segments for name in ("weight", "bias")})


def _segments(parts: tuple[int, ...], ranks: int) -> Iterator[slice]:
    for rank in range(ranks):
        start = 0
        for size in parts:
            piece = size // ranks
            yield slice(start + rank * piece, start + (rank + 1) * piece)
            start += size


def is_permuted(name: str) -> bool:
    return name in _SEGMENTS


def as_held(name: str, unsharded: Tensor) -> Tensor:
    """Returns a whole tensor with its rows in the order in which the ranks hold them."""
    segments = _SEGMENTS.get(name)
    return unsharded if segments is None else torch.cat([unsharded[rows] for rows in segments])


def as_named(name: str, sharded: Tensor) -> Tensor:
    """Returns a whole tensor with its rows in their own order, from the order in which the ranks hold them."""
    if name not in _SEGMENTS:
        return sharded
    unsharded = torch.empty_like(sharded)
    for own_rows, rows in rows_of_part(name, slice(0, len(sharded))):
        unsharded[rows] = sharded[own_rows]
    return unsharded


def rows_of_part(name: str, part: slice) -> Iterator[Rows]:
    """Yields where runs of a rank's rows lie in the whole tensor; `part` are the rank's rows as they are held."""
    if name not in _SEGMENTS:
        yield slice(0, part.stop - part.start), part
        return
    first = 0
    for rows in _SEGMENTS[name]:
        size = rows.stop - rows.start
        begins, ends = max(part.start, first), min(part.stop, first + size)
        if begins < ends:
            start = rows.start + begins - first
            yield slice(begins - part.start, ends - part.start), slice(start, start + ends - begins)
        first += size
