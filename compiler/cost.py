"""What a step costs: bytes held by a rank, bytes moved, time at the catalogue's speeds.

The account is arithmetic over the model graph. Memory is of one rank at its peak, which is where the backward pass
begins: every activation is held and gradients are being made. Kinds:

    parameters      float32 (O1), and a 16-bit copy (O2)
    gradients       float32; views of the communication buckets, so these are not counted twice
    optimizer       float32 state, by optimizer
    activations     what autograd keeps of the micro-batches in flight, under `recompute`
    buffers         batch statistics and the like
    communication   what is gathered for a while (the largest layer under ZeRO-3, twice: one ahead)

Limits: the allocator's slack, the framework's own memory and temporaries of single kernels are not in it. ZeRO here
means state divided evenly (Rajbhandari et al. 2019, arXiv:1910.02054); recomputation follows Chen et al. 2016 and, for
`selective`, Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass

from dslc.compiler.facts import DTYPE_BYTES
from dslc.compiler.layout import Layout
from dslc.compiler.model import LayerNode, ModelGraph
from dslc.compiler.schedule_cost import peak_held
from dslc.compiler.schedules import SPLITS_BACKWARD, ScheduleTable
from dslc.compiler.sharding import low_precision, parameter_count
from dslc.compiler.traffic import TrafficNode, traffic
from dslc.compiler.workload import Workload
from dslc.dsl import calls as c
from dslc.dsl.job import JobSpec
from dslc.dsl.registry import Call


@dataclass(frozen=True, kw_only=True)
class MemoryNode:
    """Bytes of one rank by kind, at the peak."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    communication: int

    @property
    def peak(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """The account of the ranks of one pipeline coordinate."""

    memory: MemoryNode
    traffic: tuple[TrafficNode, ...]
    flops: int  # of one step, on one rank, what is computed again included


def state_per_parameter(optimizer: Call) -> int:
    """How many float32 an optimizer keeps for each parameter."""
    match optimizer:
        case c.SGD():
            return int(optimizer.momentum > 0)
        case c.Adam() | c.AdamW():
            return 3 if optimizer.amsgrad else 2
        case c.Adagrad():
            return 1
        case c.Rmsprop():
            return 1 + int(optimizer.momentum > 0) + int(optimizer.centered)
        case _:
            return 2


def rank_cost(
    job: JobSpec,
    layout: Layout,
    workload: Workload,
    model: ModelGraph,
    stages: tuple[range, ...],
    schedule: ScheduleTable | None,
    pipeline: int,
) -> RankCost:
    """The account of the ranks at one pipeline coordinate."""
    mine = [i for i, rank in enumerate(_placement(stages, schedule)) if rank == pipeline]
    layers = [[model.layers[n] for n in stages[i]] for i in mine]
    flat = [layer for stage in layers for layer in stage]
    memory = _memory(job, layout, workload, model, stages, schedule, pipeline, flat)
    microbatches, share = layout.microbatches, workload.share
    again = sum(layer.forward_flops for layer in flat if _recomputed(job, layer, model))
    flops = sum(layer.forward_flops + layer.backward_flops for layer in flat) + again
    split = layout.sizes["tensor"] * layout.sizes["context"]
    return RankCost(
        memory=memory,
        traffic=tuple(traffic(job, layout, workload, model, stages, mine, flat, microbatches)),
        flops=flops * share // split,
    )


def _placement(stages: tuple[range, ...], schedule: ScheduleTable | None) -> tuple[int, ...]:
    return schedule.placement if schedule else (0,) * len(stages)


def _memory(
    job: JobSpec,
    layout: Layout,
    workload: Workload,
    model: ModelGraph,
    stages: tuple[range, ...],
    schedule: ScheduleTable | None,
    pipeline: int,
    layers: list[LayerNode],
) -> MemoryNode:
    zero = job.parallelism.zero
    shards = max(1, layout.sizes["data"] // job.parallelism.replicas)
    tensor = layout.sizes["tensor"]
    count = parameter_count(layers, tensor)
    low = low_precision(job)
    master = 4 + (2 if low and job.train.precision.level == "O2" else 0)  # type: ignore[attr-defined]
    largest = max((parameter_count([layer], tensor) for layer in layers), default=0)
    # Under a pipeline ZeRO-2's gradients stay whole until the last micro-batch (DESIGN.md, Lowering).
    whole_gradients = zero < 2 or (zero == 2 and layout.sizes["pipeline"] > 1)
    moved = set(job.memory.offload) if layout.device == "cuda" else set()
    return MemoryNode(
        parameters=0 if "parameters" in moved else master * count // (shards if zero == 3 else 1),
        gradients=4 * count // (1 if whole_gradients else shards),
        optimizer=0
        if "optimizer" in moved
        else 4 * count * state_per_parameter(job.train.optimizer) // (shards if zero >= 1 else 1),
        activations=0
        if "activations" in moved
        else _activations(job, layout, workload, model, stages, schedule, pipeline),
        buffers=sum(_buffer_bytes(layer) for layer in layers),
        communication=2 * 4 * largest if zero == 3 else 0,
    )


def _buffer_bytes(layer: LayerNode) -> int:
    total = 0
    for buffer in layer.buffers:
        size = DTYPE_BYTES[buffer.dtype]
        for dim in buffer.shape:
            size *= dim
        total += size
    return total


def _recomputed(job: JobSpec, layer: LayerNode, model: ModelGraph) -> bool:
    """Whether the layer's forward runs again in the backward pass, whole."""
    recompute = job.memory.recompute
    if not layer.recomputable:
        return False
    if isinstance(recompute, c.Every):
        blocks = [node.name for node in model.layers if node.recomputable]
        return blocks.index(layer.name) % recompute.n == 0
    return recompute == "full"


def kept_bytes(job: JobSpec, layer: LayerNode, model: ModelGraph) -> int:
    """What the layer keeps for the backward pass, of one sample."""
    low = low_precision(job)
    if _recomputed(job, layer, model):
        return layer.input.bytes
    if job.memory.recompute == "selective" and layer.recomputable:
        return layer.saved_selective_low if low else layer.saved_selective
    return layer.saved_low if low else layer.saved


def _activations(
    job: JobSpec,
    layout: Layout,
    workload: Workload,
    model: ModelGraph,
    stages: tuple[range, ...],
    schedule: ScheduleTable | None,
    pipeline: int,
) -> int:
    low = low_precision(job)
    split = layout.sizes["tensor"] * layout.sizes["context"]
    kept, again = [], 0
    for stage in stages:
        nodes = [model.layers[n] for n in stage]
        kept.append(float(sum(kept_bytes(job, layer, model) for layer in nodes)))
    placement = _placement(stages, schedule)
    for stage, rank in zip(stages, placement, strict=True):
        for node in (model.layers[n] for n in stage):
            if rank == pipeline and kept_bytes(job, node, model) < (node.saved_low if low else node.saved):
                again = max(again, node.saved_low if low else node.saved)
    # Between the two halves of a split backward torch frees nothing, and gradients come to the activations.
    between = [1.7 * b for b in kept] if schedule and schedule.name in SPLITS_BACKWARD else None
    held = peak_held(schedule, kept, between)[pipeline] if schedule else kept[0]
    loss = 4 * model.output.numbers if placement[-1] == pipeline else 0  # log-probabilities, in float32
    mine = [model.layers[n] for stage, rank in zip(stages, placement, strict=True) if rank == pipeline for n in stage]
    # Under O1 autocast keeps a 16-bit copy of each matrix until the backward pass is over.
    matrices = [q.count for layer in mine for q in layer.parameters if len(q.shape) > 1]
    copies = 2 * sum(matrices) // layout.sizes["tensor"] if low else 0
    return int((held + again + loss) * workload.microbatch / split) + copies
