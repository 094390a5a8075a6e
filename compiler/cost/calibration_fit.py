"""Makes a calibration of what ranks measured for `dslc calibrate`: times of passes, of a fixed part and of each sample.

Model: passes were measured at two sizes of a micro-batch, collectives with few and with many bytes; a line goes through
both. Layers with the same signature share their mean. What a whole step of the job took beyond its parts is its `rest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from dslc.compiler.cost.cost import RankCost
from dslc.compiler.cost.estimate import estimate
from dslc.compiler.cost.measured_times import arithmetic, network_of, rest_of, source_of, update_of
from dslc.compiler.facts.calibration import (
    Calibration,
    CollectiveTime,
    LayerTime,
    Passes,
    PassTime,
    RankMeasurement,
    RestTime,
    collective_name,
    layer_signature,
    loss_signature,
    merge_calibrations,
)
from dslc.compiler.placement.staging import Staging


def calibration_of(
    staging: Staging,
    costs: tuple[RankCost, ...],
    measurements: Sequence[RankMeasurement],
    step: float | None,
    known_times: Calibration,
) -> Calibration:
    """Returns the times of the slowest rank, added to those `known_times` from other plans of the job, which stay.
    `step` is the time of the job's own step, if it was measured.
    """
    kind, model = arithmetic(staging), staging.model
    passes = [_slowest([rank.passes[size] for rank in measurements]) for size in range(2)]
    layers: dict[str, list[LayerTime]] = {}
    for layer in model.of_a_rank:
        layers.setdefault(layer_signature(layer, kind), []).append(_layer_time(passes, layer.name))
    collectives = {}
    for exchanges in zip(*(rank.collectives for rank in measurements), strict=True):
        exchange = exchanges[0]
        few, many = (max(rank.seconds[size] for rank in exchanges) for size in (0, 1))
        line = _line_through((exchange.bytes[0], few), (exchange.bytes[1], many))
        name = collective_name(exchange.operation, exchange.ranks, staging.layout.backend, across=exchange.across)
        collectives[name] = CollectiveTime(latency=line.fixed, byte=line.each)
    calibration = replace(
        known_times,
        layers={name: _mean(times) for name, times in layers.items()},
        losses={loss_signature(staging.job.model.loss.word, model.output, kind): _layer_time(passes, "")},
        updates={update_of(staging): max(rank.update / max(1, rank.parameters) for rank in measurements)},
        collectives=collectives,
        data={source_of(staging): max(rank.data for rank in measurements)},
        overlap={network_of(staging): min(rank.overlap for rank in measurements)},
    )
    return with_rest(staging, costs, merge_calibrations(calibration, known_times), step, known_times)


def with_rest(
    staging: Staging,
    costs: tuple[RankCost, ...],
    calibration: Calibration,
    step: float | None,
    known_times: Calibration,
) -> Calibration:
    """Returns the calibration by which the job's own step takes as long as it did.

    What the step took beyond its parts is its `rest`; a second number of micro-batches tells what each one adds. A step
    that took less than its parts shows that these were measured beside other work: the times of layers without
    `known_times` are scaled down, to half of them at most.
    """
    name, microbatches = rest_of(staging), staging.layout.microbatches
    rests = {**known_times.rest, name: RestTime(microbatches=microbatches, seconds=0.0)}
    calibration = replace(calibration, rest=rests)
    hardware = replace(staging.layout.hardware, calibration=calibration)
    predicted = estimate(replace(staging, layout=replace(staging.layout, hardware=hardware)), costs)
    if step is None or predicted.step_time is None:
        return calibration
    excess, earlier = step - predicted.step_time, known_times.rest.get(name)
    if earlier is not None and earlier.microbatches != microbatches:
        return replace(calibration, rest=rests | {name: earlier.extended(microbatches, excess)})
    if excess >= 0 or not predicted.arithmetic:
        rest = RestTime(microbatches=microbatches, seconds=max(0.0, excess))
        return replace(calibration, rest=rests | {name: rest})
    factor = max(0.5, 1 + excess / predicted.arithmetic)
    return replace(
        calibration,
        layers={name: _scaled(time, factor) for name, time in calibration.layers.items()} | dict(known_times.layers),
        losses={name: _scaled(time, factor) for name, time in calibration.losses.items()} | dict(known_times.losses),
    )


def _scaled(time: LayerTime, factor: float) -> LayerTime:
    forward, backward = (
        PassTime(fixed=factor * time_of_pass.fixed, each=factor * time_of_pass.each)
        for time_of_pass in (time.forward, time.backward)
    )
    return LayerTime(forward=forward, backward=backward)


def _slowest(ranks: Sequence[tuple[int, Passes]]) -> tuple[int, Passes]:
    """Returns the passes of the rank that takes longest."""
    return max(ranks, key=lambda sized: sum(map(sum, sized[1].values())))


def _layer_time(passes: Sequence[tuple[int, Passes]], name: str) -> LayerTime:
    one, another = ((samples, by_layer.get(name, (0.0, 0.0))) for samples, by_layer in passes)
    forward, backward = (_line_through((one[0], one[1][way]), (another[0], another[1][way])) for way in (0, 1))
    return LayerTime(forward=forward, backward=backward)


def _line_through(one: tuple[int, float], another: tuple[int, float]) -> PassTime:
    """Returns the line through two measurements; through the larger alone and zero, where it would begin below zero."""
    (few, short), (many, long) = sorted((one, another))
    slope = max(0.0, (long - short) / (many - few))
    fixed = long - slope * many
    return PassTime(fixed=fixed, each=slope) if fixed >= 0 else PassTime(fixed=0.0, each=long / many)


def _mean(times: Sequence[LayerTime]) -> LayerTime:
    def mean(passes: Sequence[PassTime]) -> PassTime:
        return PassTime(
            fixed=fmean(pass_time.fixed for pass_time in passes), each=fmean(pass_time.each for pass_time in passes)
        )

    return LayerTime(
        forward=mean([layer_time.forward for layer_time in times]),
        backward=mean([layer_time.backward for layer_time in times]),
    )
