"""MinMaxUInt8: what is restored, and of which rows nothing is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslc.runtime.exchange.quantization import HEADER, compress, restore

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)
ROWS = st.lists(NUMBERS, min_size=1, max_size=20)


def back(row: list[float]) -> np.ndarray:
    return restore(compress(torch.tensor([row])))[0].numpy()


@given(ROWS)
def test_a_number_moves_by_half_a_step_at_most(row: list[float]) -> None:
    numbers = np.array(row, np.float32)
    step = (np.float64(numbers.max()) - numbers.min() + 1e-7) / 255
    rounding = 4 * np.spacing(np.abs(numbers).max())  # of float32, where a step is smaller than that
    assert np.abs(back(row) - np.float64(numbers)).max() <= step / 2 * 1.001 + rounding


@given(ROWS)
def test_the_order_is_kept(row: list[float]) -> None:
    restored = back(sorted(row))
    assert (np.diff(restored) >= 0).all()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 9))
def test_constants_stay(number: float, count: int) -> None:
    restored = back([number] * count)
    assert np.abs(restored - np.float32(number)).max() <= 2e-7 * abs(number) + 2e-10


@given(ROWS.filter(lambda row: min(row) <= 0 <= max(row)))
def test_zero_stays_zero(row: list[float]) -> None:
    assert back([*row, 0.0])[-1] == 0


@given(st.lists(NUMBERS, max_size=5), st.lists(NUMBERS, max_size=5), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_not_finite_leaves_no_number(before: list[float], after: list[float], bad: float) -> None:
    assert np.isnan(back([*before, bad, *after])).all()


def test_rows_are_apart_and_one_huge_number_spoils_only_its_own() -> None:
    rows = torch.tensor([[1e30, 1.0, -2.0], [0.5, 0.25, -0.5], [0.0, 0.0, 0.0]])
    packed = compress(rows)
    assert packed.shape == (3, HEADER + 3) and packed.dtype == torch.uint8
    restored = restore(packed)
    assert restored[0, 0] == pytest.approx(1e30) and not restored[0, 1:].any() and not restored[2].any()
    assert (restored[1] - rows[1]).abs().max() <= 0.5 / 255
