"""The cost of a step on one rank: bytes held (account.py), bytes moved (the sums of its operations), and arithmetic."""

from __future__ import annotations

from functools import cached_property

from dslc.compiler.cost.account import account
from dslc.compiler.ir.actions import TrafficNode
from dslc.compiler.ir.memory import MemoryNode
from dslc.compiler.operations.coordinate import place_of
from dslc.compiler.operations.moments import StepOperation, traffic
from dslc.compiler.operations.step import operations
from dslc.compiler.placement.cross_sample_losses import makes_outputs_ahead
from dslc.compiler.placement.sharding import recomputed
from dslc.compiler.placement.staging import Staging
from dslc.dsl.record import Record, record


@record
class RankCost(Record):
    """The cost of the ranks of one pipeline coordinate."""

    memory: MemoryNode
    operations: tuple[StepOperation, ...]
    flops: int  # of one step, on one rank, including recomputation

    @cached_property
    def traffic(self) -> tuple[TrafficNode, ...]:
        return traffic(self.operations)


def rank_costs(staging: Staging) -> tuple[RankCost, ...]:
    """Returns the cost of all ranks, by pipeline coordinate."""
    return tuple(_rank_cost(staging, p) for p in range(staging.layout.sizes["pipeline"]))


def _rank_cost(staging: Staging, pipeline: int) -> RankCost:
    job, model = staging.job, staging.model
    blocks = set(recomputed(job, model)) if job.memory.recompute != "selective" else set()
    layers = [model.of_a_rank[n] for stage in staging.stages_of(pipeline) for n in staging.stages[stage]]
    recomputed_flops = sum(layer.forward_flops for layer in layers if layer.name in blocks)
    if makes_outputs_ahead(job, staging.layout):
        recomputed_flops += sum(layer.forward_flops for layer in layers)
    flops = sum(layer.forward_flops + layer.backward_flops for layer in layers) + recomputed_flops
    share = flops * staging.workload.share // staging.layout.sizes["context"]
    rank_operations = operations(place_of(staging, pipeline))
    return RankCost(memory=account(staging, pipeline), operations=rank_operations, flops=share)
