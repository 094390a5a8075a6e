"""Rules for frozen weights in 4 or 8 bits. E0731, E0733; a weight that cannot be quantized is E0732, of the probe."""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.sharding import low_copy
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.calls import Pretrained
from dslc.dsl.language.job import JobSpec
from dslc.dsl.remedy import remedy, remove_argument, set_field


def check_quantization(job: JobSpec, layout: Layout | None) -> Iterator[Diagnostic]:
    """Checks `quantize` of the weights: an adapter trains, and the plan can hold weights of bytes."""
    start = job.model.start
    if start is None or start.quantize is None:
        return
    if job.model.adapter is None:
        yield Diagnostic(
            "E0731",
            f"`quantize = {start.quantize}` freezes the weights of dense layers, and no adapter trains",
            start.value_span("quantize"),
            help='`model.adapter = lora(16, ["q_proj", "v_proj"])`, by the names of the network\'s layers; or leave '
            "`quantize` out",
        )
    elif not job.model.has_user_network:
        yield Diagnostic(
            "E0733",
            "weights in 4 or 8 bits are those of `transformers(…)` and `python(…)` networks",
            start.value_span("quantize"),
            notes=(Note("the network", job.model.network_span),),
            help=remedy(remove_argument(start.span, "quantize"), "; or such a network"),
        )
    elif layout is not None:
        yield from _check_plan(job, layout, start)


def _check_plan(job: JobSpec, layout: Layout, start: Pretrained) -> Iterator[Diagnostic]:
    note = Note("the weights are quantized here", start.value_span("quantize"))
    if layout.sizes["tensor"] > 1:
        yield Diagnostic(
            "E0733",
            "weights in 4 or 8 bits are not cut over a tensor axis: numbers of several ranks share a scale",
            job.parallelism.value_span("tensor"),
            notes=(note,),
            help=remedy(set_field("parallelism.tensor", 1), ": `zero = 3` shards the weights over the data axis"),
        )
    if low_copy(job):
        yield Diagnostic(
            "E0733",
            "the low-precision copy of `O2` would round the scales of weights in 4 or 8 bits",
            job.train.value_span("precision"),
            notes=(note,),
            help=remedy(set_field("train.precision.level", "O1"), " multiplies in 16 bits as well"),
        )
