"""Rules for what torch's `fully_shard` cannot hold. E0720 to E0729."""

from __future__ import annotations

from dslc.compiler.facts import ModelFacts
from dslc.compiler.layout import Layout
from dslc.compiler.sharding import sharding_of
from dslc.dsl.diagnostics import Note, Report
from dslc.dsl.job import JobSpec


def check_own_model(job: JobSpec, layout: Layout, facts: ModelFacts, report: Report) -> None:
    """What a traced module has that cannot be cut into rows."""
    numbers = [name for name, shape, _ in facts.parameters if not shape]
    if not numbers or sharding_of(job, layout).engine != "fsdp":
        return
    by_zero = job.parallelism.zero > 0
    report.add(
        "E0720",
        f"the parameter `{numbers[0]}` is a single number without a dimension, which has no rows to be shared out",
        job.parallelism.at("zero") if by_zero else job.train.at("precision"),
        label=f"{len(numbers)} such parameters" if len(numbers) > 1 else "",
        notes=[Note(message="the network", span=job.model.at("network"))],
        help="give it one: `nn.Parameter(torch.ones(1))`; or " + ("`zero = 1`" if by_zero else "`level = O1`"),
    )
