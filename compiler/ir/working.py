"""What a layer takes while it works, beside what it keeps: in bytes of one sample (replay.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a backward pass: bytes of a sample; numbers of the gradient of a weight that is being made, with
    copies, and of all gradients that the layer has made by then."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """What a layer takes whose gradients of inputs and of weights are made apart.

    `gradients` stay from one half to the other: those of the results of operations with weights. A layer that is
    computed again is so for each of these operations, and torch keeps what that makes, but for what they themselves had
    kept, until the stage is done: `most` and `left` are the bytes beside what was there after the first half, while the
    second works in the layer and when it has left it; `copied` the numbers of weights that autocast copies for it.
    """

    gradients: int
    most: int
    left: int
    copied: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """`forward` counts what is kept so far; `dropping` is the same where nothing is kept, to be computed again.
    `copied` are numbers of weights that autocast copies in 16 bits, and keeps until the backward pass. `halves` is None
    where no operation is known one by one."""

    forward: int
    dropping: int
    copied: int
    backward: tuple[Moment, ...]
    halves: Halves | None = None
