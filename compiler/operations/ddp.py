"""The operations of DistributedDataParallel, which sums gradients in buckets and broadcasts buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.records import Weights
from dslc.compiler.operations.buckets import buffer_buckets, in_buckets
from dslc.compiler.operations.coordinate import Coordinate
from dslc.compiler.operations.exchanges import exchanged_gradients
from dslc.compiler.operations.moments import BEFORE_PASSES, BEFORE_UPDATE, StepOperation, operation
from dslc.compiler.placement.sharding import searches


def ddp(place: Coordinate, weights: Mapping[str, Weights]) -> Iterator[StepOperation]:
    """Yields the operations; nothing if no parameter trains."""
    names, data, model = trained_groups(weights), place.along("data"), place.model
    if not names:
        return
    if place.sharding.exchange is None:
        sizes = [4 * (weights[name].trained or 0) for name in names]
        yield operation("all_reduce", Payload.GRADIENTS, data, BEFORE_UPDATE, sizes, weights=names)
    else:
        yield from exchanged_gradients(place.sharding.exchange, {name: weights[name] for name in names})
    if searches(model, place.sharding):
        used = [4 * len(in_buckets(place))]
        yield operation("all_reduce", Payload.USED_PARAMETERS, data, BEFORE_UPDATE, used, dtype="int32")
    if model.root is None and (not model.batch_norm or model.moves_buffers):  # else they are equal, or each rank's own
        for dtype, sizes in buffer_buckets(place.layers).items():
            yield operation("broadcast", Payload.BUFFERS, data, BEFORE_PASSES, sizes, dtype=dtype)


def trained_groups(weights: Mapping[str, Weights]) -> list[str]:
    """Returns the names of the groups that have gradients."""
    return [name for name, each in weights.items() if each.trained]
