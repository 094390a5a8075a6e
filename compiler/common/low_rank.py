"""Parameters whose gradients are exchanged as matrices of low rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod


def matrix_of(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Returns the rows and columns of a gradient of this shape, as (first, rest); None if its factors of this rank
    would be no fewer numbers than itself.
    """
    if len(shape) < 2:
        return None
    rows, columns = shape[0], prod(shape[1:])
    return (rows, columns) if (rows + columns) * rank < rows * columns else None
