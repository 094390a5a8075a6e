"""The peak memory of one rank, by kind; and of a layer, its saved activations and its working memory beside them
(compiler/model/replay.py).
"""

from __future__ import annotations

from typing import Literal

from dslc.dsl.record import Record, positional, record

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "communication", "framework")


Phase = Literal["pass", "point", "rest"]  # a pass over layers, a point of the step, or between two steps
_PREPOSITIONS: dict[Phase, str] = {"pass": "in the ", "point": "at the ", "rest": ""}


@record
class LayerShare(Record):
    """A layer's part of the activations at the peak."""

    name: str
    bytes: int


@record
class MemoryNode(Record):
    """Bytes of one rank by kind, at the peak; `when` is its moment, of this `phase`, and `layers` hold most then.

    `rest` is the memory between two steps; `rank` the data rank that holds most, the first of several; `workspace` the
    part of `framework` that torch's allocator has given to cuBLAS.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    communication: int
    framework: int = 0
    when: str = ""
    phase: Phase = "rest"
    layers: tuple[LayerShare, ...] = ()
    rest: int = 0
    rank: int = 0
    workspace: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        return {kind: getattr(self, kind) for kind in KINDS}

    @property
    def moment(self) -> str:
        """The moment of the peak as a sentence has it: `in the forward pass of head`."""
        return _PREPOSITIONS[self.phase] + self.when

    @property
    def peak(self) -> int:
        return sum(self.kinds.values())

    @property
    def tensors(self) -> int:
        """The part of the peak that `torch.cuda.max_memory_allocated` sees."""
        return self.peak - self.framework + self.workspace


@positional
class WorkingSet(Record):
    """A moment of a backward pass: bytes of a sample; numbers of the weight gradient that is being made, with copies,
    and of all gradients that the layer has made by then; bytes of frozen weights that are dequantized.
    """

    bytes: int
    weights: int
    copies: int
    made: int
    dequantized: int = 0

    def exceeds(self, other: WorkingSet) -> bool:
        return (
            self.bytes >= other.bytes
            and self.weights >= other.weights
            and self.copies >= other.copies
            and self.made >= other.made
            and self.dequantized >= other.dequantized
        )


@record
class Halves(Record):
    """Working memory of a layer that makes the gradients of its inputs and of its weights in separate passes.

    `gradients` of the results of operations with weights stay from one half to the other. `passed` is the part of them
    that is the gradient of the layer's output. `first` is the most that the first half takes beside the saved
    activations. It frees none of these. The second half goes through the operations with weights in forward order:
    `moments` has the bytes that are freed before each, `freed` the bytes that are freed after the last. `tail` is what
    the operations after the last with weights keep: the first half frees it, if no later layer of the stage has
    weights.

    A recomputed layer is recomputed for each of these operations. Torch keeps the results until the stage is done,
    except results that the operations themselves had kept. `most` and `left` are bytes in addition to the memory after
    the first half: while the second half works in the layer, and when it has left it; `copied` the numbers of weights
    that autocast copies for it.
    """

    gradients: int
    most: int
    left: int
    copied: int
    first: int
    passed: int
    tail: int
    freed: int
    moments: tuple[WorkingSet, ...]


def repeated_bytes(saved: int, operations: int, gradients: int) -> tuple[int, int]:
    """Estimates `most` and `left` of a recomputed layer, by the figures of a transformer block."""
    most = int((0.75 * (operations - 1) + 0.3) * saved) if operations else 0
    return most, int(0.5 * operations * saved) - gradients


@record
class Working(Record):
    """`forward` includes the activations saved so far; `dropping` is the same if none are saved, for recomputation.
    `copied` are numbers of weights that autocast copies in 16 bits, and keeps until the backward pass; `cast` the most
    that it copies for one operation alone, whose input needs no gradient. `halves` is None if no operation is known one
    by one, and for a traced layer where no schedule splits the backward pass. `rearranged` are numbers of weights that
    are copied in another order where autocast makes no copy, and kept. A layer before all parameters that train has no
    moment in `backward`. `on_cpu` are moments of a backward pass that CPUs have besides: oneDNN copies what a
    convolution takes and makes to its own memory order. Where images have their channels last it has `channels_last`
    instead. `dequantizing` are the moments of the forward pass in which a frozen weight is dequantized.
    """

    forward: int
    dropping: int
    copied: int
    backward: tuple[WorkingSet, ...]
    halves: Halves | None = None
    cast: int = 0
    rearranged: int = 0
    on_cpu: tuple[WorkingSet, ...] = ()
    channels_last: tuple[WorkingSet, ...] = ()
    dequantizing: tuple[WorkingSet, ...] = ()


@record
class LayerMemory(Record):
    """Memory of a layer in one precision, in bytes of one sample.

    `saved` are the tensors that autograd keeps, each piece of memory once, at the first layer that keeps it.
    Parameters, the model's own input, and memory that does not grow with the batch are left out. `selective` is the
    same under selective recomputation: of a layer that is recomputed, its input and its results of products and
    attention. `saved_input` is the part of `saved` that is the layer's input.

    `full` is the same under full recomputation: the input. The three leave out an input that an earlier layer keeps.
    `shared` is such an input that the block before keeps, unless that is recomputed. `input` and `output` are the
    tensors themselves, in the dtypes that they have in this precision.
    """

    saved: int
    selective: int
    saved_input: int = 0
    full: int | None = None  # None: unknown, as are the next
    shared: int = 0
    input: int | None = None
    output: int | None = None
    working: Working | None = None  # None if no operation is known one by one
