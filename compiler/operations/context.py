"""The operations of the context axis: each rank gathers the keys and values of all positions."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.tensors import DTYPE_BYTES
from dslc.compiler.model.pieces import gathers_by_layer
from dslc.compiler.operations.coordinate import Coordinate
from dslc.compiler.operations.moments import BACKWARD, FORWARD, StepOperation, operation
from dslc.compiler.placement.sharding import low_dtype, recomputed


def context_axis(place: Coordinate) -> Iterator[StepOperation]:
    """Yields the gathers of keys and values, and the return of their gradients, for a rank's heads."""
    layout = place.layout
    again = set(recomputed(place.job, place.model))  # layers whose forward pass gathers again
    low = low_dtype(place.job)
    size = 2 * DTYPE_BYTES[low] * place.workload.microbatch
    scattered, gathered = list[int](), list[int]()
    own = gathers_by_layer(place.model)
    for layer in place.layers:
        for numbers, _ in own.get(layer.name, ()):
            scattered.append(size // 2 * numbers)
            gathered += [scattered[-1] // layout.sizes["context"]] * (1 + (layer.name in again))
        for part in layer.parts:
            if part.kind == "attention":
                # Separate projections of keys and values may be narrower than the input.
                keys = next((p.gives for p in layer.parts if p.name == f"{part.name}.k_proj"), part.takes)
                scattered.append(size * prod(keys) // layout.sizes["tensor"])
                gathered += [scattered[-1] // layout.sizes["context"]] * (1 + (layer.name in again))
    group, times = place.along("context"), layout.microbatches
    yield operation("all_gather", Payload.KEYS_AND_VALUES, group, FORWARD, gathered, dtype=low, times=times)
    yield operation("reduce_scatter", Payload.KEY_VALUE_GRADIENTS, group, BACKWARD, scattered, dtype=low, times=times)
