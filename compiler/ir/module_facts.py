"""What tracing tells of a user's own module (trace/model.py): facts, beside those of facts.py.

They stand by themselves because `dslc check` without `--trace` needs none, and each class takes time to make.
"""

from __future__ import annotations

from dataclasses import dataclass

from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.ir.working import Working


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

    `calls` are in order, and so are `summed`, the modules that add up the gradients of their parameters, each as often
    as it is called. `head` is the cut module whose result is the model's. `work` is, by layer, a rank's FLOPs
    forward of one sample. Where the cut model would not compute the same, `fault` says why, and `module` where.
    """

    ranks: int
    styles: tuple[tuple[str, str], ...]
    calls: tuple[CutCall, ...] = ()
    summed: tuple[str, ...] = ()
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
    batch_norm: bool  # some that takes statistics
    noise: bool  # dropout and its like
    changed: tuple[str, ...] = ()  # buffers that a forward pass writes, but for batch statistics
    unused: tuple[str, ...]  # parameters that the output does not depend on
    dtypes: tuple[tuple[str, str], ...] = ()  # of the parameters that are not float32
    without_reset: tuple[str, ...] = ()  # modules with tensors of their own and no `reset_parameters`
    batch_norm_values: int | None = None  # the fewest numbers that a batch norm has for a channel, of each sample
    still: tuple[str, ...] = ()  # batch norms that the module keeps in evaluation mode
    vocab: int | None = None  # the input's numbers are looked up in tables of so many rows
    padding: int | None = None  # the token that its configuration says sequences are filled up with
    seams: tuple[SeamFacts, ...] = ()  # before each layer but the first, where the job has a pipeline
    uncut: tuple[str, str] | None = None  # why the forward pass cannot be cut at all, and at which line
    modules: tuple[ModuleFacts, ...] = ()  # in the order of `named_modules`
    published: tuple[tuple[str, str], ...] = ()  # (module or parameter, style): a plan for the tensor axis of its own
    counts: tuple[tuple[str, int], ...] = ()  # heads and the like, by their names in a configuration
    shares: ShareFacts | None = None  # where the job has a tensor axis
