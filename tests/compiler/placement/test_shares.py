"""Dealing a count to parts: the pieces are all of it, and every function tells of the same pieces."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from dslc.compiler.placement.shares import equal_share_runs, largest, piece, pieces

COUNTS, PARTS = st.integers(0, 200), st.integers(1, 40)


@given(COUNTS, PARTS)
def test_pieces_are_all_of_it_in_order_the_larger_first(count: int, parts: int) -> None:
    made = pieces(count, parts)
    assert made == tuple(piece(count, parts, part) for part in range(parts))
    assert (made[0][0], made[-1][1]) == (0, count)
    assert all(one[1] == other[0] for one, other in pairwise(made))
    sizes = [stop - start for start, stop in made]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(COUNTS, PARTS)
def test_parts_that_are_alike_have_those_pieces(count: int, parts: int) -> None:
    sizes = [stop - start for start, stop in pieces(count, parts)]
    found = [size for _, ranks, size in equal_share_runs(count, parts) for _ in range(ranks)]
    assert found == [size for size in sizes if size]
    assert all(sizes[first] == size for first, _, size in equal_share_runs(count, parts))
    assert len({size for _, _, size in equal_share_runs(count, parts)}) == len(equal_share_runs(count, parts))


@given(st.integers(1, 200), PARTS)
def test_the_largest_is_the_first_of_ours_and_of_torchs(count: int, parts: int) -> None:
    assert largest(count, parts) == piece(count, parts, 0)[1] == len(torch.arange(count).chunk(parts)[0])
