"""The operations of synchronised batch normalisation (runtime/technique/batch_norm.py)."""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.ir.actions import Payload
from dslc.compiler.operations.coordinate import Coordinate
from dslc.compiler.operations.moments import ALL_PASSES, StepOperation, operation
from dslc.compiler.placement.losses import has_forward_ahead
from dslc.compiler.placement.sharding import recomputed


def batch_statistics(place: Coordinate) -> Iterator[StepOperation]:
    """Yields the all-reduces, unless each rank has statistics of its own."""
    exchange = place.sharding.exchange
    if not place.model.unsynced_batch_norm and not (exchange is not None and exchange.differ):
        yield operation(
            "all_reduce",
            Payload.BATCH_STATISTICS,
            place.along("data"),
            ALL_PASSES,
            _sizes(place),
            dtype="float64",
            times=place.layout.microbatches,
        )


def _sizes(place: Coordinate) -> list[int]:
    """Returns the bytes of each all-reduce in a micro-batch.

    Forward: two float64 for each channel and one; again in recomputation. Backward: two for each channel, unless
    nothing before it in the model trains, so that there is no backward pass.
    """
    sizes: list[int] = []
    again, ahead = set(recomputed(place.job, place.model)), has_forward_ahead(place.job, place.layout)
    still = place.model.traced.still if place.model.traced is not None else ()
    for stage, layers in zip(place.mine, place.held, strict=True):
        flows = stage > 0  # input from another stage has a gradient
        for layer in layers:
            for norm in (b for b in layer.buffers if b.name.endswith("running_mean")):
                path, channels = norm.name.removesuffix("running_mean"), norm.shape[0]
                if path.removesuffix(".") in still:
                    continue
                own = [q.name for q in layer.parameters]
                last = max((n for n, name in enumerate(own) if name.startswith(path)), default=-1)
                backward = flows or any(name in place.whole.with_gradients for name in own[: last + 1])
                sizes += [8 * (2 * channels + 1)] * (1 + (backward and layer.name in again) + ahead)
                sizes += [16 * channels] * backward
            flows = flows or any(q.name in place.whole.with_gradients for q in layer.parameters)
    return sizes
