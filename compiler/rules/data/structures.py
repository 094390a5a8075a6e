"""Rules for batches that are structures of tensors, losses that count by themselves, and networks that look at numbers.

E0320 to E0326, W0326, W0440. All of these run over the data axis, with any `zero`; all but networks that look at
numbers over the tensor axis, too, and within limits over the pipeline and the context axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensors import LeafFact, TensorFact, TreeFact
from dslc.compiler.placement.layout import Layout
from dslc.compiler.rules.model.forward_passes import place_text
from dslc.compiler.rules.training.metrics import check_outputs
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import calls as c
from dslc.dsl.language import metrics as m
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import Call
from dslc.dsl.remedy import remedy, remove_field
from dslc.dsl.source import Span
from dslc.dsl.words import plural

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import ModelFacts

_AXES = ("pipeline", "tensor", "context")
_WHOLE = ("int64", "int32", "int16", "int8", "uint8")


def check_structures(job: JobSpec, source: SourceFacts, model: ModelFacts | None) -> Iterator[Diagnostic]:
    structures = source.structures is not None
    for code, what, span, note, help in _unfit(job, structures=structures):
        yield Diagnostic(code, what, span, notes=(note,), help=help)
    if structures or (model is not None and model.structured):
        yield from _check_loss_and_metrics(job, _pair(source, model))
    if model is not None and model.looks:
        yield Diagnostic(
            "W0326",
            f"the network's forward pass reads numbers out of tensors ({model.looks}), so its memory and its FLOPs are "
            "those of a few samples, and may differ for others",
            job.model.network_span,
            help="`dslc run --profile` measures its memory beside the plan",
        )


def check_structure_axes(
    job: JobSpec, layout: Layout, source: SourceFacts, model: ModelFacts | None
) -> Iterator[Diagnostic]:
    """Reports axes that cannot share out the structures of a job; warns of batches that are collated at random."""
    collate = job.data.collate
    if collate and source.collate_draws and layout.sizes["data"] * layout.microbatches > 1:
        yield Diagnostic(
            "W0440",
            f"`{collate.function}` draws random numbers for each micro-batch as a whole, so that the samples get "  # type: ignore[attr-defined]
            "others than in one process",
            job.data.value_span("collate"),
            help="draw them in the data set, where each sample has its own",
        )
    used = [axis for axis in _AXES if layout.sizes[axis] > 1]
    for axis in used:
        for why, what, span, advice in islice(_reasons(job, axis, used, source, model), 1):
            yield Diagnostic(
                "E0320",
                f"{why}, which the {axis} axis cannot share out",
                job.parallelism.value_span(axis),
                notes=(Note(what, span),),
                help=remedy(
                    advice,
                    remove_field(f"parallelism.{axis}", "use the data axis"),
                    ", with `zero` where memory is short",
                ),
            )


def _unfit(job: JobSpec, *, structures: bool) -> Iterator[tuple[str, str, Span | None, Note, str]]:
    """Yields what the data, the network and the loss cannot be to each other: code, message, place, note, remedy."""
    model, source = job.model, Note("the source", job.data.value_span("source"))
    has_user_samples = all(isinstance(each, c.PythonSource) for each in c.parts_of(job.data.source))
    if job.data.collate is not None and not has_user_samples:
        what = f"`{job.data.source.word}` makes its batches itself"
        without = remedy(remove_field("data.collate"), "; it is for the samples of `python(…)`")
        yield "E0325", what, job.data.value_span("collate"), source, without
    if isinstance(model.loss, c.NetworkLoss) and job.train.step is None:
        if not model.has_user_network:
            what = "`own()` takes the loss that the network returns, and this network returns none"
            help = "`cross_entropy()` and the like; or a network of `python(…)` or `transformers(…)`"
            yield "E0324", what, model.loss_span, Note("the network", model.network_span), help
        elif not has_user_samples:
            what = "a network that returns its loss is given whole samples, and those of "
            what += f"`{job.data.source.word}` are pairs (input, target)"
            help = '`source = python("module:function")`, or a loss of (output, target)'
            yield "E0324", what, model.loss_span, source, help
    if structures and not model.has_user_network:
        what = "the network takes one tensor, and an input of the data is a structure of tensors"
        help = '`network = python("module:function")` or `transformers(…)`; or let the data set give one tensor as '
        yield "E0321", what, model.network_span, source, help + "the input"


def _pair(source: SourceFacts, model: ModelFacts | None) -> tuple[TensorFact, LeafFact] | None:
    """Returns the network's output and the target, if each is one tensor."""
    if source.structures is None or model is None or model.structured:
        return None
    leaves = source.structures[1].leaves
    return (model.output, leaves[0]) if len(leaves) == 1 and not leaves[0].path else None


def _compares(loss: Call, output: TensorFact, target: LeafFact) -> bool:
    """True if a loss of the library can compare them. Either the target has classes for scores, and the scores' other
    dims are the target's, or both have one number for each sample. Of more numbers the mean of a sample would depend on
    its padding.
    """
    if isinstance(loss, c.CrossEntropy):
        return target.dtype in _WHOLE and len(target.grown) == len(output.shape)
    return isinstance(loss, c.MSE | c.L1 | c.BCE) and len(target.grown) == 1 and prod(output.shape) == 1


def _check_loss_and_metrics(job: JobSpec, pair: tuple[TensorFact, LeafFact] | None) -> Iterator[Diagnostic]:
    loss = job.model.loss
    if pair is not None and _compares(loss, *pair):
        return
    if pair is not None and isinstance(loss, c.PythonLoss):
        output, leaf = pair
        sample = TensorFact(shape=leaf.fixed[1:], dtype=leaf.dtype)  # type: ignore[arg-type]
        first = output.shape[1:] == sample.shape != ()
        yield from check_outputs(job, job.evaluate.metrics, output, sample, first)
        return
    library = not isinstance(loss, c.PythonLoss | c.NetworkLoss | c.Contrastive)  # cross_sample_losses.py checks that
    if pair is not None and library:
        output, target = pair
        shape = " x ".join(map(str, output.shape)) or "one number"
        yield Diagnostic(
            "E0322",
            f"`{loss.word}` cannot compare an output of {shape} for each sample with a target of "
            f"{plural(len(target.grown) - 1, 'dim')} of {target.dtype}",
            job.model.loss_span,
            help="classes for `cross_entropy`, which come last or first in the output; one number for each sample for "
            'the others; or `python("module:function")`',
        )
        return
    if library:
        yield Diagnostic(
            "E0322",
            f"`{loss.word}` compares two tensors, and the network's output or the target is a structure of them",
            job.model.loss_span,
            help='`python("module:function")`, a loss of your own; or `own()`, if the network returns its loss, alone, '
            "in a tuple (logits, loss), or as `loss` in a dict",
        )
    for metric in job.evaluate.metrics:
        if not isinstance(metric, m.LossMetric | m.PythonMetric):
            yield Diagnostic(
                "E0323",
                f"`{metric.word}` compares two tensors, and the network's output or the target is a structure of them",
                metric.span or job.evaluate.value_span("metrics"),
                help='`python("module:function")`, a metric of your own',
            )


def _reasons(
    job: JobSpec, axis: str, used: list[str], source: SourceFacts, model: ModelFacts | None
) -> Iterator[tuple[str, str, Span | None, str]]:
    """Yields each reason, what it concerns, the place of that, and what to do first."""
    if model is not None and model.looks:
        yield "the network looks at numbers as it runs", "the network", job.model.network_span, ""
    if model is not None and model.network is not None and model.network.varies:
        place = model.network.host_draws
        drawn = (
            f"draws from {model.network.draws_from} ({place_text(place)})"
            if place
            else "takes another path in each pass"
        )
        yield f"the network's forward pass {drawn}", "the network", job.model.network_span, ""
    if axis == "tensor":
        return  # its ranks have the same samples, and each of them the whole output
    if axis == "pipeline":
        yield from _not_staged(job, source)
        return
    over_stages = "`pipeline`, if the network is too large for a rank; or "
    if source.structures is not None and "pipeline" in used:
        yield "a batch over stages is a structure of tensors", "the source", job.data.value_span("source"), ""
    if source.structures is not None:
        yield from _not_in_pieces(job, source.structures, source)
        return
    if model is not None and model.structured:
        yield "the network's output is a structure of tensors", "the network", job.model.network_span, over_stages
    if isinstance(job.model.loss, c.NetworkLoss) or source.loss_counts:
        loss = job.model.loss_span
        yield "the loss counts by itself", "the loss", loss, over_stages


def _not_staged(job: JobSpec, source: SourceFacts) -> Iterator[tuple[str, str, Span | None, str]]:
    """Yields the structures that cannot enter a pipeline, whose stages pass on tensors with a row for each sample."""
    span = job.data.value_span("source")
    if source.structures is not None and source.stream:
        yield "a stream gives structures of tensors", "the source", span, "a data set with `len` and indexing; or "
    if source.structures is not None and source.uneven is not None:
        place, one, other = source.uneven
        yield (
            f"`{place}` of a batch has shape {one[1:]} for some samples and {other[1:]} for others",
            "the source",
            span,
            "pad all batches to one length; or ",
        )
    for leaf in source.structures[0].leaves if source.structures is not None else ():
        if not leaf.has_samples_first:
            yield (
                f"{f'`{leaf.path}` of a batch' if leaf.path else 'a list in a batch'} is no tensor with a row for each "
                "sample",
                "the source",
                span,
                "let `collate` give tensors whose first dimension is the samples, and all others fixed; or ",
            )


def _not_in_pieces(
    job: JobSpec, structures: tuple[TreeFact, TreeFact], source: SourceFacts
) -> Iterator[tuple[str, str, Span | None, str]]:
    """Yields the structures that the context axis cannot cut: each of its ranks has a piece of every sequence."""
    span = job.data.value_span("source")
    yield from _not_staged(job, source)
    leaves = [(leaf, "target" if tree is structures[1] else "input") for tree in structures for leaf in tree.leaves]
    length = next((leaf.fixed[1] for leaf, _ in leaves if leaf.has_samples_first and len(leaf.fixed) > 1), 0)
    for leaf, part in leaves:
        name = f"`{leaf.path}` of the {part}" if leaf.path else f"the {part}"
        positions = leaf.fixed[1] if leaf.has_samples_first and len(leaf.fixed) > 1 else 0
        if positions != length or not positions:
            has = f"{plural(positions, 'position')}, not {length}" if positions else "no positions"
            yield f"{name} has {has}", "the source", span, "tensors of (batch, positions, …), of one length; or "
    metric = next((each for each in job.evaluate.metrics if isinstance(each, m.PythonMetric)), None)
    if isinstance(job.model.loss, c.NetworkLoss) and metric is not None:
        place = metric.span or job.evaluate.value_span("metrics")
        yield "the loss in the output that a metric is given is of a piece", "the metric", place, "leave it out; or "
