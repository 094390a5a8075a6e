"""The steps of a program (program.py) that the compiler plans with: modules, their initial values, a stream's order,
and what the ranks of an axis do inside layers.

They are a module of their own because `dslc check` needs only these, and each class takes time to make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, Literal

from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.dsl.record import Record, record

Arguments = Mapping[str, Any]  # None, bool, int, float, str, tuples of these


@record
class PythonFunction(Record):
    """`module:function` of the user's, and its keyword arguments. `folder` is put first on `sys.path`."""

    function: str
    arguments: Arguments = field(default_factory=dict)
    folder: str = ""
    line: str = ""


@record
class ModuleStep(Record):
    """Builds one module, then its children, which become its attributes.

    `kind` is a class of `torch.nn` (`Conv2d`), or one of `dslc.runtime.model.modules` (`.Attention`).
    """

    name: str  # the attribute's name in its parent; "" for the root
    kind: str
    arguments: Arguments = field(default_factory=dict)
    children: tuple[ModuleStep, ...] = ()
    line: str = ""  # "digits.plt:6:5": the place that an error names

    def walk(self) -> Iterator[ModuleStep]:
        """Yields the module and all in it, each before its children."""
        yield self
        for child in self.children:
            yield from child.walk()


PREFERENCES = ("dpo", "ipo", "orpo", "simpo")  # losses of pairs


OUTSIDE = "outside of modules"  # stands for the module of the draws of a user's own step
LOSS = "the loss"  # stands for the module of the draws of a user's own loss
SHARED = -1  # of a draw: its numbers are the same for all samples
WIDEST_RANGE = 1 << 53  # of integers that are drawn by sample


@record
class DrawDims(Record):
    """The dims along which the tensors that `module` draws in a pass, in order, go by samples; or `SHARED`. Such a dim
    has `rows` for each sample. It is `outers` x samples x the rest; of empty `outers` all are 1. Of the draws
    `by_position`, by number, the rest of a sample's numbers goes by positions; None if nothing tells.
    """

    module: str
    dims: tuple[int, ...]
    rows: tuple[int, ...] = ()
    outers: tuple[int, ...] = ()
    by_position: tuple[int, ...] | None = None


@record
class LossStep(Record):
    """The loss, as a sum over samples or tokens; the runtime divides it by the global count.

    `counts` is the unit: `samples`; `tokens`; `kept`, the tokens that are not `ignore`; `own`, what the loss counts.
    The ranks must sum `kept` before the first backward, and `own` after the last. The kind `own` is the model's own
    loss. A loss that compares samples is over `together` data ranks. The dense layer `head` runs it in `chunks`. A loss
    of pairs has two rows for each sample, the chosen answer and the rejected one, and may have a `reference`. `draws`
    are the random numbers of a user's own loss that follow from the sample; None: torch's generators draw, if any do.
    """

    kind: Literal["cross_entropy", "mse", "l1", "bce", "contrastive", "python", "own", "dpo", "ipo", "orpo", "simpo"]
    arguments: Arguments = field(default_factory=dict)
    counts: Literal["samples", "tokens", "kept", "own"] = "samples"
    ignore: int | None = None
    python: PythonFunction | None = None
    line: str = ""
    together: int = 0
    compiled: bool = False
    head: str = ""
    chunks: int = 1
    reference: ReferenceStep | None = None
    draws: DrawDims | None = None

    @property
    def rows(self) -> int:
        """The rows of a batch that one sample takes."""
        return 2 if self.kind in PREFERENCES else 1


@record
class ReferenceStep(Record):
    """The model whose log-probabilities of each row are computed before the first step: the start of the training, the
    network with its adapters off, or the weights in `files`.
    """

    kind: Literal["initial", "adapter_off", "weights"]
    files: tuple[str, ...] = ()
    path: str = ""  # as messages name them all
    line: str = ""


@record
class InitStep(Record):
    """The initial value of one parameter: `uniform` in [a, b), `normal` with mean a and deviation b, `constant` a.

    Drawn alone, in float32, from a generator seeded with (seed, name), so that it depends on nothing else.
    """

    parameter: str  # its full name in the unwrapped model
    shape: tuple[int, ...]
    kind: Literal["uniform", "normal", "constant"]
    a: float
    b: float = 0.0


@record
class StreamStep(Record):
    """A stream: `lanes` read its `shards`, and each lane shuffles its share of `window` samples
    (runtime/data/streams.py).

    `length` is the number of samples of a pass, 0 if it is not known. If the stream is the validation split, `held` has
    the number of samples of each shard.
    """

    shards: int
    lanes: int
    window: int
    length: int = 0
    held: tuple[int, ...] = ()


@record
class StepPhases(Record):
    """Seconds of the phases of a step, predicted or in the mean over some steps of a rank.

    `data`: the wait for samples. `passes`: forward and backward. `exposed`: from the last gradient of this rank until
    the ranks' gradients are there. `update`: clipping and the optimizer. `host`: all else, with `rank_wait`, the wait
    for other ranks where a loss is logged.
    """

    data: float = 0.0
    passes: float = 0.0
    exposed: float = 0.0
    update: float = 0.0
    host: float = 0.0
    rank_wait: float = 0.0

    @property
    def total(self) -> float:
        return self.data + self.passes + self.exposed + self.update + self.host


@record
class CutDraw(Record):
    """A tensor of random numbers, an equal piece on each rank of an axis: the `number`-th that `module` draws
    in a pass. `shape` belongs to one sample in one process. Its dim `dim` is `outer` x `size` x the rest, and the
    pieces are equal parts of `size`, or of each of `parts`, which lie side by side. `columns`: of attention weights,
    which on a rank end with the last column that its rows need.
    """

    module: str
    number: int
    shape: tuple[int, ...]
    dim: int
    outer: int
    size: int
    parts: tuple[int, ...] = ()
    columns: bool = False


@record
class RecomputeStep(Record):
    """Modules that run again in the backward pass. `selective` keeps the results of products and of attention."""

    kind: Literal["none", "full", "selective"] = "none"
    modules: tuple[str, ...] = ()
    budget: int = 0  # bytes of a rank, for which the modules were chosen; 0 if the job names them
    blocks: int = 0  # that the choice was made of


@record
class GenerateStep(Record):
    """Texts that the network continues every `every` steps and after the last (0: after that alone).

    `tokenizer` is the folder or file of a tokenizer; "": tokens are bytes. A `chat` renders each prompt as a message of
    the user, by `template`, or by the tokenizer's own. A forward pass has `context` positions, with `filler` behind the
    text. A text ends at `end`, or at the tokenizer's own end. `caches`: keys and values are kept, so that a
    further pass has one token of each text.
    """

    every: int
    prompts: tuple[str, ...]
    max_tokens: int
    temperature: float
    context: int
    tokenizer: str = ""
    chat: bool = False
    template: str = ""
    filler: int = 0
    end: int | None = None
    caches: bool = False
    line: str = ""


@record
class SpikeStep(Record):
    """The response to a loss that is above the mean of `window` losses by more than `deviations` of their standard
    deviations. A rewind goes back at least `steps` and skips the last `skip` batches, at most `times` times.
    """

    action: Literal["rewind", "stop", "note"]
    window: int
    deviations: float
    steps: int = 0
    skip: int = 0
    times: int = 0


@record
class AverageStep(Record):
    """An exponential moving average of the weights, by which they are evaluated; runtime/technique/ema.py takes it."""

    decay: float
    every: int = 1  # steps
    warmup: bool = False
    after: int = 0  # steps
    power: float | None = None
    inv_gamma: float = 1.0
    min_decay: float = 0.0


@record
class Float8Step(Record):
    """Dense layers that multiply in 8 bits, by torchao's recipe; None: unknown without tracing. `others` are the other
    dense layers, with the reason. `gathered` are those of `layers` whose weights `fully_shard` gathers in 8 bits.
    """

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    emulated: bool = False
    layers: tuple[str, ...] | None = ()
    others: tuple[tuple[str, str], ...] = ()
    gathered: tuple[str, ...] = ()


@record
class PrecisionStep(Record):
    """O1: autocast to `dtype` over float32 parameters. O2: the forward and backward pass in `dtype`, on a copy of
    float32 parameters, which the optimizer updates. `scaled` asks for loss scaling. `float8` has the layers that
    multiply in 8 bits.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    level: Literal["O1", "O2"] = "O1"
    scaled: bool = False
    float8: Float8Step | None = None


@record
class TensorParallelStep(Record):
    """The tensor axis: the cut of each module's parameters.

    `styles` are (module, style), in the order in which they are applied. `sequence`: some layers work on a piece of the
    sequence on each rank, which then draws noise of its own. `loss_parallel`: logits stay cut over the vocabulary.
    `parts`: the rows of each part of a column. `asynchronous`: compiled modules exchange pieces while they multiply
    others.
    """

    size: int
    sequence: bool
    styles: tuple[tuple[str, TensorStyle], ...]
    loss_parallel: bool
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    asynchronous: bool = False


@record
class ContextStep(Record):
    """The context axis of a network that a function makes: the modules whose attention meets the keys and values of all
    ranks' pieces, and whether the network is given the positions of a rank's piece.
    """

    attention: tuple[str, ...]
    positions: bool = False


@record
class ExpertParallelStep(Record):
    """The expert axis: `size` neighbours on the data axis share the experts of each layer in `layers`, by the name of
    its module and the count of its experts. Each has an equal number of them, in their order. `skew`: the rows of the
    busiest rank over the even share, as the job states it.
    """

    size: int
    layers: tuple[tuple[str, int], ...]
    skew: float | None = None
