"""Memory of a layer: its saved activations, and its working memory beside them (compiler/model/replay.py)."""

from __future__ import annotations

from dslc.dsl.record import Record, positional, record


@positional
class Moment(Record):
    """A moment of a backward pass: bytes of a sample; numbers of the weight gradient that is being made, with copies,
    and of all gradients that the layer has made by then.
    """

    bytes: int
    weights: int
    copies: int
    made: int

    def exceeds(self, other: Moment) -> bool:
        return (
            self.bytes >= other.bytes
            and self.weights >= other.weights
            and self.copies >= other.copies
            and self.made >= other.made
        )


@record
class Halves(Record):
    """Working memory of a layer whose gradients of inputs and of weights are made apart.

    `gradients` stay from one half to the other: those of the results of operations with weights. A recomputed layer is
    recomputed for each of these operations, and torch keeps the results, except those that the operations themselves
    had kept, until the stage is done: `most` and `left` are the bytes in addition to the memory after the first half,
    while the second works in the layer and when it has left it; `copied` the numbers of weights that autocast copies
    for it.
    """

    gradients: int
    most: int
    left: int
    copied: int


@record
class Working(Record):
    """`forward` includes the activations saved so far; `dropping` is the same if none are saved, for recomputation.
    `copied` are numbers of weights that autocast copies in 16 bits, and keeps until the backward pass; `cast` the most
    that it copies for one operation alone, whose input needs no gradient. `halves` is None if no operation is known one
    by one.
    A layer before all parameters that train has no moment in `backward`.
    """

    forward: int
    dropping: int
    copied: int
    backward: tuple[Moment, ...]
    halves: Halves | None = None
    cast: int = 0


@record
class LayerMemory(Record):
    """Memory of a layer in one precision, in bytes of one sample.

    `saved` are the tensors that autograd keeps, each piece of memory once, at the first layer that keeps it, without
    parameters, the model's own input and memory that does not grow with the batch. `selective` is the same under
    selective recomputation: of a layer that is recomputed, its input and its results of products and attention.
    `saved_input` is the part of `saved` that is the layer's input.
    """

    saved: int
    selective: int
    saved_input: int = 0
    working: Working | None = None  # None if no operation is known one by one
