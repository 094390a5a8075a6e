"""Rules for cross entropy in chunks: which networks have a head, and what makes whole logits still. E0682, W0683."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.ir.parameter_names import is_of_adapter
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.compiler.model.outputs import classes_come_first
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.losses import chunked_head, head_of, wants_chunks
from dslc.compiler.placement.workload import Workload
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import calls as c
from dslc.dsl.language import metrics as m
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.preferences import PreferenceLoss
from dslc.dsl.language.registry import AUTO
from dslc.dsl.remedy import remedy, remove_argument, remove_at, set_argument
from dslc.dsl.words import plural

BATCHES = 2  # micro-batches that an evaluation computes at a time


def check_chunks(
    job: JobSpec, source: SourceFacts, layout: Layout | None, workload: Workload | None, model: ModelGraph | None
) -> Iterator[Diagnostic]:
    """Reports a job whose loss cannot be computed in chunks, and metrics that take whole logits."""
    loss = job.model.loss
    if not isinstance(loss, c.CrossEntropy | PreferenceLoss) or not wants_chunks(job):
        return
    faults = list(_faults(job, source, model))
    for fault, note in faults:
        yield Diagnostic(
            "E0682",
            f"the loss cannot be computed in chunks: {fault}",
            loss.value_span("chunks"),
            notes=(note,),
            help=remedy(remove_argument(loss.span, "chunks")),
        )
    if faults or layout is None or workload is None or model is None:
        return
    microbatch = workload.microbatch * job.data.rows
    tokens = microbatch * prod(model.output.shape[:-1]) // layout.sizes["context"]
    if loss.chunks != AUTO and isinstance(loss.chunks, int) and loss.chunks > tokens:
        what = "token" if model.output.shape[:-1] else "sample"
        yield Diagnostic(
            "E0682",
            f"a micro-batch of a rank has {plural(tokens, what)}, fewer than {loss.chunks} chunks",
            loss.value_span("chunks"),
            help=remedy(set_argument(loss.span, "chunks", AUTO)),
        )
    elif not isinstance(loss, c.CrossEntropy) or workload.validation == 0:
        return
    elif chunked_head(job, layout, microbatch, model) is not None:
        yield from _warn_of_metrics(job, loss, layout, workload, model)


def _faults(job: JobSpec, source: SourceFacts, model: ModelGraph | None) -> Iterator[tuple[str, Note]]:
    """Yields each reason why no head can compute the losses, with the place that it comes from."""
    if job.train.step is not None:
        yield "a step of your own computes the loss itself", Note("the step", job.train.value_span("step"))
    if source.structures is not None:
        why = "its batches are structures, of whose target the tokens are not known"
        yield why, Note("the source", job.data.value_span("source"))
    elif model is not None and model.output.shape:
        head, network = head_of(model), Note("the network", job.model.network_span)
        if head is None:
            last = model.layers[-1].kind
            fault = f"the network's output is not that of a dense layer as it is; it ends in `{last}`"
            if last == "Linear":
                fault += ", which has hooks, or runs twice, or whose output is read or changed"
            yield fault, network
        elif classes_come_first(model.output, source):
            yield "the classes of its scores come first, and those of a dense layer come last", network
        elif _style_of(head.name, model) in (TensorStyle.ROW, TensorStyle.ROW_OF_WHOLE):
            why = f"ranks of the tensor axis share the columns of the head `{head.name}`, so none has whole scores"
            yield why, Note("the plan", job.parallelism.value_span("tensor_plan"))
        elif any(is_of_adapter(q.name) for q in head.parameters):
            yield f"the head `{head.name}` has an adapter", Note("the adapter", job.model.value_span("adapter"))


def _style_of(head: str, model: ModelGraph) -> TensorStyle | None:
    """Returns how the tensor axis cuts the head of a network that a function makes."""
    shares = model.traced.shares if model.traced is not None else None
    return dict(shares.styles).get(head) if shares is not None else None


def _warn_of_metrics(
    job: JobSpec, loss: c.CrossEntropy, layout: Layout, workload: Workload, model: ModelGraph
) -> Iterator[Diagnostic]:
    sums = (m.LossMetric,) if loss.label_smoothing else (m.LossMetric, m.Perplexity)
    for metric in job.evaluate.metrics:
        if isinstance(metric, sums):
            continue
        size = 4 * BATCHES * workload.microbatch * prod(model.output.shape) // layout.sizes["context"]
        yield Diagnostic(
            "W0683",
            f"`{metric.word}` takes whole logits: an evaluation makes {byte_text(size)} of them at a time",
            metric.span or job.evaluate.value_span("metrics"),
            notes=(Note("training makes them in chunks", loss.value_span("chunks")),),
            help=remedy(remove_at(metric.span), "; the loss and perplexity are computed in chunks"),
        )
        return
