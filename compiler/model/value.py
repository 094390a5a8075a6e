"""A value between layers: a tensor of one sample, and its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.replay import Store

Shape = tuple[int, ...]


@dataclass(slots=True, eq=False, repr=False)
class Value:
    """A tensor between layers, and its memory in either precision. `low`: 16 bits under autocast; `grad`: a parameter
    comes before it.
    """

    shape: Shape
    tokens: bool
    low: bool
    grad: bool
    sequence: bool  # (length, width) rather than (channels, length)
    float32: Store
    autocast: Store
    pooled: int = 0  # numbers before pooling, of which these are the maxima

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def fact(self) -> TensorFact:
        return TensorFact(shape=self.shape, dtype="int64" if self.tokens else "float32")

    def view(self, *shape: int, sequence: bool = False) -> Value:
        """Returns another shape of the same memory."""
        return replace(self, shape=shape, sequence=sequence)

    def new(
        self, *shape: int, low: bool | None = None, grad: bool | None = None, sequence: bool | None = None
    ) -> Value:
        """Returns a result computed from this one, with memory of its own."""
        count, is_low = prod(shape), self.low if low is None else low
        return Value(
            shape=shape,
            tokens=False,
            low=is_low,
            grad=self.grad if grad is None else grad,
            sequence=self.sequence if sequence is None else sequence,
            float32=Store(4 * count),
            autocast=Store((2 if is_low else 4) * count),
        )

    def __str__(self) -> str:
        return describe(self.shape, tokens=self.tokens, sequence=self.sequence)


def describe(shape: Shape, *, tokens: bool = False, sequence: bool = False) -> str:
    """Describes a shape in words: `an image (3, 32, 32)`."""
    text = say(shape)
    if tokens:
        return f"tokens {text}"
    if len(shape) == 0:
        return "one number"
    if len(shape) == 1:
        return f"a vector {text}"
    if len(shape) == 2:
        return f"a sequence {text}" if sequence else f"(channels, length) {text}"
    return f"an image {text}" if len(shape) == 3 else f"an array {text}"


def say(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))})"


def entry(fact: TensorFact) -> Value:
    """Returns the model's input, which the data holds already."""
    saved_store = Store(0, is_saved=True)
    tokens = not fact.dtype.startswith(("float", "bfloat"))
    low = fact.dtype in ("float16", "bfloat16")
    return Value(fact.shape, tokens, low, False, tokens, saved_store, saved_store)
