"""How long a step takes at the catalogue's speeds, and what share of them it uses.

A bound, not a promise: products at the peak rate, transfers at the link's, gradients exchanged behind the backward pass
and everything else in line. None where the catalogue knows no speed (CPUs).
"""

from __future__ import annotations

from dataclasses import dataclass

from dslc.compiler.cost import RankCost
from dslc.compiler.layout import Layout
from dslc.compiler.model import ModelGraph
from dslc.compiler.sharding import sharding_of
from dslc.dsl.job import JobSpec


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`step_time` in seconds; `mfu` is the model's FLOPs over what all devices could have done in that time."""

    step_time: float | None
    mfu: float | None


def estimate(job: JobSpec, layout: Layout, model: ModelGraph, costs: tuple[RankCost, ...], bubble: float) -> Estimate:
    hardware = layout.hardware
    peak = hardware.flops(job.train.precision.word)
    if peak is None or hardware.link is None or hardware.network is None:
        return Estimate(step_time=None, mfu=None)
    shards, slowest = sharding_of(job, layout).shards, 0.0
    for cost in costs:
        compute = cost.flops / peak
        hidden = exposed = 0.0
        for traffic in cost.traffic:
            speed = hardware.network if layout.crosses_nodes(traffic.axis) else hardware.link
            # Of an all-gather a rank hands in its own part, and takes in those of all.
            parts = shards if traffic.operation == "all_gather" and traffic.axis == "data" else 1
            seconds = traffic.bytes * parts / speed
            if traffic.axis == "data" and traffic.what in ("gradients", "parameters"):
                hidden += seconds
            else:
                exposed += seconds
        slowest = max(slowest, max(compute, hidden) + exposed)
    step_time = slowest / (1 - bubble)
    flops = job.data.batch * sum(layer.forward_flops + layer.backward_flops for layer in model.layers)
    return Estimate(step_time=step_time, mfu=flops / (step_time * peak * layout.world_size) if step_time else None)
