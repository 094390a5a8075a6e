"""The records on the nodes and edges of the plan graph: one for each kind; actions.py has the actions.

A graph is folded by symmetry: equal things are one node with a count. Beside these records, nodes carry the steps of a
program (program.py): the part that all ranks of a job share.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from dslc.compiler.ir import actions as a
from dslc.compiler.ir import program as p
from dslc.compiler.ir.actions import Shape, TrafficNode
from dslc.compiler.ir.memory import MemoryNode
from dslc.compiler.ir.steps import StreamStep
from dslc.compiler.ir.tensors import DTYPE_BYTES, TensorFact
from dslc.dsl.record import Record, positional, record

TimeSource: TypeAlias = Literal["bound", "estimated", "published", "fitted", "measured"]


def source_text(source: TimeSource, fit: str, kind: str) -> str:
    """Returns the source of a time on devices of a kind, as plans say it: ` at best` for a bound."""
    if fit not in ("", kind):
        return f" {source} (as {fit})"
    return " at best" if source == "bound" else f" {source}"


@record
class Job(Record):
    """The job's name, and the name of its file in messages."""

    name: str
    file: str


@record
class Machines(Record):
    """Identical machines. `counts` are the numbers of them on which an elastic job can train; else the one."""

    count: int
    counts: tuple[int, ...]


@record
class Axis(Record):
    """One axis of the mesh: neighbours along it are `stride` ranks apart."""

    name: str
    size: int
    stride: int


@record
class Devices(Record):
    """Identical devices, `processes` on each machine, and the mesh over all of them.

    `gpus` are the named GPUs of a machine. `capacity` is the bytes of one device, `limit` the bytes that the job lets a
    rank hold; None: unknown. `threads` counts the threads of one process; 0: as its environment says, or an equal share
    of the machine's cores.
    """

    count: int
    processes: int
    kind: str  # cpu or cuda
    model: str  # of the hardware catalogue
    gpus: tuple[int, ...]
    backend: str
    capacity: int | None
    limit: int | None
    axes: tuple[Axis, ...]
    threads: int = 0

    @property
    def memory(self) -> int | None:
        """The most bytes that a rank may hold."""
        return self.limit or self.capacity


@record
class ShareMemory(Record):
    """The memory of ranks that take `samples` of a full batch."""

    samples: int
    memory: MemoryNode


@record
class Process(Record):
    """Ranks `first` to `last`, which do the same, at one pipeline coordinate; their exchanges and floating point
    operations in a step, and their memory at the peak. Where shares of a batch differ, these are of the largest, and
    `share_memory` is of each smaller one. If the job states a skew of the routing to experts, they are of the busiest
    rank, and `even_memory` is for an even routing. Under ZeRO-1, `dealt` are the numbers that each data rank updates.
    """

    index: int
    pipeline: int
    first: int
    last: int
    traffic: tuple[TrafficNode, ...] = ()
    memory: MemoryNode | None = None
    dealt: tuple[int, ...] = ()
    flops: int = 0
    share_memory: tuple[ShareMemory, ...] = ()
    even_memory: MemoryNode | None = None


@record
class Layer(Record):
    """One layer of the network. `line` is its place in the job; `quantized` says how many weights are in few bits."""

    name: str
    kind: str
    input: TensorFact
    output: TensorFact
    parameters: int
    flops: int  # of one sample, forward and backward
    kept: int  # bytes kept for the backward pass, of one sample
    line: str
    quantized: str = ""


@record
class Network(Record):
    """The model, and the count of its parameters; `trained` of them train (None: all)."""

    layers: tuple[Layer, ...]
    parameters: int
    trained: int | None = None


@record
class Stage(Record):
    """Layers `first` to `last` of the network.

    `held` is the most micro-batches whose activations it holds. `numbers` counts its parameters on a rank of the tensor
    axis, in rows that are filled up to equal shares; both are None before they are counted. If it is one of several
    stages, `modules` are the names of its layers, and `inputs` and `outputs` are of one sample: (shape, dtype) of each
    tensor that a rank receives and sends. `kept` are the bytes of a micro-batch's activations that a rank's device
    keeps: on the tensor and the context axis its own part.
    """

    index: int
    first: int
    last: int
    kept: int = 0
    modules: tuple[str, ...] = ()
    inputs: tuple[tuple[Shape, str], ...] = ()
    outputs: tuple[tuple[Shape, str], ...] = ()
    held: int | None = None
    numbers: int | None = None


@record
class Factors(Record):
    """Matrices whose gradients are exchanged as two factors: their numbers, and the numbers of each factor."""

    numbers: int
    first: int
    second: int


@record
class Weights(Record):
    """Parameters of a stage that are gathered together, and whose gradients are summed together.

    `numbers` counts one rank of the tensor axis, in rows that are filled up to equal shares. Each of `shards`
    neighbours along the data and context axes keeps one share, and gathers the others as `dtype` (None: it keeps them
    all); `freed`: a forward pass frees what was gathered. `trained` of the numbers have a gradient, which other ranks
    have too (None: none has), some of them as `factors`. `pieces`: gradients among them are partial sums on each rank
    of the tensor axis. `quantized` of the numbers are bytes of frozen weights in 4 or 8 bits; gathered with others,
    they all travel as bytes. So do `float8` of the numbers, which are gathered in 8 bits: `scales` weights, each with a
    scale. `experts` neighbours along the data axis each have other experts: those are shares and
    copies of every `experts`-th rank alone; else 1.
    """

    stage: int
    numbers: int
    shards: int
    dtype: str | None = None
    freed: bool = False
    trained: int | None = None
    pieces: bool = False
    factors: Factors | None = None
    quantized: int = 0
    float8: int = 0
    scales: int = 0
    experts: int = 1

    @property
    def kept_bytes(self) -> int:
        """The bytes that a rank keeps."""
        return (4 * self.numbers - 3 * self.quantized) // self.shards

    @property
    def sent_bytes(self) -> int:
        """The bytes that a rank contributes to a gather."""
        if self.quantized or self.float8:
            return self.kept_bytes - 3 * self.float8 // self.shards
        return DTYPE_BYTES.get(self.dtype or "", 0) * self.numbers // self.shards


@record
class SharedWeight(Record):
    """A tied weight of several stages: the numbers of a rank's share; `summed` over several coordinates."""

    numbers: int
    stages: tuple[int, ...]
    summed: bool


@record
class Schedule(Record):
    """The schedule of a pipeline, by torch's name for it in lower case (`1f1b`).

    `rows` is its table: a row for each pipeline coordinate, where `2F0` is stage 2's forward of micro-batch 0 and `-`
    a slot without a pass. `bubble` is by the stages' FLOPs, and `equal_bubble` that with equal numbers of layers in the
    stages, if they can be cut so. In the stages `whole_backward` the first half of a split backward pass computes all
    gradients. `first_trained` is the first stage with a parameter that trains.
    """

    name: str
    virtual_stages: int
    rows: tuple[str, ...]
    bubble: float
    equal_bubble: float | None = None
    whole_backward: tuple[int, ...] = ()
    first_trained: int = 0


@record
class StageTime(Record):
    """Seconds of a stage's passes over one micro-batch, the backward with its recomputation."""

    forward: float
    backward: float


@record
class StepEnd(Record):
    """Seconds of a rank after its last pass: traffic of gradients and parameters that nothing hides, and the update."""

    exposed: float
    update: float


@record
class Estimate(Record):
    """The predicted time of a step, in seconds of the busiest rank, and the bytes that it moves by link.

    `arithmetic`, at `efficiency` of the peak unless it was measured; `transfers` within layers; `waiting` for other
    stages; `exposed`, the traffic of gradients and parameters that nothing hides; the `update`, the making of
    `samples`, and the `rest`; `launches`, where the host takes longer to start kernels than these. `bubble` is the
    share of the passes' time in which a pipeline's ranks wait. Its parts are the times of each stage, of a `message`
    between two, and by pipeline coordinate the end of the step. `fit` is the kind of GPU whose published runs the times
    follow.
    """

    step_time: float | None
    mfu: float | None
    source: TimeSource
    arithmetic: float
    transfers: float
    waiting: float
    exposed: float
    update: float
    samples: float
    rest: float
    launches: float
    efficiency: float
    within: int  # bytes within a node
    between: int  # bytes between nodes
    bubble: float
    stages: tuple[StageTime, ...]
    message: float
    ends: tuple[StepEnd, ...]
    lacks: str = ""  # what a calibration lacks for this plan
    fit: str = ""


@record
class Batches(Record):
    """The samples of a full global batch and of an epoch's last, partial one (0: there is none), and the micro-batches
    that a rank cuts its share into. Shares are in proportion to `weights`, one for each data rank, or equal."""

    full: int
    last: int
    microbatches: int
    weights: tuple[int, ...] = ()
    most_share: int = 0  # the largest share that a run may measure; 0: shares are not measured


@record
class Share(Record):
    """`ranks` data ranks from `first_rank` on, each with `samples` of a batch: of the `full` or the `last` one."""

    batch: str
    first_rank: int
    ranks: int
    samples: int


@record
class ShareNode(Record):
    """`ranks` data ranks from `first_rank` on, each with `samples` of a batch, in the order of the batch."""

    first_rank: int
    ranks: int
    samples: int


@record
class PartNode(Record):
    """One source of a mixture: its samples, and how many of them an epoch has."""

    source: str
    train: int | None
    visited: int | None
    validation: int | None


@record
class DataNode(Record):
    """The samples, in the split and the order in which they are trained on, and the steps."""

    source: str
    parts: tuple[PartNode, ...] = ()
    documents: int | None = None  # the token that ends one
    train: int | None
    visited: int | None  # samples of an epoch
    order: str  # in words
    validation: int | None
    split: str
    shuffle: bool
    batch: int
    shares: tuple[ShareNode, ...]  # of a full batch
    last: int | None
    last_shares: tuple[ShareNode, ...]  # of an epoch's last, partial batch
    microbatch: int
    microbatches: int
    steps_per_epoch: int | None
    steps: int | None
    stream: StreamStep | None = None
    test: int | None = 0
    pictures: tuple[str, ...] = ()  # what they go through in training, by its names
    validation_sets: tuple[tuple[str, int], ...] = ()  # name and samples of sets that have names
    most_share: int = 0  # the largest share, if the run measures the shares
    reference: str = ""  # of a loss of pairs: `initial`, `adapter_off`, or the path of weights; computed before step 1
    ahead: bool = False  # the forward passes of all micro-batches come first, and again later
    counted_ahead: bool = False  # they do so for the tokens of each expert alone


@record
class TrainingNode(Record):
    """The settings of the training that a reader looks for first."""

    optimizer: str
    lr: float  # scaled
    lr_written: float
    lr_schedule: str
    precision: str
    clip: float | None
    clip_value: float | None = None
    compiled: str = ""  # what torch.compile compiles, in words
    chunked: str = ""  # how the loss is computed in chunks, in words
    recomputed: str = ""  # the blocks that a budget recomputes, in words
    seed: int
    restarts: int = 0
    check_replicas: int = 0  # steps
    on_spike: str = ""  # in words
    texts: str = ""  # that the network writes, in words
    own_step: bool = False  # a step of the user's own trains


@record
class PartialPlan(Record):
    """The known samples and training while a run lacks a size. It replaces the steps of a program."""

    data: DataNode
    training: TrainingNode
    shards: int


@positional
class PlacementEdge(Record):
    """Edge: a stage on a process, a process on devices, devices on machines."""


@positional
class NextActionEdge(Record):
    """Edge: an action, and the next of the same process. The actions of a process form one line."""


@record
class TransferEdge(Record):
    """Edge: a transfer from one action to another."""

    bytes: int


Relation: TypeAlias = PlacementEdge | NextActionEdge | TransferEdge
NodeRecord: TypeAlias = (
    Job
    | PartialPlan
    | Estimate
    | Machines
    | Devices
    | Process
    | Network
    | Stage
    | Weights
    | SharedWeight
    | Schedule
    | Batches
    | Share
    | a.Update
    | a.Unshard
    | a.Reshard
    | a.ReduceGradients
    | a.ForwardAhead
    | a.Forward
    | a.Backward
    | a.InputBackward
    | a.WeightBackward
    | a.SendActivations
    | a.ReceiveActivations
    | a.SendGradients
    | a.ReceiveGradients
    | a.Collective
    | p.Training
    | p.ModelStep
    | p.LossStep
    | p.DataStep
    | p.OptimizerStep
    | p.LearningRateStep
    | p.PrecisionStep
    | p.GradientStep
    | p.RecomputeStep
    | p.CheckpointStep
    | p.TensorParallelStep
    | p.ContextStep
    | p.ExpertParallelStep
    | p.DrawStep
)
