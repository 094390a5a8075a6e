"""Operations on numbers that ranks agree on: the divisor of the losses, a gradient's norm and its flag."""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.ir.actions import ALWAYS, Cadence, Payload
from dslc.compiler.operations.coordinate import Coordinate
from dslc.compiler.operations.moments import (
    BEFORE_PASSES,
    BEFORE_UPDATE,
    LAST_OUTPUT,
    LAST_OUTPUT_AHEAD,
    RankGroup,
    StepOperation,
    operation,
)
from dslc.compiler.placement.losses import has_forward_ahead
from dslc.compiler.placement.sharding import leaves_out_steps


def counts_of_samples(place: Coordinate) -> Iterator[StepOperation]:
    """Yields the sums over the data axis of the number of samples, or of losses, that each rank divides by."""
    layout, exchange, when = place.layout, place.sharding.exchange, ALWAYS
    if exchange is not None and not exchange.every:  # later no step waits for another rank
        when = Cadence(until=exchange.alone)
    if layout.sizes["data"] == 1 or when.until == 0:
        return
    data = place.along("data")
    if place.workload.counts == "kept":
        yield operation("all_reduce", Payload.KEPT_COUNT, data, BEFORE_PASSES, [8], dtype="int64", when=when)
    if place.workload.counts == "own" and layout.sizes["pipeline"] * layout.sizes["context"] == 1:
        yield operation("all_reduce", Payload.LOSS_COUNT, data, BEFORE_UPDATE, [8], dtype="float64", when=when)


def counts_of_experts(place: Coordinate) -> Iterator[StepOperation]:
    """Yields the sums of the tokens of each expert over the ranks that hold other tokens: of experts whose balance loss
    needs them before the first backward pass, and of experts whose bias follows them.
    """
    sizes = place.layout.sizes
    group = RankGroup(axis="data", ranks=sizes["data"] * sizes["context"], stride=place.layout.stride("context"))
    buffers = [buffer for layer in (place.layers if place.model.root is not None else ()) for buffer in layer.buffers]
    counted = LAST_OUTPUT_AHEAD if has_forward_ahead(place.job, place.layout) else LAST_OUTPUT
    for name, what, moment in (
        ("probability_sum", Payload.BALANCE_COUNTS, counted),
        ("e_score_correction_bias", Payload.EXPERT_COUNTS, BEFORE_UPDATE),
    ):
        experts = sum(buffer.shape[0] for buffer in buffers if buffer.name.endswith(name))
        if experts:
            yield operation("all_reduce", what, group, moment, [8 * experts], dtype="int64")


def over_all_ranks(place: Coordinate) -> Iterator[StepOperation]:
    """Yields the sums over the ranks that hold the gradients together: all, or a data axis that shards them."""
    wide = [axis for axis, size in place.layout.sizes.items() if size > 1]
    has_experts = place.sharding.experts > 1
    sharded = has_experts or (place.sharding.engine == "fsdp" and place.sharding.shards > 1)
    local = place.sharding.engine == "local"
    if not wide or (wide == ["data"] and not (sharded or local)):
        return
    if len(wide) > 1:
        group = RankGroup(axis="all", ranks=place.layout.world_size, stride=1)
    else:
        group = place.shards if wide == ["data"] and sharded and not has_experts else place.along(wide[0])
    if place.workload.counts == "own" and {"pipeline", "context"} & {*wide}:  # each rank knows a part of it
        yield operation("all_reduce", Payload.LOSS_COUNT, group, BEFORE_UPDATE, [8], dtype="float64")
    if place.job.train.clip_norm is not None and not local:
        yield operation("all_reduce", Payload.GRADIENT_NORM, group, BEFORE_UPDATE, [4])
    if leaves_out_steps(place.job):
        yield operation("all_reduce", Payload.NONFINITE, group, BEFORE_UPDATE, [4])
