"""The blocks of a job and their fields, and the orders of the samples."""

from __future__ import annotations

from typing import ClassVar

from dslc.dsl.bounds import PATTERNS
from dslc.dsl.language import calls as c
from dslc.dsl.language.exchanges import Allreduce, Exchange
from dslc.dsl.language.goals import EarlyStopping, Goal, SpikeResponse
from dslc.dsl.language.layers import Layers, PythonNetwork, TransformersNetwork
from dslc.dsl.language.loggers import LibraryLogger, PythonLogger
from dslc.dsl.language.lr_schedules import Constant
from dslc.dsl.language.metrics import LossMetric
from dslc.dsl.language.optimizers import Group, Optimizer
from dslc.dsl.language.preferences import Preferences
from dslc.dsl.language.registry import (
    Block,
    Bool,
    Call,
    Float,
    Int,
    IntRange,
    ListOf,
    Name,
    Path,
    Quantity,
    Range,
    Str,
    arg,
    auto_or,
    block,
    call,
    calls,
    either,
    measure,
    word,
)
from dslc.dsl.source import Span

_COUNT = Int(min=1)
PROMPTS = 256  # the most of a job
_PATTERNS = c.PATTERN_LIST
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev")

_SAMPLES = "how many an epoch has"
_SHOWN = "as many as the data has"


@call("numbers", "python", open=True)
class PythonNumbers(c.PythonCall):
    """`f()` of yours, which gives one number for each sample; for `by_length` `f(sample)`, which gives its length."""


@call("sampler")
class Weighted(Call):
    """Samples are drawn by weights, as torch's `WeightedRandomSampler` draws them. Of a data set that brings no
    validation set of its own there is a weight for each sample, held out or not.
    """

    weights: str | PythonNumbers = arg(
        either(Path("read"), calls("numbers")),
        'a weight for each sample: a `.npy` file, or `python("module:function")`; they need not sum to 1',
    )
    samples: int | None = arg(_COUNT, _SAMPLES, default=None, shown=_SHOWN)
    replacement: bool = arg(Bool(), "a sample may be drawn again in the same epoch", default=True)


@call("sampler")
class Balanced(Call):
    """Each class is drawn as often, by weights that are one over the number of its samples, with replacement. It reads
    each target once, before the first step.
    """

    samples: int | None = arg(_COUNT, _SAMPLES, default=None, shown=_SHOWN)


@call("sampler")
class ByLength(Call):
    """Samples of like length share a batch, so that less of it is padding: each is seen once an epoch, and what
    `window` batches hold is sorted by length.
    """

    length: str | PythonNumbers | None = arg(
        either(Path("read"), calls("numbers")),
        'the length of a sample: `python("module:function")` of one sample, or a `.npy` file of all lengths',
        default=None,
        shown="the first dim of its first tensor",
    )
    window: int = arg(_COUNT, "how many batches are sorted together: more of them are more alike", default=50)


@block
class ModelSpec(Block):
    """The network, and the loss that measures its output."""

    network: Layers | Call = arg(
        either(ListOf(calls("layer"), min_length=1), calls("network")),
        'a list of layers, a library network, or `python("module:function")`',
    )
    loss: Call = arg(calls("loss"), "what training minimises")
    weights: str | Call | None = arg(
        either(Path("read"), calls("weights")),
        "the file or folder of weights to start from; `pretrained(…)` takes a part of them, or renames them",
        default=None,
        shown="none",
    )
    freeze: tuple[str, ...] = arg(_PATTERNS, "patterns of parameters that do not train", default=(), shown="none")

    adapter: c.Lora | None = arg(
        calls("adapter"), "small matrices that train in place of the weights: `lora(…)`", default=None, shown="none"
    )

    @property
    def has_user_network(self) -> bool:
        """True if a function or `transformers` makes the network, so that only tracing knows its layers."""
        return isinstance(self.network, PythonNetwork | TransformersNetwork)

    @property
    def network_span(self) -> Span | None:
        """The place of the call that makes the network, or of the list of layers."""
        return self.network.span if isinstance(self.network, Call) else self.value_span("network")

    @property
    def loss_span(self) -> Span | None:
        """The place of the call of the loss."""
        return self.loss.span or self.value_span("loss")

    @property
    def start(self) -> c.Pretrained | None:
        """`weights` in its long form."""
        if isinstance(self.weights, str):
            return c.Pretrained(path=self.weights, span=self.value_span("weights"))
        assert self.weights is None or isinstance(self.weights, c.Pretrained)
        return self.weights


@block
class DataSpec(Block):
    """The data that the network is trained on."""

    source: Call = arg(calls("source"), "where samples come from")
    batch: int = arg(
        _COUNT, "the global batch: the samples (sequences, for text) that one optimizer step sees, whatever the split"
    )
    validation: float = arg(
        measure("ratio", min=0, below=1),
        "the share held out, by the seed alone; for text, the end of the stream",
        default=0.0,
    )
    test: float = arg(
        measure("ratio", min=0, below=1),
        "the share that is kept for one evaluation after the training; for text, behind that of `validation`",
        default=0.0,
    )
    pad: int | None = arg(
        Int(min=0),
        "the token that fills up sequences: `transformers(…)` is given a mask without it, the loss leaves it out",
        default=None,
        shown="none",
    )
    documents: int | None = arg(
        Int(min=0),
        "the token that ends a document, where sequences hold several: attention, positions and targets stay within",
        default=None,
        shown="none",
    )
    collate: Call | None = arg(
        calls("collate"),
        'makes samples a batch, where they do not stack: `python("module:function")`',
        default=None,
        shown="stacked",
    )
    sampler: Weighted | Balanced | ByLength | None = arg(
        calls("sampler"),
        "the order of the samples, or how often each is drawn: `weighted(…)`, `balanced()`, `by_length(…)`",
        default=None,
        shown="each once an epoch",
    )
    shuffle: bool = arg(Bool(), "a new order for each epoch", default=True)
    workers: int = arg(Int(min=0), "loader processes of each rank", default=0)
    samples: int | None = arg(
        _COUNT, "of a stream: the samples of a pass, which make an epoch", default=None, shown="not known"
    )
    shuffle_buffer: int = arg(
        _COUNT, "of a stream: so many samples are shuffled at a time; a process holds up to twice as many", default=1000
    )
    interleave: int | None = arg(
        _COUNT,
        "of a stream: the shards that are read at the same time; a batch has equally many samples of each",
        default=None,
        shown="the most that divides the batch, up to 16",
    )
    last_batch: str = arg(word("drop", "keep"), "for the samples of an epoch that fill no batch", default="drop")

    @property
    def has_documents(self) -> bool:
        """True if a sequence holds several documents, which are kept apart."""
        packs = isinstance(self.source, c.Chat) and self.source.pack is not None
        return packs or self.documents is not None

    @property
    def rows(self) -> int:
        """The rows of a batch that one sample takes: a pair has two."""
        return 2 if isinstance(self.source, Preferences) else 1


@block
class DevicesSpec(Block):
    """The devices to train on: nodes, and the processes of each."""

    exclusive: ClassVar = (("gpus", "cpus"),)
    nodes: int | Range = arg(either(IntRange(), _COUNT), "a count, or a range `1..4`: elastic", default=1)
    gpus: int | tuple[int, ...] | str | Call | None = arg(
        either(
            calls("gpus"),
            word("all"),
            ListOf(Int(min=0), min_length=1),
            Str(r"\s*-?\d+\s*(,\s*\d+\s*)*", 'numbers of GPUs, as in "0, 2"', max_length=2000),
            Int(min=-1),
            words='a count, numbers of GPUs such as `[0, 2]` or `"0, 2"`, `all`, or `free(4)`',
        ),
        'processes for each node, one a GPU: a count, `[0, 2]`, `"0, 2"`, `all` (or `-1`), `free(4)`',
        default=None,
    )
    cpus: int | None = arg(_COUNT, "processes for each node on the CPU", default=None, shown="1")
    threads: int | None = arg(
        _COUNT,
        "threads that each process computes with on the CPU; `OMP_NUM_THREADS` where it is not said",
        default=None,
        shown="a share of the cores",
    )
    kind: str | None = arg(Name(), "from the hardware catalogue", default=None, shown="found")
    catalogue: str | None = arg(
        Path("read"), "a TOML file of further kinds, or of `cpu`: memory, speeds and links", default=None, shown="none"
    )
    backend: str | None = arg(
        word("nccl", "gloo", "shared_memory", "mpi"), "what carries the collectives", default=None, shown="by device"
    )


@block
class ParallelismSpec(Block):
    """The split of the work over the devices."""

    whole: ClassVar = "auto"
    searched: ClassVar = (
        "data", "pipeline", "tensor", "context", "zero", "replicas", "expert", "microbatches", "schedule",
        "virtual_stages", "sequence",
    )  # fmt: skip
    auto: bool = arg(Bool(), "the compiler chooses the whole block; written `parallelism = auto`", default=False)
    data: int | None = arg(auto_or(_COUNT), "ranks that share a global batch", default=None, shown="what remains")
    data_shares: str | tuple[int, ...] | None = arg(
        either(word("measured"), ListOf(_COUNT, min_length=1)),
        "the samples of a batch that each data rank takes, in proportion: `[2, 1]` for one device of twice the speed; "
        "or `measured` when the run begins",
        default=None,
        shown="equal",
    )
    pipeline: int = arg(auto_or(_COUNT), "stages in sequence, each on ranks of its own", default=1)
    tensor: int = arg(auto_or(_COUNT), "ranks that share each layer", default=1)
    context: int = arg(auto_or(_COUNT), "ranks that share each sequence", default=1)
    expert: int = arg(
        auto_or(_COUNT), "ranks inside the data axis that share the experts of each `moe` layer", default=1
    )
    expert_skew: float | None = arg(
        Float(min=1),
        "the rows of tokens that the busiest of these ranks gets, at most, over its even share: memory, traffic and "
        "time are then for this routing",
        default=None,
        shown="none, an even routing",
    )
    zero: int = arg(
        auto_or(Int(min=0, max=3)),
        "over `data`: 1, optimizer state sharded; 2, and gradients; 3, and parameters",
        default=0,
    )
    replicas: int = arg(auto_or(_COUNT), "full copies kept inside the data axis", default=1)
    microbatches: int | None = arg(
        auto_or(_COUNT),
        "pieces in which a data rank works through its share of a global batch",
        default=None,
        shown="1, or by the schedule",
    )
    schedule: str = arg(auto_or(word(*SCHEDULES)), "the order of micro-batches in a pipeline", default="1f1b")
    virtual_stages: int | None = arg(auto_or(_COUNT), "stages for each rank", default=None, shown="by the schedule")
    stages: str | tuple[int, ...] = arg(
        either(word("balanced"), ListOf(_COUNT, min_length=1)),
        "where the model is cut, or layer counts",
        default="balanced",
    )
    sequence: bool | None = arg(
        auto_or(Bool()),
        "sequence parallelism with `tensor`: norms, dropout and what the layers keep are of a piece of the sequence",
        default=None,
        shown="`true` on GPUs, `false` on CPUs",
    )
    async_tensor: bool = arg(
        Bool(),
        "asynchronous tensor parallelism, with `train.compile` on GPUs: pieces of the sequence are exchanged while "
        "others are multiplied",
        default=False,
    )
    tensor_plan: tuple[str, ...] | None = arg(
        _PATTERNS,
        'the styles of modules, by pattern, in a `python(…)` or `transformers(…)` network: `"blocks.*.up: column"`; '
        "`column`, `row`, `gathered`, `row_of_whole`, `vocabulary`, `summed`, `column in 3 parts`, "
        "`column in parts [4, 1, 1]`",
        default=None,
        shown="known",
    )
    gradients: Exchange = arg(
        calls("gradients"),
        "how the ranks of the data axis agree: exactly, or with less to send",
        default=Allreduce(),
        shown="allreduce()",
    )


@call("recompute", "budget")
class RecomputeBudget(Call):
    """The blocks whose recomputation keeps the peak of each rank within a budget, with the least arithmetic."""

    peak: int = arg(measure("bytes", above=0), "the most that a rank may hold at its peak")
    blocks: tuple[str, ...] | None = None  # what the compiler chose; before that None, which stands for all blocks
    exact: bool = True  # whether all choices were compared


@block
class MemorySpec(Block):
    """Memory: what is kept, recomputed, or moved to the host."""

    whole: ClassVar = "auto"
    searched: ClassVar = ("recompute", "offload")
    auto: bool = arg(Bool(), "the compiler chooses the whole block; written `memory = auto`", default=False)
    recompute: str | Call = arg(
        auto_or(either(word("none", "full", "selective"), calls("recompute"))),
        "activations computed again",
        default="none",
    )
    offload: tuple[str, ...] = arg(
        auto_or(ListOf(word("optimizer", "parameters", "activations"), single=True)),
        "what is kept in the host's memory",
        default=(),
        shown="[]",
    )
    limit: int | None = arg(
        measure("bytes", above=0), "the most one device may use", default=None, shown="the device's"
    )


@block
class TrainSpec(Block):
    """The length of the training, and its optimizer."""

    exclusive: ClassVar = (("steps", "epochs"),)
    one_of: ClassVar = (("steps", "epochs"),)
    steps: int | None = arg(measure("steps", min=1), "optimizer steps", default=None)
    epochs: int | None = arg(measure("epochs", min=1), "passes through the data", default=None)
    max_time: float | None = arg(
        measure("time", above=0),
        "ends the training early, evaluated and saved as at its end, after the step that begins once this has passed "
        "since its first step, over all resumes",
        default=None,
        shown="none",
    )
    optimizer: Optimizer = arg(calls("optimizer"), "the rule of an update")
    step: Call | None = arg(
        calls("step"),
        'does a step, where that is more than one loss and one update: `python("module:function")`',
        default=None,
        shown="forward, loss, backward, update",
    )
    groups: tuple[Group, ...] = arg(
        ListOf(calls("group"), max_length=PATTERNS.most),
        "parameters with a learning rate or a weight decay of their own, each in the first that matches: "
        '`[group("head.*", lr = 1e-2)]`',
        default=(),
        shown="none",
    )
    lr_schedule: Call = arg(calls("lr_schedule"), "the learning rate over time", default=Constant(), shown="constant")
    scale_lr: Call | None = arg(calls("lr_scale"), "the learning rate follows the batch", default=None, shown="none")
    no_decay: tuple[str, ...] = arg(_PATTERNS, "patterns of parameters without weight decay", default=(), shown="none")
    clip: float | c.ClipNorm | c.ClipValue | None = arg(
        either(Float(above=0), calls("clip")),
        "the largest global norm of the gradients, `1.0` or `norm(1.0)`; or of each of their numbers, `value(0.5)`",
        default=None,
        shown="none",
    )
    precision: Call = arg(calls("precision"), "of the arithmetic", default=c.Fp32(), shown="fp32")
    ema: float | c.EMA | None = arg(
        either(Float(above=0, below=1), calls("ema")),
        "an exponential moving average of the weights, which is evaluated and exported in their place: its decay, "
        "`0.999`, or `ema(…)`",
        default=None,
        shown="none",
    )
    early_stopping: EarlyStopping | None = arg(
        calls("early_stopping"), "ends the training once the evaluations get no better", default=None, shown="none"
    )
    hooks: tuple[c.PythonHook, ...] = arg(
        ListOf(calls("hook"), single=True), "objects of yours that are called as it goes on", default=(), shown="none"
    )
    on_nonfinite: str = arg(
        word("stop", "skip", "continue"),
        "what happens if the loss of a step is not finite: training ends, the update is skipped, or nothing",
        default="stop",
    )
    on_spike: SpikeResponse | None = arg(
        calls("on_spike"),
        "what happens if the loss of a step is far above the losses before it: the training goes back and skips "
        "batches, ends, or notes it; the loss is then read in each step",
        default=None,
        shown="none",
    )
    check_replicas: Quantity | None = arg(
        measure("steps", "epochs", above=0),
        "how often ranks compare their copies of the parameters bit by bit; a rank that differs is named, and with "
        "`launch.restarts` the run goes back to the last checkpoint",
        default=None,
        shown="none",
    )
    seed: int = arg(Int(min=0, max=2**63 - 1), "determines everything random", default=0)
    dropout_generator: str = arg(
        word("counter", "torch"),
        "what draws in forward passes: a counter-based generator, by seed, step, sample and layer, so that no plan "
        "changes what is drawn; or torch's generators, each rank's own",
        default="counter",
    )
    compile: bool | str = arg(
        either(Bool(), word("blocks")),
        "`torch.compile`; with `blocks`, each block by itself on every plan, so that equal blocks are compiled once",
        default=False,
    )
    deterministic: bool = arg(Bool(), "the same plan gives the same bits", default=False)

    @property
    def clip_norm(self) -> float | None:
        """The largest global norm of the gradients, if it is limited."""
        if isinstance(self.clip, c.ClipValue):
            return None
        return self.clip.limit if isinstance(self.clip, c.ClipNorm) else self.clip

    @property
    def average(self) -> c.EMA | None:
        """The average of the weights that is asked for."""
        return c.EMA(decay=self.ema) if isinstance(self.ema, float) else self.ema

    @property
    def clip_value(self) -> float | None:
        """The largest absolute value in a gradient, if it is limited."""
        return self.clip.limit if isinstance(self.clip, c.ClipValue) else None


@block
class EvaluateSpec(Block):
    """Exact figures over the whole validation split."""

    every: Quantity | None = arg(measure("steps", "epochs", above=0), "how often", default=None, shown="the end")
    metrics: tuple[Call, ...] = arg(
        ListOf(calls("metric"), min_length=1), "what is measured", default=(LossMetric(),), shown="[loss]"
    )
    start: bool = arg(Bool(), "also before the first step, as step 0, which no goal counts", default=False)
    training: bool = arg(
        Bool(), "also the whole training split, each sample once and not augmented, as `training`", default=False
    )


@block
class GenerateSpec(Block):
    """Texts that the network writes during the training: it continues prompts, on any plan."""

    every: Quantity | None = arg(measure("steps", "epochs", above=0), "how often", default=None, shown="the end")
    prompts: str | tuple[str, ...] | None = arg(
        either(Path("read"), ListOf(Str(max_length=10_000), min_length=1, max_length=PROMPTS)),
        'texts to continue, `["def "]`, or a file of them: one on each line, or JSON with a `prompt` on each line of a '
        "`.jsonl` file; with `chat(…)` each is a message of the user",
        default=None,
        shown="none",
    )
    max_tokens: int = arg(_COUNT, "the most tokens that follow a prompt", default=64)
    temperature: float = arg(
        Float(min=0),
        "0 takes the likeliest token; above, tokens are drawn from the softmax of the logits divided by it",
        default=0.0,
    )
    tokenizer: str | None = arg(
        Path("read"),
        "the tokenizer of a source of tokens: the folder of one, or a `tokenizer.json`",
        default=None,
        shown="the source's",
    )


@block
class CheckpointSpec(Block):
    """The checkpoints from which a training can be resumed."""

    every: Quantity | None = arg(measure("steps", "epochs", "time", above=0), "how often", default=None, shown="none")
    best: Goal | None = arg(
        calls("goal"),
        "also after each evaluation that is the best so far, and kept beside the newest, under the name `best`",
        default=None,
        shown="none",
    )
    keep: int = arg(_COUNT, "the number of the newest checkpoints kept", default=2)
    asynchronous: bool = arg(Bool(), "training continues while it is written", default=True)
    dir: str | None = arg(Path("write"), "where", default=None, shown="<run>/checkpoints")
    resume: str | None = arg(
        either(word("auto"), Path("read")),
        "from the newest, or from a checkpoint, a folder of them or a run directory",
        default=None,
        shown="none",
    )

    @property
    def is_enabled(self) -> bool:
        """True if the training writes checkpoints."""
        return self.every is not None or self.best is not None


@block
class LaunchSpec(Block):
    """The launcher of the processes, and the response to a failure."""

    with_: Call = arg(calls("launch"), "who starts the processes", default=c.Local(), shown="local()")
    restarts: int = arg(Int(min=0), "restarts of a failed group from its last checkpoint", default=0)
    timeout: float = arg(
        measure("time", above=0, max=10**9), "the longest wait of a collective", default=600.0, shown="10 min"
    )


@block
class LogSpec(Block):
    """The records that are written during the training."""

    every: Quantity = arg(
        measure("steps", "epochs", above=0), "how often", default=Quantity(10, "steps"), shown="10 steps"
    )
    tensorboard: bool = arg(Bool(), "write TensorBoard files into the run directory", default=True)
    loggers: tuple[PythonLogger | LibraryLogger, ...] = arg(
        ListOf(calls("logger"), single=True),
        'who else gets each record: loggers of libraries, such as `wandb(project = "digits")`, or objects of yours',
        default=(),
        shown="none",
    )
