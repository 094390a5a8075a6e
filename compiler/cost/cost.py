"""The cost of a step on one rank: bytes held (account.py), bytes moved (the sums of its operations), and arithmetic."""

from __future__ import annotations

from dataclasses import field, replace
from functools import cached_property

from dslc.compiler.cost.account import account
from dslc.compiler.cost.rank_stages import LayerSizes
from dslc.compiler.ir.actions import TrafficNode
from dslc.compiler.ir.memory import MemoryNode
from dslc.compiler.operations.coordinate import place_of
from dslc.compiler.operations.moments import StepOperation, traffic
from dslc.compiler.operations.step import operations
from dslc.compiler.placement.losses import has_forward_ahead
from dslc.compiler.placement.sharding import recomputed
from dslc.compiler.placement.shares import largest
from dslc.compiler.placement.staging import Staging
from dslc.dsl.record import Record, record


@record
class RankCost(Record):
    """The cost of the ranks of one pipeline coordinate. Each part is computed when it is first read, as a search reads
    the memory of many plans and the rest of few.
    """

    staging: Staging
    pipeline: int
    sizes: LayerSizes = field(compare=False, repr=False)

    @cached_property
    def memory(self) -> MemoryNode:
        return account(self.staging, self.pipeline, self.sizes)

    def memory_of_share(self, samples: int) -> MemoryNode:
        """Returns the memory of ranks that take fewer samples of a batch than the largest share has."""
        staging = self.staging
        rows = staging.job.data.rows
        microbatch = largest(samples, staging.layout.microbatches)
        workload = replace(staging.workload, share=rows * samples, microbatch=rows * microbatch)
        smaller = replace(staging, workload=workload)
        return account(smaller, self.pipeline, LayerSizes(smaller))

    @cached_property
    def even_memory(self) -> MemoryNode | None:
        """The memory for an even routing of tokens to experts; None if the job states no other."""
        model = self.staging.model
        if not model.even:
            return None
        even = replace(self.staging, model=replace(model, shared=model.even, even=()))
        return account(even, self.pipeline, LayerSizes(even))

    @cached_property
    def operations(self) -> tuple[StepOperation, ...]:
        return operations(place_of(self.staging, self.pipeline))

    @cached_property
    def traffic(self) -> tuple[TrafficNode, ...]:
        return traffic(self.operations)

    @cached_property
    def flops(self) -> int:
        """The arithmetic of one step on one rank, with recomputation."""
        staging = self.staging
        job, model = staging.job, staging.model
        blocks = set(recomputed(job, model)) if job.memory.recompute != "selective" else set()
        layers = [model.of_a_rank[n] for stage in staging.stages_of(self.pipeline) for n in staging.stages[stage]]
        if staging.chunked_head is not None:
            blocks.add(staging.chunked_head.module)
        recomputed_flops = sum(layer.forward_flops for layer in layers if layer.name in blocks)
        if has_forward_ahead(job, staging.layout):
            recomputed_flops += sum(layer.forward_flops for layer in layers)
        flops = sum(layer.forward_flops + layer.backward_flops for layer in layers) + recomputed_flops
        return flops * staging.workload.share // staging.layout.sizes["context"]


def rank_costs(staging: Staging) -> tuple[RankCost, ...]:
    """Returns the cost of all ranks, by pipeline coordinate."""
    sizes = LayerSizes(staging)
    return tuple(RankCost(staging=staging, pipeline=p, sizes=sizes) for p in range(staging.layout.sizes["pipeline"]))
