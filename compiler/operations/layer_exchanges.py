"""The operations within layers. Along the context axis each rank gathers the keys and values of all positions; along
the expert axis rows of tokens travel to the ranks that hold their experts, and the results travel back.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.nodes import LayerNode
from dslc.compiler.ir.parameter_names import base_name
from dslc.compiler.ir.tensors import DTYPE_BYTES
from dslc.compiler.model.pieces import gathers_by_layer
from dslc.compiler.operations.coordinate import Coordinate
from dslc.compiler.operations.moments import BACKWARD, FORWARD, OUTPUT, StepOperation, operation
from dslc.compiler.placement.losses import has_forward_ahead
from dslc.compiler.placement.sharding import low_dtype, recomputed
from dslc.dsl.language.preferences import PreferenceLoss


def context_axis(place: Coordinate) -> Iterator[StepOperation]:
    """Yields the gathers of keys and values, and the return of their gradients, for a rank's heads; and the sums of
    log-probabilities over the pieces of each answer, for a loss of pairs.
    """
    layout = place.layout
    again = set(recomputed(place.job, place.model))  # layers whose forward pass gathers again
    ahead = has_forward_ahead(place.job, place.layout)
    low = low_dtype(place.job)
    size = 2 * DTYPE_BYTES[low] * place.workload.microbatch
    scattered, gathered = list[int](), list[int]()
    own = gathers_by_layer(place.model)
    for layer in place.layers:
        for numbers, _ in own.get(layer.name, ()):
            scattered.append(size // 2 * numbers)
            gathered += [scattered[-1] // layout.sizes["context"]] * (1 + (layer.name in again) + ahead)
        for part in layer.parts:
            if part.kind == "attention":
                # Separate projections of keys and values may be narrower than the input.
                keys = next((p.gives for p in layer.parts if p.name == f"{part.name}.k_proj"), part.takes)
                scattered.append(size * prod(keys) // layout.sizes["tensor"])
                gathered += [scattered[-1] // layout.sizes["context"]] * (1 + (layer.name in again) + ahead)
    group, times = place.along("context"), layout.microbatches
    yield operation("all_gather", Payload.KEYS_AND_VALUES, group, FORWARD, gathered, dtype=low, times=times)
    yield operation("reduce_scatter", Payload.KEY_VALUE_GRADIENTS, group, BACKWARD, scattered, dtype=low, times=times)
    loss, last = place.job.model.loss, len(place.stages) - 1
    if isinstance(loss, PreferenceLoss) and last in place.mine:
        sums = 4 * place.workload.microbatch * (1 if loss.word == "dpo" else 2)  # and the numbers of tokens
        yield operation("all_reduce", Payload.ANSWER_SUMS, group, OUTPUT, [sums], times=times, stage=last)


def expert_axis(place: Coordinate) -> Iterator[StepOperation]:
    """Yields the all-to-alls of each layer with experts: counts, rows and results, and the gradients of both. The bytes
    assume an even routing, where each expert gets as many rows; their number does not depend on the routing.
    """
    again = set(recomputed(place.job, place.model))  # layers whose forward pass sends again
    ahead = has_forward_ahead(place.job, place.layout)
    low = low_dtype(place.job)
    counts, rows, gradients = list[int](), list[int](), list[int]()
    for layer, has_backward in _layers_by_backward(place):
        for experts, numbers in expert_rows(layer):
            size = DTYPE_BYTES[low] * place.workload.microbatch * numbers // place.layout.sizes["context"]
            passes = 1 + (layer.name in again and has_backward) + ahead
            counts += [8 * experts] * passes
            rows += [size] * passes
            gradients += [size] * has_backward
    group, times = place.experts, place.layout.microbatches
    yield operation("all_to_all", Payload.ROW_COUNTS, group, FORWARD, counts, dtype="int64", times=times)
    yield operation("all_to_all", Payload.EXPERT_ROWS, group, FORWARD, rows, dtype=low, times=times)
    yield operation("all_to_all", Payload.EXPERT_RESULTS, group, FORWARD, rows, dtype=low, times=times)
    for what in (Payload.RESULT_GRADIENTS, Payload.ROW_GRADIENTS):
        yield operation("all_to_all", what, group, BACKWARD, gradients, dtype=low, times=times)


def capacity_counts(place: Coordinate) -> Iterator[StepOperation]:
    """Yields the gathers of the tokens that each rank sends to each expert, in layers whose experts have a capacity."""
    again = set(recomputed(place.job, place.model))  # layers whose forward pass counts again
    counts = list[int]()
    for layer, has_backward in _layers_by_backward(place):
        for buffer in layer.buffers:
            if place.model.root is not None and buffer.name.endswith(".dropped_rows"):
                counts += [8 * buffer.shape[0]] * (1 + (layer.name in again and has_backward))
    yield operation("all_gather", Payload.CAPACITY_COUNTS, place.along("data"), FORWARD, counts, dtype="int64")


def _layers_by_backward(place: Coordinate) -> Iterator[tuple[LayerNode, bool]]:
    """Yields the layers of a rank, and whether they have a backward pass: those before all that trains have none."""
    for stage, layers in zip(place.mine, place.held, strict=True):
        has_backward = stage > 0  # the input from another stage has a gradient
        for layer in layers:
            has_backward = has_backward or any(q.name in place.whole.with_gradients for q in layer.parameters)
            yield layer, has_backward


def expert_rows(layer: LayerNode) -> Iterator[tuple[int, int]]:
    """Yields, for each mixture in a layer, its experts and the numbers of one sample's rows."""
    experts = {base_name(q.name).rpartition(".")[0]: q.experts for q in layer.parameters if q.experts}
    for part in layer.parts:
        if part.kind == "experts":
            yield experts[base_name(part.name)], prod(part.takes)
