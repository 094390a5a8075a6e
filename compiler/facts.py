"""What a plan needs to know that the job does not say: the data on disk, the machine, a user's own functions.

Facts are gathered before anything is planned (`gather` in `compiler/sources.py`, `trace` for a user's functions) and
handed in, so that compiling is a pure function: same job and same facts, same plan, on any machine. What could not be
learnt is None, and what depends on it is shown as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from dslc.compiler.working import Working

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
    """What is known of a source of data. `missing` says what is not there or not right, `help` how to mend it, and
    `code` which of these it is: E0309, no data; E0803, a library that is not installed; else what is wrong with it."""

    samples: int | None = None  # all of them, before a validation split
    validation_samples: int | None = None  # of a pair (train, validation); then `samples` is the first
    input: TensorFact | None = None
    target: TensorFact | None = None
    classes: int | None = None  # targets are 0 <= t < classes
    vocab: int | None = None  # inputs are tokens 0 <= t < vocab
    stream: bool = False  # cut from one stream: the validation split is its end
    found: Mapping[str, Any] = field(default_factory=dict)  # files and layouts: what the runtime opens
    missing: str = ""
    help: str = ""
    code: str = "E0309"


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """One layer of a traced module; its figures follow the conventions of `LayerNode`."""

    name: str  # the path that `get_submodule` takes; "" for what belongs to no module below the root
    kind: str  # its class
    block: bool  # one of several alike, worth computing again in the backward pass
    parameters: tuple[str, ...]  # full names, those that are tied to another's tensor too
    buffers: tuple[str, ...]
    input: TensorFact | None  # the first tensor that it takes; None if it takes none
    output: TensorFact | None
    forward_flops: int  # of one sample, like all that follows
    backward_flops: int
    saved: int
    saved_low: int
    saved_selective: int
    saved_selective_low: int
    working: Working | None = None
    working_low: Working | None = None


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """One module of a traced model."""

    name: str  # as `named_modules` has it; "" for the model
    kind: str  # its class
    plain: str = ""  # Linear or Embedding, where its forward is torch's own
    weight: tuple[int, ...] = ()  # of a plain one
    parameters: bool = False  # some of its own


@dataclass(frozen=True, kw_only=True)
class CutCall:
    """A call of a module that is cut: what it takes and gives of one sample, both as one process has them."""

    module: str
    input: TensorFact
    output: TensorFact


@dataclass(frozen=True, kw_only=True)
class ShareFacts:
    """What became of the model with its modules cut over a tensor axis of `ranks` ranks, by `styles`.

    `calls` are in order. `head` is the cut module whose result is the model's. `work` is, by layer, a rank's FLOPs
    forward of one sample. Where the cut model would not compute the same, `fault` says why, and `module` where.
    """

    ranks: int
    styles: tuple[tuple[str, str], ...]
    calls: tuple[CutCall, ...] = ()
    head: str = ""
    work: tuple[tuple[str, int], ...] = ()
    fault: str = ""
    module: str = ""
    help: str = ""


@dataclass(frozen=True, kw_only=True)
class SeamFacts:
    """The place between two layers of a traced module: what a rank of a stage that ends there sends, its share where a
    tensor axis cuts the module; or why none can end there."""

    sent: tuple[TensorFact, ...] = ()
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What tracing a user's module on the meta device told."""

    parameters: tuple[tuple[str, tuple[int, ...], bool], ...]  # name, shape, trainable; each tensor once
    buffers: tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape, dtype
    ties: tuple[tuple[str, str], ...] = ()  # (parameter, the parameter whose tensor it is)
    layers: tuple[LayerFacts, ...]  # in the order of their first call
    output: TensorFact
    batch_norm: bool
    noise: bool  # dropout and its like
    unused: tuple[str, ...]  # parameters that the output does not depend on
    dtypes: tuple[tuple[str, str], ...] = ()  # of the parameters that are not float32
    without_reset: tuple[str, ...] = ()  # modules with tensors of their own and no `reset_parameters`
    batch_norm_values: int | None = None  # the fewest numbers that a batch norm has for a channel, of each sample
    vocab: int | None = None  # the input's numbers are looked up in tables of so many rows
    seams: tuple[SeamFacts, ...] = ()  # before each layer but the first, where the job has a pipeline
    uncut: tuple[str, str] | None = None  # why the forward pass cannot be cut at all, and at which line
    modules: tuple[ModuleFacts, ...] = ()  # in the order of `named_modules`
    published: tuple[tuple[str, str], ...] = ()  # (module or parameter, style): a plan for the tensor axis of its own
    counts: tuple[tuple[str, int], ...] = ()  # heads and the like, by their names in a configuration
    shares: ShareFacts | None = None  # where the job has a tensor axis


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
