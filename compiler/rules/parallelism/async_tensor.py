"""The rule for asynchronous tensor parallelism: torch compiles it, on GPUs, for pieces of the sequence. E0447."""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.tensor_plan import TensorPlan
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import Block
from dslc.dsl.remedy import Help, remedy, remove_field, set_field
from dslc.dsl.source import Span
from dslc.dsl.words import plural


def check_async_tensor(job: JobSpec, layout: Layout, cuts: TensorPlan | None) -> Iterator[Diagnostic]:
    """Reports `async_tensor` where it would do nothing."""
    if not job.parallelism.async_tensor:
        return
    for reason, place, help in _excluded(job, layout, cuts):
        yield Diagnostic(
            "E0447",
            f"`parallelism.async_tensor` would do nothing: {reason}",
            job.parallelism.value_span("async_tensor"),
            notes=() if place is None else (Note("set here", place),),
            help=remedy(help, ", or ", remove_field("parallelism.async_tensor", "leave it out")),
        )
        return


def _excluded(job: JobSpec, layout: Layout, cuts: TensorPlan | None) -> Iterator[tuple[str, Span | None, Help]]:
    """Yields what excludes it with the reason, its place, and what to do."""
    parallelism = job.parallelism
    if layout.sizes["tensor"] == 1:
        yield "there is no tensor axis", None, remedy(set_field("parallelism.tensor", 2))
    if layout.device == "cpu":
        reason = "torch exchanges pieces through memory that GPUs share, and these ranks are on CPUs"
        yield reason, _span(job.devices, "cpus"), remedy("`gpus` in place of `cpus`")
    if layout.crosses_nodes("tensor"):
        reason = "its ranks are on several nodes, and torch exchanges pieces through memory that GPUs of one node share"
        most = plural(layout.processes, "GPU")
        yield reason, _span(parallelism, "tensor"), remedy(f"a tensor axis within the {most} of a node")
    if not job.train.compile:
        reason = "torch's compiler pairs exchanges with products, and nothing is compiled"
        yield reason, _span(job.train, "compile"), remedy(set_field("train.compile", "true"))
    if not layout.sequence:
        reason = "torch pairs gathers and scatters of pieces of the sequence with products, and not sums of whole ones"
        yield reason, _span(parallelism, "sequence"), remedy(set_field("parallelism.sequence", "true"))
    elif cuts is not None and not cuts.sequence:
        reason = "no layer of this network works on pieces of the sequence"
        yield reason, job.model.value_span("network"), remedy("`gpt(…)`, `llama(…)`, or layers with attention")


def _span(block: Block, field: str) -> Span | None:
    """Returns the place of a field that the job sets."""
    return block.value_span(field) if block.is_set(field) else None
