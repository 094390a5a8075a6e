"""One sample of a tensor: its shape and dtype."""

from __future__ import annotations

from math import prod
from typing import Literal

from dslc.dsl.record import Record, record

DType = Literal["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]


DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "complex64": 8,
}


@record
class TensorFact(Record):
    """One sample of a tensor: its shape without the batch, and its dtype as the model sees it."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def numbers(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numbers * DTYPE_BYTES[self.dtype]
