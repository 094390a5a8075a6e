"""The operations of ZeroRedundancyOptimizer: DistributedDataParallel's, and a broadcast of what each rank updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.records import Weights
from dslc.compiler.operations.coordinate import Coordinate
from dslc.compiler.operations.ddp import ddp, trained_groups
from dslc.compiler.operations.moments import AFTER_UPDATE, StepOperation, operation
from dslc.compiler.placement.sharding import optimizer_groups, zero1_partition


def zero1(place: Coordinate, weights: Mapping[str, Weights]) -> Iterator[StepOperation]:
    """Yields the operations; nothing if no parameter trains."""
    yield from ddp(place, weights)
    if names := trained_groups(weights):
        sizes = [4 * numbers or 4 for numbers in updated_numbers(place)]
        yield operation("broadcast", Payload.PARAMETERS, place.along("data"), AFTER_UPDATE, sizes, weights=names)


def updated_numbers(place: Coordinate) -> list[int]:
    """Returns the numbers that each rank updates under ZeRO-1; torch sends one number for a rank that has none."""
    parameters = optimizer_groups(place.job, place.model, place.whole.trained)
    groups = [[q.count for q in group] for group in parameters]
    held = [0] * place.sharding.shards
    for sizes, owners in zip(groups, zero1_partition(groups, len(held)), strict=True):
        for size, owner in zip(sizes, owners, strict=True):
            held[owner] += size
    return held
