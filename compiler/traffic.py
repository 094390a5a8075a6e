"""What a rank exchanges in a step: operations, how many, and the bytes it hands in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dslc.compiler.layout import Layout
from dslc.compiler.nodes import LayerNode, ModelGraph
from dslc.compiler.sharding import BUCKET_BYTES, low_precision, parameter_count
from dslc.compiler.workload import Workload
from dslc.dsl.job import JobSpec


@dataclass(frozen=True, kw_only=True)
class TrafficNode:
    """What one rank does on one axis in a step: `count` operations, handed `bytes` in all."""

    operation: str  # all_reduce, reduce_scatter, all_gather, send
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
    element = 2 if low_precision(job) else 4
    if layout.sizes["pipeline"] > 1:
        yield from _stage_traffic(model, stages, mine, workload, microbatches, element)
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
    forward = sum(model.layers[stages[i][-1]].output.numbers for i in mine if i + 1 < len(stages))
    backward = sum(model.layers[stages[i][0]].input.numbers for i in mine if i > 0)
    sends = (sum(i + 1 < len(stages) for i in mine) + sum(i > 0 for i in mine)) * microbatches
    yield TrafficNode(
        operation="send",
        axis="pipeline",
        what="activations and their gradients",
        count=sends,
        bytes=(forward + backward) * workload.microbatch * microbatches * element,
    )
