"""Rules for optimizers of the language whose update of a number depends on others. E0723."""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.sharding import sharding_of
from dslc.compiler.rules.parallelism.sharding import or_else, sharding_span
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.job import JobSpec
from dslc.dsl.remedy import remedy


def check_coupling(job: JobSpec, layout: Layout) -> Iterator[Diagnostic]:
    """Reports plans under which a rank has parts of parameters that the optimizer needs whole."""
    optimizer, sharding = job.train.optimizer, sharding_of(job, layout)
    is_cut = (sharding.engine == "fsdp" and sharding.shards > 1) or layout.sizes["tensor"] > 1
    if not optimizer.coupling or not is_cut:
        return
    has_tensor_axis = layout.sizes["tensor"] > 1
    yield Diagnostic(
        "E0723",
        f"`{optimizer.word}` needs whole parameters, and ranks would have parts of them: {optimizer.coupling}",
        job.parallelism.value_span("tensor") if has_tensor_axis else sharding_span(job, layout),
        notes=(Note("the optimizer", job.train.value_span("optimizer")),),
        help=remedy("`adamw` and `lion` treat each number alone", or_else(job, layout, "none", "ddp", "zero1")),
    )
