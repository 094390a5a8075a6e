"""A plan as it is shown: by `dslc plan`, in pictures, and in `report.json`.

A view is computed from the plan graph (graph/view.py) and never stored, so that what is shown is what runs. As JSON it
has sorted keys, no time, no host and no absolute path. Ranks that do the same thing are one `RankNode`, so that the
view of 16,384 devices is as small as their symmetry allows.
"""

from __future__ import annotations

import json
from typing import Any

from dslc.compiler.ir.actions import TrafficNode
from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.memory import MemoryNode
from dslc.compiler.ir.records import DataNode, Estimate, Layer, Schedule, ShareMemory, TrainingNode
from dslc.compiler.ir.steps import ExpertParallelStep
from dslc.dsl.record import Record, record


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
class StageNode(Record):
    """Layers `first` to `last` (both included), on the ranks at one pipeline coordinate.

    `kept` are the bytes of a micro-batch's activations that a rank's device keeps of them: on the tensor and the
    context axis its own part. `output_bytes` counts its outputs for a micro-batch, which go to the next stage.
    """

    index: int
    pipeline: int
    first: int
    last: int
    parameters: int
    flops: int
    kept: int
    output_bytes: int = 0


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
    share_memory: tuple[ShareMemory, ...] = ()  # of shares of a batch that are smaller than the largest
    even_memory: MemoryNode | None = None  # for an even routing to experts, if the job states another


@record
class PlanView(Record):
    """`layers`, `stages`, `ranks` are empty for a user's own network that was not traced; its numbers are None.

    `shards` ranks of the data and context axes, neighbours along them, have one copy of the parameters between them.
    `hash` is the plan graph's hash.
    """

    job: str
    hash: str
    topology: TopologyNode
    axes: tuple[AxisNode, ...]
    shards: int
    parameters: int | None
    trained: int | None = None  # of them, if not all
    layers: tuple[Layer, ...]
    stages: tuple[StageNode, ...]
    data: DataNode
    schedule: Schedule | None
    training: TrainingNode
    ranks: tuple[RankNode, ...]
    step: Estimate | None = None
    experts: ExpertParallelStep | None = None
    sequence: bool = False  # layers of the tensor axis work on pieces of the sequence between them

    @property
    def world_size(self) -> int:
        return self.topology.nodes * self.topology.processes

    @property
    def step_time(self) -> float | None:
        """Predicted seconds of a step."""
        return self.step.step_time if self.step else None

    @property
    def bubble(self) -> float | None:
        """Share of the passes' time in which a pipeline's ranks wait: by the predicted times, else by FLOPs."""
        if self.schedule is None:
            return None
        return self.step.bubble if self.step and self.step.step_time is not None else self.schedule.bubble

    @property
    def mfu(self) -> float | None:
        """Predicted model FLOPs utilization, a share of 1."""
        return self.step.mfu if self.step else None

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = to_json(self)
        return data

    def text(self) -> str:
        """Returns the view as JSON: sorted keys, one level of indentation."""
        return json.dumps(self.to_json(), sort_keys=True, indent=1) + "\n"
