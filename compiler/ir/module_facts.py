"""Facts of a user's own module from tracing (compiler/trace/trace_model.py), in addition to facts.py.

They are a module of their own because `dslc check` without `--trace` needs none, and each class takes time to make.
"""

from __future__ import annotations

from dslc.compiler.ir.memory import LayerMemory
from dslc.compiler.ir.network_facts import NetworkFacts
from dslc.compiler.ir.steps import CutDraw
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.compiler.ir.tensors import QuantizedWeight, TensorFact
from dslc.dsl.record import Record, record


@record
class LayerFacts(Record):
    """One layer of a traced module; its figures follow the conventions of `LayerNode`."""

    name: str  # the path for `get_submodule`; "" for all that belongs to no module below the root
    kind: str  # its class
    block: bool  # one of several alike, worth recomputing in the backward pass
    parameters: tuple[str, ...]  # full names, including those tied to another's tensor
    buffers: tuple[str, ...]
    input: TensorFact | None  # its first input tensor; None if it has none
    output: TensorFact | None
    forward_flops: int  # of one sample, like all that follows
    backward_flops: int
    float32: LayerMemory
    autocast: LayerMemory
    multiplies: bool = True  # it computes products other than convolutions
    operations: int = 0


@record
class ModuleFacts(Record):
    """One module of a traced model."""

    name: str  # the name in `named_modules`; "" for the model
    kind: str  # its class
    plain: str = ""  # Linear or Embedding, if it is one, of a derived class too, with a weight and a bias alone
    weight: tuple[int, ...] = ()  # of such a one
    parameters: bool = False  # true if it has some of its own


@record
class ExpertFacts(Record):
    """A module whose weights are stacked over its experts: `rows` of `width` go to experts for each sample."""

    module: str
    experts: int
    rows: int
    width: int


@record
class CutCall(Record):
    """A call of a module that is cut: its input and output of one sample, both as in one process."""

    module: str
    input: TensorFact
    output: TensorFact


@record
class ShareFacts(Record):
    """The model with its modules cut over a tensor axis of `ranks` ranks, by `styles`.

    `calls` are in order, and so are `summed`, the modules that sum the gradients of their parameters, once for each
    call. `head` is the cut module whose output is the model's. `work` has, by layer, a rank's forward FLOPs of one
    sample. `attended` has the numbers of keys and values that each call of attention receives there. `draws` are the
    draws that ranks share out; None if unknown. If the cut model would not compute the same,
    `fault` gives the reason, and `module` the place.
    """

    ranks: int
    styles: tuple[tuple[str, TensorStyle], ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()  # rows of each part of a column
    calls: tuple[CutCall, ...] = ()
    summed: tuple[str, ...] = ()
    head: str = ""
    work: tuple[tuple[str, int], ...] = ()
    attended: tuple[int, ...] = ()
    draws: tuple[CutDraw, ...] | None = ()
    fault: str = ""
    module: str = ""
    help: str = ""


@record
class AttentionFacts(Record):
    """A call of attention: the module that makes it, and its layer; the length of a sequence, of one sample the numbers
    of keys and values together, and whether it is causal.
    """

    module: str
    layer: str
    length: int
    numbers: int
    causal: bool


@record
class PieceFacts(Record):
    """The model on pieces of sequences, for a context axis of `ranks` ranks: its calls of attention, in order, and
    whether it takes `position_ids`. `draws` are as in `ShareFacts`. If it would not compute the same, `fault` gives the
    reason, with `code`.
    """

    ranks: int
    positions: bool = False
    attention: tuple[AttentionFacts, ...] = ()
    draws: tuple[CutDraw, ...] | None = ()
    code: str = ""
    fault: str = ""
    help: str = ""


@record
class SeamFacts(Record):
    """The place between two layers of a traced module: the tensors that a rank of a stage ending there sends, its share
    if a tensor axis cuts the module; or the reason why none can end there.
    """

    sent: tuple[TensorFact, ...] = ()
    refused: str = ""


@record
class ModelFacts(Record):
    """The facts of a user's module from tracing it on the meta device."""

    parameters: tuple[tuple[str, tuple[int, ...], bool], ...]  # name, shape, trainable; each tensor once
    buffers: tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape, dtype
    unsaved: tuple[str, ...] = ()  # buffers that are not in its state dict
    ties: tuple[tuple[str, str], ...] = ()  # (parameter, the parameter whose tensor it is)
    layers: tuple[LayerFacts, ...]  # in the order of their first call
    output: TensorFact  # of a structure, as many bytes as all its tensors
    batch_norm: bool  # true if some use batch statistics
    noise: bool  # dropout and other random operations
    changed: tuple[str, ...] = ()  # buffers that a forward pass writes, except batch statistics
    unused: tuple[str, ...]  # parameters that the output does not depend on
    dtypes: tuple[tuple[str, str], ...] = ()  # of the parameters that are not float32
    without_reset: tuple[str, ...] = ()  # modules with tensors of their own and no `reset_parameters`
    batch_norm_values: int | None = None  # the fewest numbers per channel of a batch norm, of each sample
    still: tuple[str, ...] = ()  # batch norms that the module keeps in evaluation mode
    vocab: int | None = None  # the input's numbers index tables of so many rows
    structured: bool = False  # true if the output is no tensor
    embeddings: tuple[str, ...] = ()  # first names of the weights of nn.Embedding, of derived classes too
    dense: tuple[tuple[str, tuple[int, int]], ...] = ()  # torch's own dense layers, with the shape of the weight
    head: str = ""  # the dense layer whose output is the model's, as it is
    looks: str = ""  # the operation by which its forward pass reads numbers: its figures are those of a few samples
    padding: int | None = None  # the padding token in its configuration
    mixes_documents: str = ""  # the reason why the documents of a sequence cannot be kept apart
    documents_masked: bool = False  # whether attention within documents takes a mask
    quantized: tuple[QuantizedWeight, ...] = ()  # frozen weights in 4 or 8 bits
    transposed: tuple[str, ...] = ()  # layers with an adapter whose weight has the input's dim first
    seams: tuple[SeamFacts, ...] = ()  # before each layer but the first, if the job has a pipeline
    repeated: tuple[tuple[str, ...], ...] = ()  # a parameter that is used again, the layers of both uses, and
    # a parameter that is used between; only for schedules that split the backward pass
    uncut: tuple[str, str] | None = None  # the reason why the forward pass cannot be cut at all, and the line
    modules: tuple[ModuleFacts, ...] = ()  # in the order of `named_modules`
    published: tuple[tuple[str, str], ...] = ()  # (module or parameter, style): its own plan for the tensor axis
    counts: tuple[tuple[str, int], ...] = ()  # heads and the like, by their names in a configuration
    shares: ShareFacts | None = None  # if the job has a tensor axis
    pieces: PieceFacts | None = None  # if it has a context axis
    network: NetworkFacts | None = None  # the behaviour of its forward pass
    experts: tuple[ExpertFacts, ...] = ()  # of a library's network
