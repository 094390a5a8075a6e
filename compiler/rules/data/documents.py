"""Rules for sequences that hold several documents. E0329."""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.model.model import ModelGraph
from dslc.compiler.placement.tensor_plan import needs_whole
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import TransformersNetwork
from dslc.dsl.remedy import remedy, remove_field, set_field
from dslc.dsl.source import Span

Reason = tuple[str, Span | None, str]


def check_documents(job: JobSpec, source: SourceFacts, model: ModelGraph | None) -> Iterator[Diagnostic]:
    if not job.data.has_documents:
        return
    chat = job.data.source if isinstance(job.data.source, c.Chat) else None
    packs = chat is not None and job.data.documents is None
    span = chat.value_span("pack") if chat is not None and packs else job.data.value_span("documents")
    of_data = list(_of_loss(job) if packs else _of_data(job, source))
    for what, where, help in (*of_data, *(() if of_data else _of_network(job, model)), *_of_plan(job)):
        notes = (Note("`pack` is set here" if packs else "`documents` is set here", span),) if where != span else ()
        yield Diagnostic("E0329", what, where or span, notes=notes, help=help)


def _of_data(job: JobSpec, source: SourceFacts) -> Iterator[Reason]:
    token, span = job.data.documents, job.data.value_span("documents")
    assert token is not None
    tokens = source.input is None or (source.input.dtype == "int64" and len(source.input.shape) == 1)
    if any(isinstance(each, c.Chat) for each in c.parts_of(job.data.source)):
        what = "`chat` keeps conversations apart by itself, with `pack = documents`"
        yield what, span, remedy(remove_field("data.documents"))
    elif source.shards is not None:
        what = "the documents of a stream are not looked for"
        yield what, job.data.value_span("source"), "a data set with `len` and indexing"
    elif source.structures is not None or not tokens or (source.target is not None and source.target != source.input):
        yield (
            "a token ends a document, and the samples are not sequences of tokens with the tokens that follow",
            (job.data.value_span("source")),
            remedy(remove_field("data.documents")),
        )
    elif source.vocab is not None and token >= source.vocab:
        yield (
            f"{token} is no token of the data, which are 0 to {source.vocab - 1}",
            span,
            "the token after each document",
        )
    yield from _of_loss(job)


def _of_loss(job: JobSpec) -> Iterator[Reason]:
    if not isinstance(job.model.loss, c.CrossEntropy | c.PythonLoss):
        what = f"`{job.model.loss.word}` cannot leave out the targets between documents"
        loss = remedy(set_field("model.loss", "cross_entropy()", "`cross_entropy()`"), ", or `python(…)`")
        yield what, job.model.loss_span, loss


def _of_network(job: JobSpec, model: ModelGraph | None) -> Iterator[Reason]:
    if isinstance(job.model.network, TransformersNetwork):
        if model is not None and model.traced is not None and model.traced.mixes_documents:
            what = f"this network cannot keep documents apart: {model.traced.mixes_documents}"
            yield (
                what,
                job.model.value_span("network"),
                "a decoder with plain attention, such as Llama, Mistral or Qwen",
            )
    elif job.model.has_user_network:
        what = "attention can be kept within documents in dslc's own layers, and this network has others"
        yield (
            what,
            job.model.value_span("network"),
            "`transformers(…)`, `gpt(…)`, `llama(…)`, or a list of layers with `attention`",
        )
    elif model is not None and model.root is not None and (mixes := needs_whole(model)) is not None:
        layer = model.layer_of(mixes)
        what = f"`{layer.kind if layer else mixes}` mixes positions of different documents"
        yield (
            what,
            (layer.span if layer else None) or job.model.value_span("network"),
            "attention, which can be kept within one",
        )


def _of_plan(job: JobSpec) -> Iterator[Reason]:
    if job.train.compile and job.memory.recompute == "selective":
        yield (
            "`recompute = selective` keeps results, and compiled code around attention changes their memory",
            job.memory.value_span("recompute"),
            remedy(set_field("memory.recompute", "full"), ", or ", set_field("train.compile", "false")),
        )
