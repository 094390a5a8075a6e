"""A calibration follows from what ranks measured: compared with a calculation by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.job_texts import job_text
from helpers.planning import compiled

from dslc.compiler.cost.calibration_fit import calibration_of, with_rest
from dslc.compiler.cost.estimate import estimate
from dslc.compiler.facts.calibration import (
    Calibration,
    CollectiveMeasurement,
    PassTime,
    RankMeasurement,
    layer_signature,
)
from dslc.compiler.rules.analysis import Analysis

JOB = job_text(
    model={"network": "[flatten(), linear(10), linear(10), linear(10)]", "loss": "cross_entropy()"},
    data={"source": "digits()", "batch": 16},
    devices={"cpus": 2},
    train={"steps": 2, "optimizer": "sgd(lr = 0.1)"},
    log=None,
)
MACHINE = Calibration(machine="made", torch="2.13", processes=2, cores=2)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "gather", "reduce")
FLAT, LINEAR, LOSS = (0.5, 0.0), (2.0, 4.0), (1.0, 1.0)


@pytest.fixture
def analysis(tmp_path: Path) -> Analysis:
    (tmp_path / "job.plt").write_text(JOB)
    return compiled(tmp_path / "job.plt").analysis


def measurement(slower: float = 1.0) -> RankMeasurement:
    """Returns what a rank measured: passes over 4 samples took half of what 8 took, but for 0.5 s of each `linear`."""
    large = {"0": FLAT, "1": LINEAR, "2": LINEAR, "3": (2.4, 4.4), "": LOSS}
    small = {"0": (0.25, 0.0), "1": (1.25, 2.25), "2": (1.25, 2.25), "3": (1.45, 2.45), "": (0.5, 0.5)}
    return RankMeasurement(
        passes=tuple(
            (samples, {name: (slower * ahead, slower * back) for name, (ahead, back) in passes.items()})
            for samples, passes in ((8, large), (4, small))
        ),
        update=0.5 * slower,
        parameters=870,
        data=0.0,
        collectives=tuple(
            CollectiveMeasurement(operation=each, ranks=2, bytes=(1000, 3000), seconds=(0.2 * slower, 0.4 * slower))
            for each in OPERATIONS
        ),
        overlap=0.25 / slower,
    )


def test_lines_go_through_the_slowest_ranks_times(analysis: Analysis) -> None:
    assert analysis.staging is not None
    found = calibration_of(analysis.staging, analysis.costs, [measurement(), measurement(2.0)], None, MACHINE)
    flat, first, *_ = analysis.staging.model.layers
    of_flat, of_first = (found.layers[layer_signature(layer, "fp32")] for layer in (flat, first))
    assert (of_flat.forward, of_flat.backward) == (PassTime(fixed=0, each=0.125), PassTime(fixed=0, each=0))
    assert of_first.forward == PassTime(fixed=1.0, each=0.375)  # twice 0.5 and 1.5 / 8
    assert found.collectives["all_reduce 2"].byte == pytest.approx(2e-4)
    assert found.collectives["all_reduce 2"].latency == pytest.approx(0.2)
    assert found.updates == {"sgd": pytest.approx(1.0 / 870)} and list(found.overlap.values()) == [0.125]


def test_layers_that_are_alike_share_their_mean(analysis: Analysis) -> None:
    assert analysis.staging is not None
    found = calibration_of(analysis.staging, analysis.costs, [measurement(), measurement()], None, MACHINE)
    _, first, second, third = analysis.staging.model.layers
    names = [layer_signature(layer, "fp32") for layer in (first, second, third)]
    assert names[0] != names[1] == names[2]
    assert found.layers[names[1]].forward.seconds(8) == pytest.approx((2.0 + 2.4) / 2)


def test_what_a_step_took_beyond_its_parts_is_its_rest(analysis: Analysis) -> None:
    """So the job itself is predicted as it was measured."""
    staging, costs = analysis.staging, analysis.costs
    assert staging is not None
    found = calibration_of(staging, costs, [measurement(), measurement()], 100.0, MACHINE)
    hardware = replace(staging.layout.hardware, calibration=found)
    again = estimate(replace(staging, layout=replace(staging.layout, hardware=hardware)), costs)
    assert again.source == "measured" and 0 < max(rest.seconds for rest in found.rest.values()) < 100
    assert again.step_time == pytest.approx(100.0)
    unknown = calibration_of(staging, costs, [measurement(), measurement()], None, MACHINE)
    assert [rest.seconds for rest in unknown.rest.values()] == [0]


def test_two_numbers_of_micro_batches_tell_what_each_adds(analysis: Analysis) -> None:
    """So both steps are predicted as they were measured, and times that are known stay."""
    staging, costs = analysis.staging, analysis.costs
    assert staging is not None
    known = calibration_of(staging, costs, [measurement()] * 2, 100.0, MACHINE)
    halves = replace(staging, layout=replace(staging.layout, microbatches=4))
    found = with_rest(halves, costs, known, 130.0, known)
    assert found.layers == known.layers and max(rest.each for rest in found.rest.values()) > 0
    for plan, step in ((staging, 100.0), (halves, 130.0)):
        hardware = replace(staging.layout.hardware, calibration=found)
        again = estimate(replace(plan, layout=replace(plan.layout, hardware=hardware)), costs)
        assert again.step_time == pytest.approx(step)


def test_a_step_that_took_less_than_its_parts_scales_them_down(analysis: Analysis) -> None:
    staging, costs = analysis.staging, analysis.costs
    assert staging is not None
    parts, found = (calibration_of(staging, costs, [measurement()] * 2, step, MACHINE) for step in (None, 20.0))
    name = layer_signature(staging.model.layers[1], "fp32")
    assert 0.5 < found.layers[name].forward.each / parts.layers[name].forward.each < 1
    hardware = replace(staging.layout.hardware, calibration=found)
    again = estimate(replace(staging, layout=replace(staging.layout, hardware=hardware)), costs)
    assert again.step_time == pytest.approx(20.0) and [rest.seconds for rest in found.rest.values()] == [0]


def test_a_line_that_would_begin_below_zero_begins_at_zero(analysis: Analysis) -> None:
    assert analysis.staging is not None
    one = measurement()
    steep = tuple(replace(each, seconds=(0.1, 0.9)) for each in one.collectives)
    found = calibration_of(analysis.staging, analysis.costs, [replace(one, collectives=steep)] * 2, None, MACHINE)
    line = found.collectives["all_reduce 2"]
    assert line.latency == 0 and line.byte == pytest.approx(3e-4)
