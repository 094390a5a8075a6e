"""Rules for what torch's `fully_shard` cannot hold. E0720 to E0729."""

from __future__ import annotations

from dslc.compiler.facts import ModelFacts
from dslc.compiler.layout import Layout
from dslc.compiler.nodes import ModelGraph
from dslc.compiler.sharding import sharding_of, trained
from dslc.dsl.diagnostics import Note, Report
from dslc.dsl.job import JobSpec
from dslc.dsl.source import Span


def check_own_model(job: JobSpec, layout: Layout, facts: ModelFacts, model: ModelGraph, report: Report) -> None:
    """What a traced module has that cannot be shared out."""
    engine = sharding_of(job, layout).engine
    if engine == "fsdp":
        _check_numbers(job, facts, report)
    if engine in ("fsdp", "zero1"):
        _check_dtypes(job, facts, model, report)


def _check_dtypes(job: JobSpec, facts: ModelFacts, model: ModelGraph, report: Report) -> None:
    """torch's ZeroRedundancyOptimizer and the units of `fully_shard` take parameters of one dtype."""
    dtypes = dict(facts.dtypes)
    found: dict[str, str] = {}  # of each dtype a parameter
    for name in sorted(trained(job, model)):
        found.setdefault(dtypes.get(name, "float32"), name)
    if len(found) > 1:
        report.add(
            "E0721",
            "parameters that train have to be of one dtype to be sharded: "
            + ", ".join(f"`{name}` is {dtype}" for dtype, name in found.items()),
            _asked_by(job),
            notes=[Note(message="the network", span=job.model.at("network"))],
            help="make them of one dtype, or freeze one kind of them; or " + _instead(job, zero=0),
        )


def _asked_by(job: JobSpec) -> Span | None:
    """What has the parameters sharded."""
    return job.parallelism.at("zero") if job.parallelism.zero else job.train.at("precision")


def _instead(job: JobSpec, *, zero: int) -> str:
    return f"`zero = {zero}`" if job.parallelism.zero else "`level = O1`"


def _check_numbers(job: JobSpec, facts: ModelFacts, report: Report) -> None:
    """What has no rows to be cut into."""
    numbers = [name for name, shape, _ in facts.parameters if not shape]
    if not numbers:
        return
    report.add(
        "E0720",
        f"the parameter `{numbers[0]}` is a single number without a dimension, which has no rows to be shared out",
        _asked_by(job),
        label=f"{len(numbers)} such parameters" if len(numbers) > 1 else "",
        notes=[Note(message="the network", span=job.model.at("network"))],
        help="give it one: `nn.Parameter(torch.ones(1))`; or " + _instead(job, zero=1),
    )
