"""Rules for losses that compare the samples of a batch. E0227, E0627, E0628, W0626."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.losses import compares
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.no_effect_warnings import changed, no_effect
from dslc.dsl.remedy import remedy, remove_field, set_argument

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import ModelFacts


def check_whole_loss(job: JobSpec, source: SourceFacts, model: ModelFacts | None) -> Iterator[Diagnostic]:
    loss = job.model.loss
    if not compares(loss):
        return
    if isinstance(loss, c.PythonLoss) and changed(loss, "ignore"):
        why = "a loss over a whole batch is given all targets, and leaves out what it likes"
        yield no_effect("model.loss.ignore", why, loss.name_span("ignore"))
    if source.structures is not None:
        yield from _check_padded(job, source, model)


def check_loss_axes(job: JobSpec, layout: Layout) -> Iterator[Diagnostic]:
    """Reports axes that cannot share out the samples that a loss compares."""
    loss = job.model.loss
    if not compares(loss):
        return
    for axis, why in _unsupported_axes(job, layout):
        yield Diagnostic(
            "E0627",
            f"a loss over the samples of a batch does not go with the {axis} axis: {why}",
            job.parallelism.value_span(axis),
            notes=(Note("the loss", job.model.loss_span),),
            help=remedy(
                remove_field(f"parallelism.{axis}", "use the data axis"), ", with `zero` where memory is short"
            ),
        )
    if layout.nodes > 1 and loss.over == "node":  # type: ignore[attr-defined]
        yield Diagnostic(
            "W0626",
            f"each of {layout.nodes} nodes compares only the samples that it has itself: the training depends on the "
            "number of nodes",
            loss.name_span("over") if loss.is_set("over") else job.model.loss_span,
            help=remedy(set_argument(loss.span, "over", "all"), " compares the samples of the whole global batch"),
        )


def _unsupported_axes(job: JobSpec, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yields axes over which the loss cannot be computed, each with the reason."""
    if layout.sizes["pipeline"] > 1:
        yield ("pipeline", "it needs all outputs before the first backward pass, which a schedule begins earlier")
    if layout.sizes["context"] > 1:
        yield "context", "it compares whole samples, and each rank has a piece of every sequence"
    node = job.model.loss.over == "node" and layout.nodes > 1  # type: ignore[attr-defined]
    if node and layout.sizes["tensor"] > 1 and layout.processes % layout.sizes["tensor"]:
        yield "tensor", "`over = node` compares the samples of a node, and ranks of one sample are on several"


def _check_padded(job: JobSpec, source: SourceFacts, model: ModelFacts | None) -> Iterator[Diagnostic]:
    """Reports tensors that a batch is padded to by itself, so that other ranks may have longer ones."""
    assert source.structures is not None
    leaves = source.structures[1].leaves
    views = isinstance(job.model.loss, c.Contrastive) and model is not None and model.structured
    if model is not None and isinstance(job.model.loss, c.Contrastive) and not views and not _has_groups(source, model):
        yield Diagnostic(
            "E0227",
            "`contrastive` tells positives by classes or by views: it needs an embedding and a class for each sample, "
            "or several embeddings",
            job.model.loss_span,
            help='a class for each sample as the target, or an output (samples, views, width); or `python("module:'
            'function", over = all)`',
        )
    if job.data.collate is None:
        return
    long = [leaf for leaf in leaves if len(leaf.grown) > 1]
    wide = model is not None and not views and (model.structured or len(model.output.shape) > 1)
    if wide or (long and not isinstance(job.model.loss, c.Contrastive)):
        what = f"the target{long[0].path} has" if long and not wide else "the network's outputs have"
        yield Diagnostic(
            "E0628",
            f"{what} more dims than the samples, which `collate` may make longer on one rank than on another: a loss "
            "over a whole batch needs equal ones",
            job.model.loss_span,
            notes=(Note("`collate`", job.data.value_span("collate")),),
            help=remedy(
                "one vector for each sample as the output, and one number as the target; or ",
                remove_field("data.collate"),
            ),
        )


def _has_groups(source: SourceFacts, model: ModelFacts) -> bool:
    assert source.structures is not None
    leaves = source.structures[1].leaves
    classes = len(leaves) == 1 and len(leaves[0].grown) == 1 and "int" in leaves[0].dtype
    shape = model.output.shape
    return (len(shape) == 1 and classes) or (len(shape) == 2 and shape[0] > 1)
