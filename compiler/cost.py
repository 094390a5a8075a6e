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

from collections.abc import Iterator
from dataclasses import dataclass

from dslc.compiler.facts import DTYPE_BYTES, TensorFact
from dslc.compiler.layout import Layout
from dslc.compiler.model import LayerNode, ModelGraph
from dslc.compiler.schedule_cost import peak_held
from dslc.compiler.schedules import SPLITS_BACKWARD, ScheduleTable
from dslc.compiler.workload import Workload
from dslc.dsl import calls as c
from dslc.dsl.job import JobSpec
from dslc.dsl.registry import Call

BUCKET_BYTES = 25 * 2**20  # of DistributedDataParallel: the size torch's authors found best


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
class TrafficNode:
    """What one rank does on one axis in a step: `count` operations, handed `bytes` in all."""

    operation: str  # all_reduce, reduce_scatter, all_gather, send
    axis: str
    what: str  # gradients, parameters, batch statistics, activations, …
    count: int
    bytes: int


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
        traffic=tuple(_traffic(job, layout, workload, model, stages, mine, flat, microbatches)),
        flops=flops * share // split,
    )


def _placement(stages: tuple[range, ...], schedule: ScheduleTable | None) -> tuple[int, ...]:
    return schedule.placement if schedule else (0,) * len(stages)


def sample_bytes(fact: TensorFact) -> int:
    size = DTYPE_BYTES[fact.dtype]
    for dim in fact.shape:
        size *= dim
    return size


def parameter_count(layers: list[LayerNode], tensor: int) -> int:
    """Parameters of one rank: matrices are divided over the tensor axis, vectors are not; a tied weight counts once."""
    total = 0
    for layer in layers:
        for parameter in layer.parameters:
            if parameter.tied_to is None:
                total += -(-parameter.count // tensor) if len(parameter.shape) > 1 else parameter.count
    return total


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
    low = _low(job)
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


def _low(job: JobSpec) -> bool:
    return not isinstance(job.train.precision, c.Fp32)


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
    low = _low(job)
    if _recomputed(job, layer, model):
        return sample_bytes(layer.input)
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
    low = _low(job)
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
    loss = 4 * _numbers(model.output) if placement[-1] == pipeline else 0  # log-probabilities, in float32
    mine = [model.layers[n] for stage, rank in zip(stages, placement, strict=True) if rank == pipeline for n in stage]
    # Under O1 autocast keeps a 16-bit copy of each matrix until the backward pass is over.
    matrices = [q.count for layer in mine for q in layer.parameters if len(q.shape) > 1]
    copies = 2 * sum(matrices) // layout.sizes["tensor"] if low else 0
    return int((held + again + loss) * workload.microbatch / split) + copies


def _numbers(fact: TensorFact) -> int:
    return sample_bytes(fact) // DTYPE_BYTES[fact.dtype]


def _traffic(
    job: JobSpec,
    layout: Layout,
    workload: Workload,
    model: ModelGraph,
    stages: tuple[range, ...],
    mine: list[int],
    layers: list[LayerNode],
    microbatches: int,
) -> Iterator[TrafficNode]:
    yield from _gradient_traffic(job, layout, layers, microbatches)
    channels = [b.shape[0] for layer in layers for b in layer.buffers if b.name.endswith("running_mean")]
    if channels and layout.sizes["data"] > 1 and not model.unsynced_batch_norm:
        yield TrafficNode(
            operation="all_reduce",
            axis="data",
            what="batch statistics",
            count=2 * len(channels) * microbatches,
            bytes=sum(8 * (4 * n + 1) for n in channels) * microbatches,
        )
    element = 2 if _low(job) else 4
    if layout.sizes["pipeline"] > 1:
        yield from _stage_traffic(model, stages, mine, workload, microbatches, element)
    blocks = [layer for layer in layers if layer.kind in ("transformer_block", "attention")]
    numbers = sum(_numbers(layer.output) for layer in blocks) * workload.microbatch * microbatches
    if blocks and layout.sizes["tensor"] > 1:
        # Two pairs of all-gather and reduce-scatter forward and as many backward (Korthikanti et al. 2022), or
        # all-reduces.
        operation = "all_gather + reduce_scatter" if job.parallelism.sequence else "all_reduce"
        yield TrafficNode(
            operation=operation,
            axis="tensor",
            what="activations",
            count=4 * len(blocks) * microbatches * (2 if job.parallelism.sequence else 1),
            bytes=4 * numbers * element,
        )
    if blocks and layout.sizes["context"] > 1:
        yield TrafficNode(
            operation="all_gather",
            axis="context",
            what="keys and values",
            count=2 * len(blocks) * microbatches,
            bytes=2 * numbers * element // layout.sizes["context"],
        )


def _gradient_traffic(
    job: JobSpec, layout: Layout, layers: list[LayerNode], microbatches: int
) -> Iterator[TrafficNode]:
    data, zero = layout.sizes["data"], job.parallelism.zero
    count = parameter_count(layers, layout.sizes["tensor"])
    if data == 1 or not count:
        return
    whole = 4 * count
    units = max(1, sum(1 for layer in layers if layer.parameters))
    if zero <= 1:
        buckets = -(-whole // BUCKET_BYTES)
        yield TrafficNode(operation="all_reduce", axis="data", what="gradients", count=buckets, bytes=whole)
        if zero == 1:
            yield TrafficNode(operation="broadcast", axis="data", what="parameters", count=data, bytes=whole)
        return
    times = 1 if layout.sizes["pipeline"] > 1 else microbatches
    yield TrafficNode(
        operation="reduce_scatter", axis="data", what="gradients", count=units * times, bytes=whole * times
    )
    gathers = 2 * microbatches if zero == 3 else 1
    yield TrafficNode(
        operation="all_gather", axis="data", what="parameters", count=units * gathers, bytes=whole * gathers
    )


def _stage_traffic(
    model: ModelGraph,
    stages: tuple[range, ...],
    mine: list[int],
    workload: Workload,
    microbatches: int,
    element: int,
) -> Iterator[TrafficNode]:
    """What the stages of a rank send: outputs to the next stage, gradients of inputs to the one before."""
    forward = sum(_numbers(model.layers[stages[i][-1]].output) for i in mine if i + 1 < len(stages))
    backward = sum(_numbers(model.layers[stages[i][0]].input) for i in mine if i > 0)
    sends = (sum(i + 1 < len(stages) for i in mine) + sum(i > 0 for i in mine)) * microbatches
    yield TrafficNode(
        operation="send",
        axis="pipeline",
        what="activations and their gradients",
        count=sends,
        bytes=(forward + backward) * workload.microbatch * microbatches * element,
    )
