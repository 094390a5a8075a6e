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
    collective_name,
    layer_signature,
    loss_signature,
    merge_calibrations,
)
from dslc.compiler.placement.staging import Staging


def calibration_of(
    staging: Staging,
    costs: tuple[RankCost, ...],
    measured: Sequence[RankMeasurement],
    step: float | None,
    known: Calibration,
) -> Calibration:
    """Returns the times of the slowest rank, added to those `known` from other plans of the job, which stay.
    `step` is the time of the job's own step, if it was measured.
    """
    kind, model = arithmetic(staging), staging.model
    passes = [_slowest([rank.passes[at] for rank in measured]) for at in range(2)]
    layers: dict[str, list[LayerTime]] = {}
    for layer in model.of_a_rank:
        layers.setdefault(layer_signature(layer, kind), []).append(_layer_time(passes, layer.name))
    collectives = {}
    for exchanges in zip(*(rank.collectives for rank in measured), strict=True):
        first = exchanges[0]
        few, many = (max(rank.seconds[at] for rank in exchanges) for at in (0, 1))
        line = _line_through((first.bytes[0], few), (first.bytes[1], many))
        collectives[collective_name(first.operation, first.ranks, across=first.across)] = CollectiveTime(
            latency=line.fixed, byte=line.each
        )
    found = replace(
        known,
        layers={name: _mean(times) for name, times in layers.items()},
        losses={loss_signature(staging.job.model.loss.word, model.output, kind): _layer_time(passes, "")},
        updates={update_of(staging): max(rank.update / max(1, rank.parameters) for rank in measured)},
        collectives=collectives,
        data={source_of(staging): max(rank.data for rank in measured)},
        overlap={network_of(staging): min(rank.overlap for rank in measured)},
    )
    return _fitted(staging, costs, merge_calibrations(found, known), step, known)


def _fitted(
    staging: Staging, costs: tuple[RankCost, ...], calibration: Calibration, step: float | None, known: Calibration
) -> Calibration:
    """Returns the calibration by which the job's own step takes as long as it did.

    What the step took beyond its parts is its `rest`. A step that took less than its parts shows that these were
    measured beside other work: the times of layers that were not `known` are scaled down, to half of them at most.
    """
    calibration = replace(calibration, rest={**known.rest, rest_of(staging): 0.0})
    hardware = replace(staging.layout.hardware, calibration=calibration)
    predicted = estimate(replace(staging, layout=replace(staging.layout, hardware=hardware)), costs)
    if step is None or predicted.step_time is None:
        return calibration
    beyond = step - predicted.step_time
    if beyond >= 0 or not predicted.arithmetic:
        return replace(calibration, rest={**known.rest, rest_of(staging): max(0.0, beyond)})
    factor = max(0.5, 1 + beyond / predicted.arithmetic)
    return replace(
        calibration,
        layers={name: _scaled(time, factor) for name, time in calibration.layers.items()} | dict(known.layers),
        losses={name: _scaled(time, factor) for name, time in calibration.losses.items()} | dict(known.losses),
    )


def _scaled(time: LayerTime, factor: float) -> LayerTime:
    forward, backward = (
        PassTime(fixed=factor * each.fixed, each=factor * each.each) for each in (time.forward, time.backward)
    )
    return LayerTime(forward=forward, backward=backward)


def _slowest(ranks: Sequence[tuple[int, Passes]]) -> tuple[int, Passes]:
    """Returns the passes of the rank that takes longest."""
    return max(ranks, key=lambda sized: sum(map(sum, sized[1].values())))


def _layer_time(passes: Sequence[tuple[int, Passes]], name: str) -> LayerTime:
    one, other = ((samples, by_layer.get(name, (0.0, 0.0))) for samples, by_layer in passes)
    forward, backward = (_line_through((one[0], one[1][way]), (other[0], other[1][way])) for way in (0, 1))
    return LayerTime(forward=forward, backward=backward)


def _line_through(one: tuple[int, float], other: tuple[int, float]) -> PassTime:
    """Returns the line through two measurements; through the larger alone and zero, where it would begin below zero."""
    (few, short), (many, long) = sorted((one, other))
    each = max(0.0, (long - short) / (many - few))
    fixed = long - each * many
    return PassTime(fixed=fixed, each=each) if fixed >= 0 else PassTime(fixed=0.0, each=long / many)


def _mean(times: Sequence[LayerTime]) -> LayerTime:
    def mean(passes: Sequence[PassTime]) -> PassTime:
        return PassTime(fixed=fmean(each.fixed for each in passes), each=fmean(each.each for each in passes))

    return LayerTime(forward=mean([each.forward for each in times]), backward=mean([each.backward for each in times]))
