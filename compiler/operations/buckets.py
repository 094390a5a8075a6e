"""The buckets of gradients: DistributedDataParallel's, and the buckets of exchanges.

Model: DistributedDataParallel fills its buckets in the order in which gradients are ready, and broadcasts buffers in
buckets of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import prod

from dslc.compiler.ir.nodes import LayerNode, ParameterNode
from dslc.compiler.ir.tensors import DTYPE_BYTES
from dslc.compiler.operations.coordinate import Coordinate
from dslc.compiler.placement.sharding import BUCKET_BYTES, low_precision, searches

FIRST_BUCKET_BYTES = 2**20  # DistributedDataParallel's first bucket is small, so that it is sent early
BUFFER_BUCKET_BYTES = 250 * 2**20


def in_buckets(place: Coordinate) -> list[ParameterNode]:
    """Returns the parameters in DistributedDataParallel's buckets, in order; they have room for every gradient."""
    names, layers = place.whole.trained, place.layers
    if searches(place.model, place.sharding) and not place.model.varies:
        return [q for layer in layers for q in layer.parameters if q.name in names]
    # Laid out again after the first steps, in the order in which gradients came.
    return [q for q in ready(layers, autocast=low_precision(place.job)) if q.name in names]


def buckets(sizes: Iterable[int], first: int = FIRST_BUCKET_BYTES, most: int = BUCKET_BYTES) -> list[int]:
    """Returns the bytes of each DistributedDataParallel bucket: one is full once it holds its limit or more."""
    found, held, limit = [], 0, first
    for size in sizes:
        held += size
        if held >= limit:
            found.append(held)
            held, limit = 0, most
    return [*found, held] if held else found


def ready(layers: Sequence[LayerNode], *, autocast: bool) -> Iterator[ParameterNode]:
    """Yields parameters in the order in which the backward pass finishes their gradients.

    Modules come in reverse, and the parameters of one in order, with two exceptions: autograd reaches the bias of a
    linear map before its weight, which is a transposed view (but not through autocast's copies); and a module with
    parts uses its own parameters after them.
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
    """Returns the path of a parameter's module, and its layer's number within an LSTM."""
    path, _, name = parameter.name.rpartition(".")
    layer = re.search(r"_l\d+(_reverse)?$", name)
    return path, layer[0] if layer else ""


def buffer_buckets(layers: Iterable[LayerNode], limit: int = BUFFER_BUCKET_BYTES) -> dict[str, list[int]]:
    """Returns the bytes of each broadcast of buffers, by dtype; a broadcast is full at the limit."""
    by_dtype: dict[str, list[int]] = {}
    for buffer in (b for layer in layers for b in layer.buffers):
        by_dtype.setdefault(buffer.dtype, []).append(prod(buffer.shape) * DTYPE_BYTES[buffer.dtype])
    return {dtype: buckets(sizes, limit, limit) for dtype, sizes in by_dtype.items()}
