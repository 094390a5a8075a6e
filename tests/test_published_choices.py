"""The choices of plans among published runs, and what they rest on: benchmarks/published_choices.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.published import Run, read_runs
from benchmarks.published_choices import LayerKind, choices, layer_seconds, off_the_line, seconds_with_factors

RUNS = [run for run in read_runs() if run.source == "VIA-Research/vTrain"]


def test_a_choice_counts_if_it_is_within_a_tenth_of_the_fastest() -> None:
    plans = [replace(RUNS[0], microbatch=size) for size in (1, 2, 4)]
    runs = [replace(run, seconds=seconds) for run, seconds in zip(plans, (1.0, 1.05, 1.5), strict=True)]
    assert choices(runs, [1.0, 0.9, 2.0]).slower == pytest.approx([0.05])
    assert choices(runs, [1.0, 0.9, 2.0]).good == 1 and choices(runs, [1.0, 0.9, 0.8]).good == 0
    assert choices(runs[:2], [1.0, 0.9]).slower == () and choices(runs[:2], [1.0, 0.9], least_plans=2).good == 1


def test_published_times_themselves_choose_the_fastest_plan_of_136_jobs() -> None:
    slower = choices(RUNS, [run.seconds for run in RUNS]).slower
    assert len(slower) == 136 and max(slower) == 0


def test_a_layer_takes_the_slope_over_depth_on_each_turn_of_a_pipeline() -> None:
    def run(layers: int, microbatches: int) -> Run:
        batch = 2 * microbatches
        turns = layers / 4 * (microbatches + 3)
        like = replace(RUNS[0], layers=layers, tensor=1, pipeline=4, gpus=4, microbatch=2, batch=batch)
        return replace(like, seconds=0.5 + 0.003 * turns)

    runs = [run(layers, microbatches) for layers in (12, 16, 24) for microbatches in (4, 8)]
    kind = LayerKind.of(runs[0])
    layers = layer_seconds(runs)
    assert layers == pytest.approx({kind: 0.003}) and off_the_line(runs).max() < 1e-9
    doubled = seconds_with_factors(runs, layers, {kind: 2.0})
    assert doubled - 0.5 == pytest.approx(2 * (np.array([each.seconds for each in runs]) - 0.5))
