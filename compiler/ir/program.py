"""The rank program: the only thing the runtime receives. Everything in it is decided.

A program is plain data: frozen dataclasses of numbers, text, tuples and mappings, the same on every machine, written as
JSON and read back by codec.py. The runtime imports these two modules and nothing else of the compiler. This module
takes some records from steps.py and data_steps.py.

All programs of a job share everything but `place`: a `RankProgram` is the job's `JobProgram` and this rank's place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, TypeAlias

from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.data_steps import AugmentStep, DataStep, PictureStep, SamplerStep
from dslc.compiler.ir.memory import MemoryNode
from dslc.compiler.ir.steps import (
    Arguments,
    AverageStep,
    ContextStep,
    CutDraw,
    DrawDims,
    ExpertParallelStep,
    GenerateStep,
    InitStep,
    LossStep,
    ModuleStep,
    PrecisionStep,
    PythonFunction,
    RecomputeStep,
    ReferenceStep,
    SpikeStep,
    StepPhases,
    StreamStep,
    TensorParallelStep,
)
from dslc.compiler.ir.tensors import QuantizedWeight
from dslc.dsl.record import Record, record

__all__ = [  # names defined elsewhere
    "AugmentStep",
    "AverageStep",
    "ContextStep",
    "CutDraw",
    "DataStep",
    "DrawDims",
    "ExpertParallelStep",
    "GenerateStep",
    "InitStep",
    "LossStep",
    "ModuleStep",
    "PictureStep",
    "PrecisionStep",
    "PythonFunction",
    "RecomputeStep",
    "ReferenceStep",
    "SamplerStep",
    "SpikeStep",
    "StepPhases",
    "StreamStep",
    "TensorParallelStep",
]

TransformersKind = Literal[
    "",  # a structured one's is not known
    "causal_lm",
    "masked_lm",
    "seq2seq_lm",
    "sequence_classification",
    "token_classification",
    "question_answering",
    "image_classification",
]


@record
class TransformersStep(Record):
    """A network of the `transformers` library: from a folder or a config, whose `arguments` override its own.

    `kind` is the head; a classifier has `labels` classes unless the config or an argument says otherwise. A model for
    `structured` batches is given their parts by name, and returns all that the library's does.
    """

    name: str  # a folder with a config.json, such a file, or one of the library's types
    kind: TransformersKind = "causal_lm"
    labels: int = 0  # 0: as many as in the config
    pad: int | None = None  # the token that the attention mask excludes
    structured: bool = False
    arguments: Arguments = field(default_factory=dict)
    folder: str = ""  # base of a relative path
    line: str = ""


@record
class WeightsStep(Record):
    """Files of safetensors, or else of `torch.save`, and which tensor goes where (compiler/facts/weights_match.py)."""

    files: tuple[str, ...]
    path: str = ""  # as messages name them all
    only: tuple[str, ...] = ()
    rename: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()
    allow_unused: tuple[str, ...] = ()
    line: str = ""


@record
class AdapterStep(Record):
    """Adapters of `peft` beside dense layers. Modules are named as compiler/ir/parameter_names.py says."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0
    save: tuple[str, ...] = ()  # modules that train whole
    rslora: bool = False
    line: str = ""


@record
class ModelStep(Record):
    """The model: `root` with `inits` and `ties`, or `python`, or `transformers`; with an `adapter`, if there is one.

    `frozen` are patterns (`fnmatch`, over full names) of parameters that do not train. `reset` asks for a user's own
    model to be built on the meta device, because it is too large to be made whole. `reset_parameters` then gives it its
    numbers, module by module.
    """

    root: ModuleStep | None = None
    inits: tuple[InitStep, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()  # (parameter, the parameter whose tensor it is)
    python: PythonFunction | None = None
    transformers: TransformersStep | None = None
    seed: int = 0
    channels_last: bool = False
    weights: WeightsStep | None = None
    frozen: tuple[str, ...] = ()
    reset: bool = False
    documents: int | None = None  # the token that ends a document, within which attention and positions stay
    documents_masked: bool = False  # whether attention masks other documents, rather than run for each
    adapter: AdapterStep | None = None
    quantized: tuple[QuantizedWeight, ...] = ()  # frozen weights that are kept in 4 or 8 bits


@record
class GroupStep(Record):
    """Parameters (patterns, over full names) whose learning rate or weight decay is their own; `lr` is scaled."""

    parameters: tuple[str, ...]
    lr: float | None = None
    weight_decay: float | None = None


@record
class OptimizerStep(Record):
    """A class of `torch.optim` or runtime/optimizer, or `python`, a user's function; `lr` is already scaled.

    `no_decay` are patterns (`fnmatch`, over full names) of parameters without decay. `state` names what is kept for
    each, `counts` the entries that are one number. `fused` are the devices with torch's fused kernel. Updates change
    `group_state`. `closure`: `step` evaluates the loss. `codes`: moments in 8 bits. `split`: AdamW has some parameters.
    """

    kind: str
    lr: float
    state: tuple[str, ...]
    counts: tuple[str, ...]
    fused: tuple[str, ...]
    no_decay: tuple[str, ...] = ()
    groups: tuple[GroupStep, ...] = ()  # a parameter belongs to the first that matches
    arguments: Arguments = field(default_factory=dict)
    python: PythonFunction | None = None
    group_state: tuple[str, ...] = ()
    closure: bool = False
    codes: bool = False
    split: bool = False
    adamw: tuple[tuple[str, str], ...] | None = ()  # matrices among these, and why; None: unknown without tracing
    base_lr: float | None = None  # before it was scaled to the batch; None: it was not
    line: str = ""


@record
class PlateauStep(Record):
    """A rate that falls where a metric of the evaluations gets no better; runtime/loop/best_metric.py computes it.
    Torch's ReduceLROnPlateau has the same arguments.
    """

    metric: str  # its key in metrics.jsonl
    better: Literal["lowest", "highest"]
    patience: int
    threshold: float
    threshold_mode: Literal["rel", "abs"]
    cooldown: int
    line: str = ""


@record
class LearningRateStep(Record):
    """The factor on `lr` for each step of `steps`; runtime/loop/learning_rate.py has the formulas. Times are in steps.

    `python` is a user's function of (step, steps), which takes the place of all others. `plateau` multiplies the rate
    by `factor` now and then, down to `floor`. `begin` is the factor of a warm-up's first step; None: `1 / warmup`.
    """

    kind: Literal[
        "constant", "cosine", "linear", "stable", "one_cycle", "restarts", "step", "multistep", "exponential",
        "plateau", "python",
    ] = "constant"  # fmt: skip
    steps: int
    warmup: int = 0
    begin: float | None = None
    floor: float = 0.0
    every: int = 1
    factor: float = 1.0
    milestones: tuple[int, ...] = ()
    growth: int = 1
    decay: int = 0
    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    rise: int = 1
    start: float = 0.0
    plateau: PlateauStep | None = None
    python: PythonFunction | None = None


@record
class MetricStep(Record):
    """One metric, exact over a split: sums over samples (or tokens) and one division at the end.

    Or it is an object that keeps states, which are put together over the ranks: of the class `torchmetrics` of that
    library, made with `arguments`, or what `python` returns.
    """

    kind: Literal[
        "loss", "accuracy", "top_k", "perplexity", "mse", "reward_margin", "reward_accuracy", "torchmetrics", "python",
    ]  # fmt: skip
    name: str  # its key in metrics.jsonl: "top_5"
    k: int = 1
    torchmetrics: str = ""
    arguments: Arguments = field(default_factory=dict)
    python: PythonFunction | None = None


@record
class GoalStep(Record):
    """The best value of a metric over the evaluations: the highest, or the lowest. runtime/loop/best_metric.py compares
    them.

    An improvement is better than the best so far by more than `by`; `patience` evaluations in a row without one end a
    training whose early stopping it is.
    """

    metric: str  # its key in metrics.jsonl
    highest: bool
    patience: int = 0  # 0: it ends nothing
    by: float = 0.0
    line: str = ""


@record
class HookStep(Record):
    """A user's object that is called at the events of a training, on rank 0 or `everywhere`."""

    python: PythonFunction
    everywhere: bool = False


@record
class ExchangeStep(Record):
    """How the ranks of the data axis agree, where that is no exact sum of gradients; runtime/exchange/ has each `kind`.

    `agrees` is what the members exchange, every `every` steps (0: by the clock), after the first `alone` steps, in
    which all gradients are summed exactly. A member is a rank, or a node whose `pieces` ranks sum gradients exactly,
    and each exchange a piece of the node's numbers.
    """

    kind: str
    agrees: Payload
    every: int = 1
    alone: int = 0
    pieces: int = 1
    arguments: Arguments = field(default_factory=dict)
    line: str = ""

    @property
    def differ(self) -> bool:
        """True if the weights of the members differ between two steps."""
        return self.agrees is Payload.WEIGHTS


@record
class GradientStep(Record):
    """The layout of parameters, gradients and optimizer state over the data axis, and the reduction of gradients.

    `none`: one rank, or a step of the user's own with nothing sharded. `ddp`: DistributedDataParallel. `zero1`: that,
    with the optimizer's state sharded by ZeroRedundancyOptimizer; a step of the user's own exchanges gradients itself.
    `fsdp`: `fully_shard` over a mesh of `replicas` x (ranks / replicas), also of one rank. `local`: each rank is by
    itself within a step, and the `exchange` is of momenta or weights.
    """

    kind: Literal["none", "ddp", "zero1", "fsdp", "local"]
    static_graph: bool = False
    unused: tuple[str, ...] = ()  # parameters that no step uses: they have no gradient
    search: bool = False  # each step finds out which parameters it has used, over the ranks
    replicas: int = 1  # fsdp: full copies kept
    units: tuple[str, ...] = ()  # fsdp: modules gathered and scattered one by one; the root takes the rest
    reshard: bool = False  # fsdp: parameters are freed after the forward pass and gathered again (ZeRO-3)
    accumulate: bool = False  # fsdp: gradients stay whole until the last micro-batch (ZeRO-1)
    averages: int = 1  # ranks over which a mean is taken in place of a sum; each loss is multiplied by as many
    exchange: ExchangeStep | None = None


@record
class CheckpointStep(Record):
    """The times at which the state of the training is saved, and the folder.

    A checkpoint is due after a step that is a multiple of `every`; with `seconds`, after the first step that ends so
    long after the last; with `best`, after an evaluation that is the best so far; and after the last step, if any of
    these is set. The newest `keep` are kept, and the best. `resume` is `none` (a folder that holds checkpoints is
    refused); `auto` (the newest whole checkpoint in `folder`, or the beginning); or the path of a checkpoint or of a
    folder with at least one.
    """

    every: int = 0  # steps; 0: never
    seconds: float = 0.0
    best: GoalStep | None = None
    keep: int = 2
    asynchronous: bool = True
    folder: str = ""  # "": `checkpoints` in the run directory
    resume: str = "none"
    line: str = ""

    @property
    def is_enabled(self) -> bool:
        return self.every > 0 or self.seconds > 0 or self.best is not None


@record
class StageStep(Record):
    """One stage of a pipeline: the layers `modules` of the model, in order, on the ranks at pipeline coordinate `rank`.
    In a model of a user's own, "" among them stands for calls that belong to no layer.
    `inputs` and `outputs` are of one sample: (shape, dtype) of each tensor that a rank receives and sends, its own part
    if the other axes divide it; the first stage's input is the data's.
    """

    index: int
    rank: int
    modules: tuple[str, ...]
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    outputs: tuple[tuple[tuple[int, ...], str], ...]


@record
class PipelineStep(Record):
    """The pipeline axis: its stages, and for each pipeline coordinate the actions in order, in torch's notation (`0F0`,
    `1B3`, `0I2`, `0W2`), without communication. An `I` of the stages `whole_backward` computes all gradients. Stages up
    to `first_trained`, the first with a parameter that trains, need no gradients of their inputs.
    """

    schedule: str
    stages: tuple[StageStep, ...]
    rows: tuple[tuple[str, ...], ...]
    whole_backward: tuple[int, ...] = ()
    first_trained: int = 0


@record
class DrawStep(Record):
    """Random numbers of forward passes that follow from the seed, the step, the sample and the layer.

    `kinds` are classes of modules that draw beside torch's dropout modules, as in "nets.DropPath"; `shared` are those
    that draw the same for all samples; `dims` has those, and modules whose samples lie along another dim than the
    first, or that draw both. On a tensor axis a rank has a piece of the sequence of the modules `pieces`. Of a network
    that a function makes `tensor` and `context` are the draws of which a rank of these axes has a piece. `untried`: no
    trial has seen the user's own step; all modules may draw, and the shape of a draw tells its dim.
    """

    kinds: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    dims: tuple[DrawDims, ...] = ()
    pieces: tuple[str, ...] = ()
    tensor: tuple[CutDraw, ...] = ()
    context: tuple[CutDraw, ...] = ()
    untried: bool = False


@record
class Training(Record):
    """The constants of a training that have no step of their own: a node of the plan, and a part of each program."""

    timeout: float  # seconds
    restarts: int = 0  # times that ranks which failed are started again, in all
    steps: int
    steps_per_epoch: int
    max_time: float | None = None  # seconds since the first step, over all resumes, after which it ends early
    average: AverageStep | None = None
    clip: float | None  # the largest norm of the whole gradient
    clip_value: float | None = None  # the largest absolute value in it
    on_nonfinite: Literal["stop", "skip", "continue"] = "stop"  # for a step whose loss is not finite
    on_spike: SpikeStep | None = None
    check_replicas: int = 0  # steps between two bitwise comparisons of the copies of parameters; 0: none
    sync_batch_norm: bool
    moves_buffers: bool = False  # forward passes move some by their samples: each step begins with rank 0's
    offload: tuple[str, ...] = ()  # optimizer, parameters, activations: kept in the host's memory; () on a CPU
    compiled: tuple[str, ...] = ()  # modules that torch.compile compiles one by one; ("",): the whole model
    evaluate_every: int  # steps; 0: at the end only, and nothing without a split to evaluate
    evaluate_start: bool = False
    evaluate_training: bool = False
    metrics: tuple[MetricStep, ...]
    generate: GenerateStep | None = None
    early_stopping: GoalStep | None = None
    own_step: PythonFunction | None = None  # does a step of training by itself
    log_every: int
    tensorboard: bool
    hooks: tuple[HookStep, ...] = ()
    loggers: tuple[PythonFunction, ...] = ()
    deterministic: bool
    seed: int


@record
class TrainMode(Record):
    """Trains. `profile` measures memory and collectives of the first steps, `trace` records some steps by the clock.
    `timed`: `dslc calibrate` measures the time of the plan's step, at the skew of the routing that the job states.
    """

    profile: bool = False
    trace: bool = False
    traced: tuple[int, ...] = ()  # the ranks that a trace records; () for all
    timed: bool = False


@record
class ObserveMode(Record):
    """Trains, and records for `dslc verify` what each rank did in each step.

    `exact`: in float64, without a pipeline, to tell a fault from float32's rounding. `reorder`: another order of each
    batch's samples for each number but 0, to measure the same. `noise`: dropout stays on. `plain`: the plain loop
    trains (runtime/loop/plain_loop.py). `tensors`: the first step whose tensors are summarized, for `dslc bisect`.
    """

    exact: bool = False
    reorder: int = 0
    noise: bool = False
    plain: bool = False
    tensors: int = 0


@record
class EvaluateMode(Record):
    """Evaluates the weights of a checkpoint or a file, `use`; `raw`: not their average, where a checkpoint has one."""

    use: str
    raw: bool = False
    split: Literal["validation", "test"] = "validation"


@record
class PredictMode(Record):
    """Writes the outputs for the samples of `split` to the file `output`; `use` and `raw` as in an evaluation."""

    use: str
    output: str
    raw: bool = False
    split: Literal["train", "validation", "test", "all"] = "validation"


@record
class CalibrateMode(Record):
    """Measures the times of a step's parts for `dslc calibrate`, and trains nothing.

    `layers` are the modules whose passes are timed, `samples` the sizes of a micro-batch, and `exchanges` the
    operation, the axis and the bytes of each collective. Where the parts are known, `step` is the seconds that a step
    takes by them, and ranks measure only the whole one.
    """

    layers: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()
    exchanges: tuple[tuple[str, str, int], ...] = ()
    step: float | None = None


Mode: TypeAlias = TrainMode | ObserveMode | EvaluateMode | PredictMode | CalibrateMode


@record
class JobProgram(Training):
    """The part of the program that all ranks of a job share."""

    job: str  # its name
    file: str  # the job file's name in messages
    plan_hash: str
    world_size: int
    axes: Mapping[str, int]  # the ranks along each: {"pipeline": 1, "data": 2, "context": 1, "tensor": 1}
    processes: int  # on each node
    device: Literal["cpu", "cuda"]
    gpus: tuple[int, ...] = ()  # the GPU of each local rank
    backend: str
    threads: int  # of one process; 0: as its environment says, or an equal share of the machine's cores
    memory: tuple[MemoryNode, ...] = ()  # as planned for a rank at each pipeline coordinate; () for an untraced model
    memory_limit: int | None = None  # bytes that a rank may hold: of its device, or as the job says
    model: ModelStep
    loss: LossStep
    data: DataStep
    microbatches: int
    optimizer: OptimizerStep
    learning_rate: LearningRateStep
    precision: PrecisionStep
    gradients: GradientStep
    recompute: RecomputeStep = field(default_factory=RecomputeStep)
    pipeline: PipelineStep | None = None
    tensor: TensorParallelStep | None = None
    context: ContextStep | None = None
    experts: ExpertParallelStep | None = None
    draws: DrawStep | None = None  # None: torch's generators draw, each rank's own
    checkpoint: CheckpointStep = field(default_factory=CheckpointStep)
    expected: StepPhases | None = None  # the predicted phases of a step; None without times of this machine
    calibrate: str = ""  # the command that measures anew what predicted times rest on
    mode: Mode = field(default_factory=TrainMode)

    @property
    def observation(self) -> ObserveMode | None:
        """The mode of a training that `dslc verify` compares; None in any other mode."""
        return self.mode if isinstance(self.mode, ObserveMode) else None

    @property
    def is_training(self) -> bool:
        """True if the training loop runs; false for the plain loop, an evaluation and predictions."""
        return isinstance(self.mode, TrainMode) or (self.observation is not None and not self.observation.plain)


@record
class RankPlace(Record):
    rank: int
    node: int
    local_rank: int
    coordinates: Mapping[str, int]  # by axis: {"data": 1}
    data_rank: int
    data_ranks: int


@record
class RankProgram(Record):
    """All that a rank receives."""

    job: JobProgram
    place: RankPlace
