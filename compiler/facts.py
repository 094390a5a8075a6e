"""What a plan needs to know that the job does not say: the data on disk, the machine, a user's own functions.

Facts are gathered before anything is planned (`gather` in `compiler/sources.py`, `trace` for a user's functions) and
handed in, so that compiling is a pure function: same job and same facts, same plan, on any machine. What could not be
learnt is None, and what depends on it is shown as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

DType = Literal["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]
DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, kw_only=True)
class TensorFact:
    """One sample of a tensor: its shape without the batch, and its dtype as the model sees it."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def numbers(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numbers * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """What is known of a source of data. `missing` says what is not there and how to come by it."""

    samples: int | None = None  # all of them, before a validation split
    validation_samples: int | None = None  # of a pair (train, validation); then `samples` is the first
    input: TensorFact | None = None
    target: TensorFact | None = None
    classes: int | None = None  # targets are 0 <= t < classes
    vocab: int | None = None  # inputs are tokens 0 <= t < vocab
    stream: bool = False  # cut from one stream: the validation split is its end
    missing: str = ""
    help: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What tracing a user's module on the meta device told."""

    parameters: tuple[tuple[str, tuple[int, ...], bool], ...]  # name, shape, trainable
    buffers: tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape, dtype
    output: TensorFact
    batch_norm: bool
    noise: bool  # dropout and its like
    unused: tuple[str, ...]  # parameters that the output does not depend on
    forward_flops: int  # of one sample
    backward_flops: int
    saved_bytes: int  # activations kept for the backward pass, of one sample


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The machine the job runs on; for `run` alone."""

    cores: int
    memory: int  # bytes
    gpus: tuple[tuple[str, int], ...] = ()  # name and bytes of each


@dataclass(frozen=True, kw_only=True)
class Facts:
    source: SourceFacts | None = None
    model: ModelFacts | None = None
    machine: MachineFacts | None = None
