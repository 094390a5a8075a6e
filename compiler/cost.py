"""What a step costs one rank: bytes held (`account`), bytes moved (`traffic`), and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from dslc.compiler.account import MemoryNode, account
from dslc.compiler.layout import Layout
from dslc.compiler.nodes import ModelGraph
from dslc.compiler.schedules import ScheduleTable
from dslc.compiler.sharding import recomputed
from dslc.compiler.tensor_plan import TensorPlan
from dslc.compiler.traffic import TrafficNode, place_of, traffic
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
    plan: TensorPlan,
) -> RankCost:
    """The account of the ranks at one pipeline coordinate; `plan` cuts the model over the tensor axis."""
    place = place_of(job, layout, workload, model, stages, schedule, pipeline, plan)
    memory = account(job, layout, workload, model, stages, schedule, pipeline)
    blocks = set(recomputed(job, model)) if job.memory.recompute != "selective" else set()
    layers = [model.of_a_rank[n] for stage in place.mine for n in stages[stage]]
    again = sum(layer.forward_flops for layer in layers if layer.name in blocks)
    flops = sum(layer.forward_flops + layer.backward_flops for layer in layers) + again
    share = flops * workload.share // layout.sizes["context"]
    return RankCost(memory=memory, traffic=tuple(traffic(place)), flops=share)
