"""Padding, packing and documents of data, on figures that can be counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dslc.compiler.ir.program import DataStep
from dslc.runtime.data.padding import Padding, by_length, measure_documents, measure_padding, packed_share
from dslc.runtime.data.samples import FetchedSamples, TensorSamples

LENGTHS = [1, 4] * 8


def data_step(samples: int, **changed: Any) -> DataStep:
    values: dict[str, Any] = {
        "source": "python",
        "train_samples": samples,
        "validation_samples": 0,
        "split": "none",
        "seed": 3,
        "shuffle": False,
        "batch": 4,
        "last": 0,
        "workers": 0,
    }
    return DataStep(**values | changed)


def padded(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.nn.utils.rnn.pad_sequence([values for values, _ in samples], batch_first=True)
    return values, torch.zeros(len(samples))


def test_padding_by_order() -> None:
    shapes = [(length, 3) for length in LENGTHS]
    samples = FetchedSamples([(torch.zeros(shape), 0) for shape in shapes], "job.plt:2", collate=padded)
    step = data_step(16, structured=True)
    # Each micro-batch of a rank has samples of 1 and 4: 5 of 8 are real.
    assert measure_padding(step, samples, shapes, 2, 1, 99) == Padding(4, 3 / 8, 12, 1)
    assert measure_padding(step, samples, shapes, 2, 1, 2) == Padding(2, 3 / 8, 12, 1)
    assert measure_padding(by_length(step, shapes), samples, shapes, 2, 1, 99) == Padding(4, 0, 7.5, 1)
    # Ranks of one sample each have no padding, and the longer of two takes 4 / 2.5.
    alone = measure_padding(data_step(16, structured=True, batch=2), samples, shapes, 2, 1, 99)
    assert alone is not None and (alone.batches, alone.share, alone.numbers) == (8, 0, 7.5)
    assert alone.fullest == pytest.approx(1.6)


def test_padding_by_a_token() -> None:
    tokens = torch.tensor([[5, 6, 0, 0], [7, 0, 0, 0]] * 4)
    padding = measure_padding(data_step(8, pad=0), TensorSamples(tokens, tokens), None, 1, 1, 9)
    assert padding == Padding(2, 5 / 8, 4, 1)


@pytest.mark.parametrize(
    ("lengths", "sequences", "empty"),
    [([5], 1, 0.0), ([5, 3, 2, 4, 1], 3, 0.0), ([5, 3, 3], 3, 4 / 15), ([6, 1, 2, 3, 6], 3, 0.0)],
)
def test_packing(lengths: list[int], sequences: int, empty: float) -> None:
    count, share = packed_share(lengths)
    assert count == sequences and share == pytest.approx(empty)


def test_documents_in_sequences() -> None:
    tokens = torch.tensor([[1, 1, 9, 1], [1, 9, 1, 9]])  # 3 and 1; 2 and 2
    packing = measure_documents(data_step(2, documents=9), TensorSamples(tokens, tokens))
    assert packing is not None and (packing.sequences, packing.length, packing.documents) == (2, 4, 2)
    assert packing.cut == 1 / 4 and packing.uncounted == 3 / 8
    assert packing.masked == 1 - (9 + 1 + 4 + 4) / 32
    assert measure_documents(data_step(2), TensorSamples(tokens, tokens)) is None
