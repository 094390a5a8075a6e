"""Rules for the parts of parameters and of moments that optimizers of the language allow a rank to have.
E0723, E0737.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from dslc.compiler.ir.nodes import ModelGraph, ParameterNode
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.sharding import offloaded, sharding_of, trained
from dslc.compiler.rules.parallelism.sharding import or_else, sharding_span
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.optimizers import BLOCK, keeps_codes
from dslc.dsl.remedy import Edit, remedy, set_field
from dslc.dsl.source import Span


def check_coupling(job: JobSpec, layout: Layout) -> Iterator[Diagnostic]:
    """Reports plans under which a rank has parts of parameters that the optimizer needs whole."""
    optimizer, sharding = job.train.optimizer, sharding_of(job, layout)
    is_cut = (sharding.engine == "fsdp" and sharding.shards > 1) or layout.sizes["tensor"] > 1 or sharding.experts > 1
    if not optimizer.coupling or not is_cut:
        return
    has_tensor_axis = layout.sizes["tensor"] > 1
    yield Diagnostic(
        "E0723",
        f"`{optimizer.word}` needs whole parameters, and ranks would have parts of them: {optimizer.coupling}",
        job.parallelism.value_span("tensor" if has_tensor_axis else "expert")
        if has_tensor_axis or sharding.experts > 1
        else sharding_span(job, layout),
        notes=(Note("the optimizer", job.train.value_span("optimizer")),),
        help=remedy(
            "`adamw` and `lion` treat each number alone",
            or_else(job, layout, "none", "ddp", "zero1", copies=not has_tensor_axis),
        ),
    )


def check_codes(job: JobSpec, layout: Layout, model: ModelGraph | None) -> Iterator[Diagnostic]:
    """Reports plans under which moments in 8 bits would differ from one process, or could not be kept."""
    optimizer, sharding = job.train.optimizer, sharding_of(job, layout)
    if not optimizer.has_codes:
        return
    refusals = list[tuple[str, Span | None, str | Edit | None]]()
    if getattr(optimizer, "amsgrad", False):
        reason = "torchao compares no codes, which `amsgrad` does"
        refusals.append((reason, optimizer.value_span("amsgrad"), set_field("train.optimizer.amsgrad", "false")))
    moved, exchange = offloaded(job, layout), sharding.exchange
    if "optimizer" in moved and "parameters" not in moved:
        offload_both = set_field("memory.offload", "[optimizer, parameters]")
        refusals.append(
            ("they cannot be offloaded without the parameters", job.memory.value_span("offload"), offload_both)
        )
    if exchange is not None and exchange.differ:
        reason = "this exchange leaves each rank other moments, and a checkpoint keeps their mean, which codes have not"
        refusals.append((reason, job.parallelism.value_span("gradients"), None))
    if layout.sizes["tensor"] > 1:
        reason = f"the tensor axis cuts rows, and with them blocks of {BLOCK} numbers"
        refusals.append((reason, job.parallelism.value_span("tensor"), None))
    elif model is not None and sharding.engine == "fsdp" and sharding.shards * sharding.experts > 1:
        names = trained(job, model)
        parameters = [q for layer in model.layers for q in layer.parameters if q.name in names]
        cut = next((q for q in parameters if _cuts_blocks(q.shape, sharding.parts_of(q))), None)
        small = next((q for q in parameters if q.experts and _has_other_codes(q, sharding.experts)), None)
        if cut is not None:
            shape = " x ".join(map(str, cut.shape))
            reason = (
                f"rows of `{cut.name}` ({shape}) are shared out over {sharding.parts_of(cut)} ranks, and cut its blocks"
            )
            refusals.append((reason, sharding_span(job, layout), None))
        elif small is not None:
            shape = " x ".join(map(str, small.shape))
            reason = f"a rank's part of `{small.name}` ({shape}) would be kept in other bits than all experts are"
            refusals.append((reason, job.parallelism.value_span("expert"), None))
    for reason, span, edit in refusals:
        yield Diagnostic(
            "E0737",
            f"moments in 8 bits have a scale for each {BLOCK} numbers: {reason}",
            span,
            notes=(Note("the optimizer", optimizer.value_span("state_")),),
            help=remedy(edit or set_field("train.optimizer.state", "fp32")),
        )


def _has_other_codes(parameter: ParameterNode, experts: int) -> bool:
    """True if the part of a stack of experts that a rank of the axis has is kept in other bits than the stack is."""
    part = (parameter.shape[0] // experts, *parameter.shape[1:])
    return keeps_codes(parameter.shape) != keeps_codes(part)


def _cuts_blocks(shape: tuple[int, ...], shards: int) -> bool:
    """True if a block lies on two ranks: no row is made of whole blocks, and no rank's rows are."""
    if not keeps_codes(shape):
        return False
    rows, row = shape[0], prod(shape[1:])
    return row % BLOCK != 0 and (rows % shards != 0 or rows // shards * row % BLOCK != 0)
