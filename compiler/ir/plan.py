"""The `Plan`: everything that will happen on every rank, as data that can be shown, compared and hashed.

Serialised as JSON with sorted keys; the same job and the same resolved facts give the same bytes on any machine, so it
holds no time, no host and no absolute path. Ranks that do the same thing are one `RankNode`, so the plan for 16,384
devices is as small as its symmetry allows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from dslc.compiler.ir.codec import from_json, parse, to_json
from dslc.compiler.ir.memory import MemoryNode
from dslc.compiler.ir.steps import StreamStep
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.ir.traffic import TrafficNode
from dslc.dsl.record import Record, record

PLAN_VERSION = 1
BESIDE = ("hash", "checksum", "format", "dslc", "folder", "source", "facts", "graph")  # of a plan file (plan_file.py)


@record
class TopologyNode(Record):
    """The devices. `kind` is of the hardware catalogue, `memory` bytes of one device where that is known."""

    nodes: int
    node_counts: tuple[int, ...]
    processes: int
    device: str
    kind: str
    memory: int | None
    limit: int | None
    backend: str
    threads: int = 0  # of one process; 0: as its environment says, or a share of the cores


@record
class AxisNode(Record):
    """One axis of the mesh: neighbours are `stride` ranks apart."""

    name: str
    size: int
    stride: int
    between_nodes: bool


@record
class LayerPlan(Record):
    """One layer as it is shown. `line` is its place in the job."""

    name: str
    kind: str
    input: TensorFact
    output: TensorFact
    parameters: int
    flops: int  # of one sample, forward and backward
    kept: int  # bytes kept for the backward pass, of one sample
    line: str


@record
class StageNode(Record):
    """Layers `first` to `last` (both included), on the ranks at one pipeline coordinate.

    `kept` are the bytes of a micro-batch's activations that a rank's device keeps of them: on the tensor and the
    context axis its own part.
    """

    index: int
    pipeline: int
    first: int
    last: int
    parameters: int
    flops: int
    kept: int


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
    ahead: bool = False  # the outputs of all micro-batches are made first, as their loss compares them


@record
class ScheduleNode(Record):
    """The table of a pipeline: a row for each pipeline coordinate; `2F0` is stage 2's forward of micro-batch 0.

    `equal_bubble` is the bubble with equal numbers of layers in the stages, if they can be cut so.
    """

    name: str
    virtual_stages: int
    bubble: float
    rows: tuple[str, ...]
    equal_bubble: float | None = None


@record
class TrainingNode(Record):
    optimizer: str
    lr: float  # scaled
    lr_written: float
    lr_schedule: str
    precision: str
    clip: float | None
    clip_value: float | None = None
    seed: int
    restarts: int = 0


@record
class RankNode(Record):
    """Ranks `first` to `last` (both included), which all do the same with other samples or shards."""

    pipeline: int
    first: int
    last: int
    stages: tuple[int, ...]
    memory: MemoryNode
    traffic: tuple[TrafficNode, ...]
    flops: int  # of one step


@record
class StepNode(Record):
    """The parts of a step's predicted time, in seconds of the busiest rank, and the bytes it moves by link.

    `arithmetic`, at `efficiency` of the peak; `transfers` within layers; `waiting` for other stages; and `exposed`, the
    traffic of gradients and parameters that nothing hides.
    """

    arithmetic: float
    transfers: float
    waiting: float
    exposed: float
    efficiency: float
    within: int  # bytes within a node
    between: int  # bytes between nodes


@record
class Plan(Record):
    """`layers`, `stages`, `ranks` are empty for a user's own network that was not traced; its numbers are None.

    `shards` ranks of the data and context axes, neighbours along them, have one copy of the parameters between them.
    """

    version: int
    job: str
    topology: TopologyNode
    axes: tuple[AxisNode, ...]
    shards: int
    parameters: int | None
    trained: int | None = None  # of them, if not all
    layers: tuple[LayerPlan, ...]
    stages: tuple[StageNode, ...]
    data: DataNode
    schedule: ScheduleNode | None
    training: TrainingNode
    ranks: tuple[RankNode, ...]
    step_time: float | None
    mfu: float | None
    step: StepNode | None = None
    resolved: Mapping[str, Any]  # facts that the job does not state and the plan depends on
    settings: Mapping[str, Any]  # all other settings, so that the hash is over the whole job

    @property
    def world_size(self) -> int:
        return self.topology.nodes * self.topology.processes

    def to_json(self) -> dict[str, Any]:
        made: dict[str, Any] = to_json(self)
        return made | {"hash": self.hash}

    def text(self) -> str:
        """Returns the plan's bytes: JSON, sorted keys, one level of indentation."""
        return json.dumps(self.to_json(), sort_keys=True, indent=1) + "\n"

    @property
    def hash(self) -> str:
        """Returns the first 16 hexadecimal digits of SHA-256 over the plan without its hash."""
        canonical = json.dumps(to_json(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def load_plan(text: str) -> Plan:
    """Returns a plan from its JSON. Raises DecodeError."""
    data = parse(text)
    if isinstance(data, dict):
        data = {name: value for name, value in data.items() if name not in BESIDE}
    return from_json(Plan, data)
