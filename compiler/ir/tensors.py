"""One sample of a tensor, or of a structure of tensors: shapes and dtypes."""

from __future__ import annotations

from math import prod
from typing import Literal

from dslc.dsl.record import Record, record

DType = Literal["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]


DTYPE_BYTES: dict[str, int] = {
    "complex128": 16,
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "complex64": 8,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "complex32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
UNSAVABLE = ("complex128", "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz")  # safetensors has no name for them
# The dtypes that a backend does not send, by the device of the ranks.
UNSENDABLE = {
    "cpu": ("int16", "uint16", "uint32", "uint64", *(name for name in DTYPE_BYTES if name.startswith("float8"))),
    "cuda": ("int16", "uint16"),
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


Quantization = Literal["nf4", "int8"]
NF4_BLOCK = 64  # numbers that share a scaler
_NF4_TABLE = 16 * 4  # bytes of the values that the codes stand for, which torchao keeps with each weight
_NF4_SCALERS = 256  # scalers that share a factor, at most


@record
class QuantizedWeight(Record):
    """The frozen weight of a dense layer, quantized, in one tensor of bytes (runtime/model/quantized_linear.py).

    `name` is the parameter's, `shape` the shape in files. `transposed`: its first dimension is the layer's input.
    nf4 has a code of 4 bits for each number, a scaler of 8 bits for each block, and a factor in float32 for each block
    of scalers. The mean of the scalers and the table of values come in addition. int8 has a code of 8 bits for each
    number, and a scale in float32 for each output.
    """

    name: str
    kind: Quantization
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def rows(self) -> int:
        """The outputs of the layer."""
        return self.shape[1 if self.transposed else 0]

    @property
    def columns(self) -> int:
        """The inputs of the layer."""
        return self.shape[0 if self.transposed else 1]

    @property
    def bytes(self) -> int:
        numbers = prod(self.shape)
        if self.kind == "int8":
            return 4 * self.rows + numbers
        blocks = numbers // NF4_BLOCK
        return _NF4_TABLE + 4 + 4 * (blocks // self.scalers_by_factor) + blocks + numbers // 2

    @property
    def scalers_by_factor(self) -> int:
        """How many scalers of nf4 share a factor: torchao's 256, or the largest power of two that divides them."""
        blocks = prod(self.shape) // NF4_BLOCK
        return min(_NF4_SCALERS, blocks & -blocks)


def dequantization_bytes(kind: str, numbers: int, element: int) -> int:
    """Returns the most bytes that exist while a weight is dequantized, the result included; `element` are those of a
    number of the result. nf4 looks up pairs of values by codes in 32 bits; a result in 16 bits is rounded from float32.
    """
    rounded = 4 * numbers + (element * numbers if element < 4 else 0)
    return max(rounded, 6 * numbers + 2048) if kind == "nf4" else rounded


@record
class LeafFact(Record):
    """One tensor of a batch that is a structure, and its place in it, as in `["boxes"]`. Of n samples its shape is
    `fixed + n * grown`, dimension by dimension.
    """

    path: str
    fixed: tuple[int, ...]
    grown: tuple[int, ...]
    dtype: str

    @property
    def has_samples_first(self) -> bool:
        """True if the first dimension is the samples, and no other depends on them."""
        return self.grown[:1] == (1,) and self.fixed[:1] == (0,) and not any(self.grown[1:])

    @property
    def numbers(self) -> int:
        return prod(fixed + grown for fixed, grown in zip(self.fixed, self.grown, strict=True))


@record
class TreeFact(Record):
    """One sample of a batch that is a structure of tensors (dicts, tuples, dataclasses)."""

    leaves: tuple[LeafFact, ...]

    @property
    def numbers(self) -> int:
        return sum(leaf.numbers for leaf in self.leaves)

    @property
    def bytes(self) -> int:
        return sum(leaf.numbers * DTYPE_BYTES.get(leaf.dtype, 8) for leaf in self.leaves)

    @property
    def samples(self) -> tuple[TensorFact, ...]:
        """Returns one sample of each tensor, if all tensors have their samples first."""
        return tuple(TensorFact(shape=leaf.fixed[1:], dtype=leaf.dtype) for leaf in self.leaves)  # type: ignore[arg-type]

    @property
    def flat(self) -> TensorFact:
        return TensorFact(shape=(-(-self.bytes // 4),), dtype="float32")
