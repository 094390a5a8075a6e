"""Numbers as signs and a magnitude (runtime/exchange/sign_compression.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslc.runtime.exchange import sign_compression


@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_bits_are_packed_as_numpy_packs_them(rows: int, count: int, data: st.DataObject) -> None:
    size = rows * 8 * count
    drawn = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    bits = np.array(drawn).reshape(rows, -1)
    packed = sign_compression.pack(torch.from_numpy(bits))
    assert np.array_equal(packed.numpy(), np.packbits(bits, axis=1, bitorder="little"))
    assert np.array_equal(sign_compression.unpack(packed).numpy(), np.where(bits, 1, -1))


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=40))
def test_a_row_is_its_signs_and_mean_size(numbers: list[float]) -> None:
    chunk = sign_compression.chunk_of(len(numbers), 1)
    row = torch.tensor([numbers + [0.0] * (chunk - len(numbers))])
    real = torch.tensor([len(numbers)])
    packed = sign_compression.compress(row, real)
    assert packed.shape == (1, sign_compression.HEADER + chunk // 8)
    found = sign_compression.restore(packed)[0, : len(numbers)]
    size = np.abs(np.array(numbers, np.float32)).mean(dtype=np.float64)
    wanted = np.where(np.array(numbers, np.float32) >= 0, size, -size)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6, atol=1e-38)
    left = row.clone()
    sign_compression.subtract(left, packed, len(numbers))
    assert not left[0, len(numbers) :].any()
    assert left.square().sum() <= row.square().sum() * (1 + 1e-5)


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_a_row_with_a_number_that_is_not_finite_is_not_finite(bad: float) -> None:
    row = torch.ones(2, 8)
    row[1, 3] = bad
    found = sign_compression.restore(sign_compression.compress(row, torch.tensor([8, 8])))
    assert found[0].isfinite().all() and not found[1].isfinite().any()


def test_filling_counts_for_nothing() -> None:
    row = torch.tensor([[4.0, 0, 0, 0, 0, 0, 0, 0], [0.0] * 8])
    found = sign_compression.restore(sign_compression.compress(row, torch.tensor([1, 0])))
    assert found[0, 0] == 4 and not found[1].any()


@pytest.mark.parametrize(("numbers", "members", "chunk"), ((1, 4, 8), (64, 4, 16), (65, 4, 24), (8, 1, 8)))
def test_chunks_are_whole_bytes(numbers: int, members: int, chunk: int) -> None:
    assert sign_compression.chunk_of(numbers, members) == chunk
