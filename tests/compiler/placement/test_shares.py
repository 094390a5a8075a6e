"""Dealing a count to parts: the pieces are all of it, and every function tells of the same pieces."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from dslc.compiler.placement.shares import (
    MOST_TRIED,
    deal,
    deal_within,
    divisors,
    equal_share_runs,
    largest,
    piece,
    pieces,
    share_runs,
)

COUNTS, PARTS = st.integers(0, 200), st.integers(1, 40)


@given(st.integers(1, 5_000))
def test_divisors_are_all_of_them(number: int) -> None:
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_divisors_of_a_very_large_number_are_found_at_once() -> None:
    found = divisors(10**60)
    assert found[:4] == [1, 2, 4, 5] and found[-1] == 10**60 and MOST_TRIED in found
    assert divisors(2**61 - 1) == [1, 2**61 - 1]


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


@given(st.integers(0, 200), st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 5))
def test_shares_are_in_proportion_and_none_is_empty(count: int, weights: list[int], unit: int) -> None:
    shares, units = deal(count * unit, weights, unit), [count * weight / sum(weights) for weight in weights]
    assert sum(shares) == count * unit and all(share % unit == 0 for share in shares)
    missing = sum(max(0.0, 1 - value) for value in units)
    for share, value in zip(shares, units, strict=True):
        assert value - 1 - missing < share / unit < value + 1
    assert count < len(weights) or min(shares) > 0
    assert [size for _, parts, size in share_runs(shares) for _ in range(parts)] == [size for size in shares if size]
    of_weight = sorted(zip(weights, shares, strict=True))
    assert all(one[1] <= other[1] for one, other in pairwise(of_weight) if one[0] < other[0])


@given(COUNTS, PARTS)
def test_equal_weights_make_pieces(count: int, parts: int) -> None:
    assert deal(count, [3] * parts) == tuple(stop - start for start, stop in pieces(count, parts))


@given(st.integers(0, 40), st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(1, 3), st.integers(0, 9))
def test_no_share_exceeds_a_limit(count: int, weights: list[int], unit: int, more: int) -> None:
    most = unit * (largest(count, len(weights)) + more)
    shares = deal_within(count * unit, weights, unit, most)
    assert sum(shares) == count * unit and max(shares) <= most and all(share % unit == 0 for share in shares)
    if max(free := deal(count * unit, weights, unit)) <= most:
        assert shares == free
