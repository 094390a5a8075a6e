"""The peak memory of one rank, by kind."""

from __future__ import annotations

from typing import Literal

from dslc.dsl.record import Record, record

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
