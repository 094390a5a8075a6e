"""What a rank exchanges in a step: collectives by kind, how many, and the bytes it hands in.

Model: what torch's engines do, rule by rule. DistributedDataParallel agrees on gradients in buckets, filled in the
order in which gradients are ready; ZeroRedundancyOptimizer sends what each rank has updated in one broadcast a rank;
`fully_shard` gathers a unit before it runs and scatters its gradients after. What dslc itself asks for (statistics of
batches, counts of what is kept, the norm of a gradient in parts) is counted as its own code does it.

Contract: for a plan of the data axis alone, kind, count and bytes are those that a step really has, which a test holds
(tests/test_collectives.py); `dslc run --profile` shows both. The bytes are those handed in: of an all-gather a rank's
own part, of a reduce-scatter the whole. What is logged, evaluated or written as a checkpoint belongs to no step.

Limits: first steps exchange more, in which engines agree on buckets. Of a user's own module, the order in which
gradients are ready is taken for the reverse of that in which its layers are called. The figures of the tensor
axis are those of the papers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod

from dslc.compiler.facts import DTYPE_BYTES, TensorFact
from dslc.compiler.layout import Layout
from dslc.compiler.nodes import LayerNode, ModelGraph, ParameterNode
from dslc.compiler.sharding import (
    BUCKET_BYTES,
    Sharding,
    low_precision,
    optimizer_groups,
    recomputed,
    sharding_of,
    trained,
    units,
    zero1_partition,
)
from dslc.compiler.stages import sent
from dslc.compiler.tensor_plan import tensor_plan
from dslc.compiler.workload import Workload
from dslc.dsl import calls as c
from dslc.dsl.job import JobSpec

FIRST_BUCKET_BYTES = 2**20  # DistributedDataParallel's first bucket is small, so that it goes early
BUFFER_BUCKET_BYTES = 250 * 2**20


@dataclass(frozen=True, kw_only=True)
class TrafficNode:
    """What one rank does on one axis in a step: `count` operations, handed `bytes` in all."""

    operation: str  # all_reduce, reduce_scatter, all_gather, broadcast, send
    axis: str
    what: str  # gradients, parameters, batch statistics, activations, …
    count: int
    bytes: int


def traffic(
    job: JobSpec,
    layout: Layout,
    workload: Workload,
    model: ModelGraph,
    stages: tuple[range, ...],
    mine: list[int],
    layers: list[LayerNode],
    microbatches: int,
) -> Iterator[TrafficNode]:
    """What a rank that holds `layers` exchanges; no entry is without an operation."""
    if layout.sizes["data"] * layout.sizes["context"] * layout.sizes["tensor"] > 1:
        for node in _over_data(job, layout, model, layers, microbatches):
            if node.count:
                yield node
    yield from _over_model(job, layout, workload, model, stages, mine, layers, microbatches)


def _data(operation: str, what: str, sizes: Sequence[int]) -> TrafficNode:
    return TrafficNode(operation=operation, axis="data", what=what, count=len(sizes), bytes=sum(sizes))


# ------------------------------------------------------------------------------------------------- the data axis


def _over_data(
    job: JobSpec, layout: Layout, model: ModelGraph, layers: list[LayerNode], microbatches: int
) -> Iterator[TrafficNode]:
    sharding, names = sharding_of(job, layout), trained(job, model)
    if sharding.engine == "fsdp":
        yield from _fsdp(job, layout, sharding, model, layers, names, microbatches)
    else:
        yield from _ddp(job, layout, sharding, model, layers, names)
    if not model.unsynced_batch_norm:
        yield _data("all_reduce", "batch statistics", _statistics(job, model, layers, names) * microbatches)
    if counts_kept(job) and layout.sizes["data"] > 1:
        yield _data("all_reduce", "count of what is kept", [8])


def counts_kept(job: JobSpec) -> bool:
    """Whether the ranks have to agree, in each step, on how many targets are not ignored.

    Targets that dslc makes itself are classes from 0 up: unless one of those is ignored, their count is arithmetic.
    """
    loss = job.model.loss
    made = isinstance(job.data.source, c.Digits | c.Stdlib | c.Text | c.Synthetic)
    return isinstance(loss, c.CrossEntropy) and not (made and loss.ignore < 0)


def _ddp(
    job: JobSpec, layout: Layout, sharding: Sharding, model: ModelGraph, layers: list[LayerNode], names: frozenset[str]
) -> Iterator[TrafficNode]:
    tensor = layout.sizes["tensor"]
    order = [q for layer in layers for q in layer.parameters if q.name in names]
    searched = model.root is None and bool(model.unused)  # for parameters that a step does not use
    if not searched:
        # Laid out once more after the first steps, as the gradients came.
        order = [q for q in ready(layers, autocast=low_precision(job)) if q.name in names]
    if not order:
        return
    yield _data("all_reduce", "gradients", buckets(4 * _local(q, tensor) for q in order))
    if searched:
        yield _data("all_reduce", "which parameters were used", [4 * len(order)])
    if not model.batch_norm:  # else the buffers are alike, or each rank's own
        yield _data("broadcast", "buffers", _buffers(layers))
    if sharding.engine == "zero1":
        yield _data("broadcast", "parameters", _updated(job, model, names, sharding.shards))


def buckets(sizes: Iterable[int], first: int = FIRST_BUCKET_BYTES, most: int = BUCKET_BYTES) -> list[int]:
    """Bytes of each of DistributedDataParallel's buckets: one is full as soon as it holds its limit or more."""
    found, held, limit = [], 0, first
    for size in sizes:
        held += size
        if held >= limit:
            found.append(held)
            held, limit = 0, most
    return [*found, held] if held else found


def ready(layers: Sequence[LayerNode], *, autocast: bool) -> Iterator[ParameterNode]:
    """Parameters in the order in which the backward pass is done with their gradients.

    Modules are the other way round, and the parameters of one as they are, with two exceptions: autograd comes upon the
    bias of a linear map before its weight, which is a transposed view (but not through autocast's copies); and a module
    with parts uses its own parameters after them.
    """
    for layer in reversed(layers):
        grouped = groupby((q for q in layer.parameters if q.tied_to is None), key=_place)
        modules = [(path, list(group)) for (path, _), group in grouped]
        for n, (path, _) in enumerate(modules):
            if n + 1 < len(modules) and path and modules[n + 1][0].startswith(f"{path}."):
                modules[n], modules[n + 1] = modules[n + 1], modules[n]
        for _, group in reversed(modules):
            linear = len(group) == 2 and [len(q.shape) for q in group] == [2, 1]
            yield from reversed(group) if linear and not autocast else group


def _place(parameter: ParameterNode) -> tuple[str, str]:
    """The path of the module that a parameter belongs to, and the number of its layer within an LSTM."""
    path, _, name = parameter.name.rpartition(".")
    layer = re.search(r"_l\d+(_reverse)?$", name)
    return path, layer[0] if layer else ""


def _local(parameter: ParameterNode, tensor: int) -> int:
    return -(-parameter.count // tensor) if len(parameter.shape) > 1 else parameter.count


def _buffers(layers: Iterable[LayerNode]) -> list[int]:
    by_dtype: dict[str, list[int]] = {}
    for buffer in (b for layer in layers for b in layer.buffers):
        by_dtype.setdefault(buffer.dtype, []).append(prod(buffer.shape) * DTYPE_BYTES[buffer.dtype])
    limit = BUFFER_BUCKET_BYTES
    return [size for sizes in by_dtype.values() for size in buckets(sizes, limit, limit)]


def _updated(job: JobSpec, model: ModelGraph, names: frozenset[str], ranks: int) -> list[int]:
    """Bytes of the parameters that each rank updates; torch sends one number for a rank that has none."""
    groups = [[q.count for q in group] for group in optimizer_groups(job, model, names)]
    held = [0] * ranks
    for sizes, owners in zip(groups, zero1_partition(groups, ranks), strict=True):
        for size, owner in zip(sizes, owners, strict=True):
            held[owner] += 4 * size
    return [size or 4 for size in held]


def _statistics(job: JobSpec, model: ModelGraph, layers: Iterable[LayerNode], names: frozenset[str]) -> list[int]:
    """Bytes of each all-reduce of synchronised batch normalisations (runtime/batch_norm.py) in a micro-batch.

    Forward: two float64 for each channel and one; once more where the forward pass runs again. Backward: two for each
    channel, unless nothing before it trains, so that there is no backward pass.
    """
    found: list[int] = []
    again, here, flows = set(recomputed(job, model)), {id(layer) for layer in layers}, False
    for layer in model.layers:
        for norm in (b for b in layer.buffers if b.name.endswith("running_mean")):
            path, channels = norm.name.removesuffix("running_mean"), norm.shape[0]
            own = [q.name for q in layer.parameters]
            last = max((n for n, name in enumerate(own) if name.startswith(path)), default=-1)
            backward = flows or any(name in names for name in own[: last + 1])
            if id(layer) in here:
                found += [8 * (2 * channels + 1)] * (2 if backward and layer.name in again else 1)
                found += [16 * channels] * backward
        flows = flows or any(q.name in names for q in layer.parameters)
    return found


def _fsdp(
    job: JobSpec,
    layout: Layout,
    sharding: Sharding,
    model: ModelGraph,
    layers: list[LayerNode],
    names: frozenset[str],
    microbatches: int,
) -> Iterator[TrafficNode]:
    shards, tensor = sharding.shards, layout.sizes["tensor"]
    gathered, scattered, summed = [], [], []
    kept = 2 if low_precision(job) and getattr(job.train.precision, "level", "O1") == "O2" else 4
    here = {q.name for layer in layers for q in layer.parameters}
    again = _gathered_again(model, names) if sharding.reshard else set()
    for unit in units(model):
        rows = [(q, _padded(q, shards, tensor)) for q in unit.parameters if q.name in here]
        size = kept * sum(count for _, count in rows) // shards
        trains = 4 * sum(count for q, count in rows if q.name in names)
        gathered += [size] * (1 + (unit.name in again)) if size else []
        scattered += [trains] if trains else []
        summed += [trains // shards] if trains else []
    if shards > 1:
        yield _data("all_gather", "parameters", gathered * (microbatches if sharding.reshard else 1))
        yield _data("reduce_scatter", "gradients", scattered * (1 if sharding.accumulate else microbatches))
    if sharding.replicas > 1:
        yield _data("all_reduce", "gradients", summed)
    agreed = shards > 1 or layout.world_size > layout.sizes["data"]
    if job.train.clip is not None and agreed:
        yield _data("all_reduce", "norm of the gradient", [4])
    if isinstance(job.train.precision, c.Fp16) and agreed:
        yield _data("all_reduce", "whether a gradient overflowed", [4])


def _gathered_again(model: ModelGraph, names: frozenset[str]) -> set[str]:
    """The units that are gathered for the backward pass too.

    Not the root, which stays gathered. Not those that come before all that trains, which have no backward pass; but
    torch gathers one unit ahead, so the last of these comes as well.
    """
    apart = [unit.name for unit in units(model) if unit.name]
    idle = []
    for layer in model.layers:
        if any(q.name in names for q in layer.parameters):
            break
        idle += [layer.name] if layer.name in apart else []
    return set(apart) - set(idle[:-1])


def _padded(parameter: ParameterNode, shards: int, tensor: int) -> int:
    """Numbers of a parameter with as many rows as its shards take, all alike."""
    if not parameter.shape:
        return 0
    rows = -(-parameter.shape[0] // shards) * shards
    count = rows * prod(parameter.shape[1:])
    return -(-count // tensor) if len(parameter.shape) > 1 else count


# ------------------------------------------------------------------------------------------------ the other axes


def _over_model(
    job: JobSpec,
    layout: Layout,
    workload: Workload,
    model: ModelGraph,
    stages: tuple[range, ...],
    mine: list[int],
    layers: list[LayerNode],
    microbatches: int,
) -> Iterator[TrafficNode]:
    element = 2 if low_precision(job) else 4
    if layout.sizes["pipeline"] > 1:
        yield from _stage_traffic(job, layout, workload, model, stages, mine, microbatches)
    blocks = [layer for layer in layers if layer.kind in ("transformer_block", "attention")]
    numbers = sum(layer.output.numbers for layer in blocks) * workload.microbatch * microbatches
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
    context = layout.sizes["context"]
    if blocks and context > 1:
        again = set(recomputed(job, model))  # whose forward pass gathers once more
        size = 2 * element * workload.microbatch // layout.sizes["tensor"]
        gathered = [size * b.output.numbers // context for b in blocks for _ in range(1 + (b.name in again))]
        scattered = [size * b.output.numbers for b in blocks]
        for operation, sizes in (("all_gather", gathered), ("reduce_scatter", scattered)):
            yield TrafficNode(
                operation=operation,
                axis="context",
                what="keys and values" if operation == "all_gather" else "gradients of keys and values",
                count=len(sizes) * microbatches,
                bytes=sum(sizes) * microbatches,
            )


def _stage_traffic(
    job: JobSpec,
    layout: Layout,
    workload: Workload,
    model: ModelGraph,
    stages: tuple[range, ...],
    mine: list[int],
    microbatches: int,
) -> Iterator[TrafficNode]:
    """What the stages of a rank send to other ranks: outputs to the next stage, gradients of inputs to the one
    before."""
    ends = [i for i in mine if i + 1 < len(stages) and i + 1 not in mine]
    ends += [i - 1 for i in mine if i > 0 and i - 1 not in mine]
    sizes = [message_bytes(fact) for fact in messages(job, layout, workload, model, stages)]
    if ends:
        yield TrafficNode(
            operation="send",
            axis="pipeline",
            what="activations and their gradients",
            count=len(ends) * microbatches,
            bytes=sum(sizes[i] for i in ends) * microbatches,
        )


def messages(
    job: JobSpec, layout: Layout, workload: Workload, model: ModelGraph, stages: tuple[range, ...]
) -> tuple[TensorFact, ...]:
    """What a rank of each stage but the last hands on of a micro-batch, and gets back as its gradient: its own part,
    where the context or the tensor axis shares it out."""
    tensor, context = layout.sizes["tensor"], layout.sizes["context"]
    plan = tensor_plan(job, tensor, model) if tensor > 1 and model.root is not None else None
    found = []
    for stage, following in pairwise(stages):
        fact = sent(job, model.layers[stage[-1]])
        shape = (fact.shape[0] // context, *fact.shape[1:]) if context > 1 else fact.shape
        if plan is not None:
            shape = plan.given(model.layers[following[0]].name, shape, tensor)
        found.append(TensorFact(shape=(workload.microbatch, *shape), dtype=fact.dtype))
    return tuple(found)


def message_bytes(fact: TensorFact) -> int:
    return prod(fact.shape) * DTYPE_BYTES[fact.dtype]
