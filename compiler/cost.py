"""What a step costs one rank: bytes held (`account`), bytes moved (`traffic`), and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from dslc.compiler.account import MemoryNode, account
from dslc.compiler.layout import Layout
from dslc.compiler.nodes import ModelGraph
from dslc.compiler.schedules import ScheduleTable
from dslc.compiler.sharding import recomputed
from dslc.compiler.traffic import TrafficNode, traffic
from dslc.compiler.workload import Workload
from dslc.dsl.job import JobSpec


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """The account of the ranks of one pipeline coordinate."""

    memory: MemoryNode
    traffic: tuple[TrafficNode, ...]
    flops: int  # of one step, on one rank, what is computed again included


def rank_cost(
    job: JobSpec,
    layout: Layout,
    workload: Workload,
    model: ModelGraph,
    stages: tuple[range, ...],
    schedule: ScheduleTable | None,
    pipeline: int,
) -> RankCost:
    """The account of the ranks at one pipeline coordinate."""
    mine = [i for i, rank in enumerate(_placement(stages, schedule)) if rank == pipeline]
    layers = [[model.layers[n] for n in stages[i]] for i in mine]
    flat = [layer for stage in layers for layer in stage]
    memory = account(job, layout, workload, model, stages, schedule, pipeline)
    microbatches, share = layout.microbatches, workload.share
    blocks = set(recomputed(job, model)) if job.memory.recompute != "selective" else set()
    again = sum(layer.forward_flops for layer in flat if layer.name in blocks)
    flops = sum(layer.forward_flops + layer.backward_flops for layer in flat) + again
    split = layout.sizes["tensor"] * layout.sizes["context"]
    return RankCost(
        memory=memory,
        traffic=tuple(traffic(job, layout, workload, model, stages, mine, flat, microbatches)),
        flops=flops * share // split,
    )


def _placement(stages: tuple[range, ...], schedule: ScheduleTable | None) -> tuple[int, ...]:
    return schedule.placement if schedule else (0,) * len(stages)
