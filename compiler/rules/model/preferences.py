"""Rules for losses of pairs: the data that they take, the reference model, and what they do not go with. E0357 to
E0359.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.preferences import REFERENCES, PreferenceLoss, Preferences, ReferencedLoss
from dslc.dsl.remedy import remedy, remove_field, set_argument, set_field


def check_preferences(job: JobSpec) -> Iterator[Diagnostic]:
    """Reports a loss of pairs without pairs, pairs without such a loss, and a step or a reference that cannot be."""
    loss, source = job.model.loss, job.data.source
    if not isinstance(loss, PreferenceLoss):
        yield from _check_other_loss(job)
        return
    if not isinstance(source, Preferences):
        yield Diagnostic(
            "E0357",
            f"`{loss.word}` compares the two answers of a pair, and `{source.word}` gives no pairs",
            job.model.loss_span,
            notes=(Note("the source", job.data.value_span("source")),),
            help='`source = preferences("pairs.jsonl", tokenizer = "folder")`',
        )
        return
    if job.train.step is not None:
        yield Diagnostic(
            "E0358",
            f"a step of your own computes its losses by itself, and `{loss.word}` would not run",
            job.train.value_span("step"),
            notes=(Note("the loss", job.model.loss_span),),
            help=remedy(remove_field("train.step")),
        )
    if isinstance(loss, ReferencedLoss):
        yield from _check_reference(job, loss)


def _check_other_loss(job: JobSpec) -> Iterator[Diagnostic]:
    for source in c.parts_of(job.data.source):
        if isinstance(source, Preferences):
            yield Diagnostic(
                "E0357",
                f"`preferences` gives pairs of answers, and `{job.model.loss.word}` does not compare the two",
                source.span or job.data.value_span("source"),
                notes=(Note("the loss", job.model.loss_span),),
                help=remedy(set_field("model.loss", "dpo()", "`dpo()`"), ", `ipo()`, `orpo()` or `simpo()`"),
            )
            return


def _check_reference(job: JobSpec, loss: ReferencedLoss) -> Iterator[Diagnostic]:
    span, adapter = loss.value_span("reference"), job.model.adapter
    if loss.reference == "adapter_off" and adapter is None:
        yield Diagnostic(
            "E0359",
            "the reference is the network without its adapter, and the network has none",
            span,
            help=remedy(set_argument(loss.span, "reference", "initial"), ', or `model.adapter = lora(16, ["q_proj"])`'),
        )
    start = job.model.start
    if loss.reference not in REFERENCES and start is not None and start.quantize is not None:
        yield Diagnostic(
            "E0359",
            "the weights of a reference are loaded into the network, whose own are in 4 or 8 bits",
            span,
            notes=(Note("the weights are quantized here", start.value_span("quantize")),),
            help=remedy(set_argument(loss.span, "reference", "adapter_off"), " takes the network as it was"),
        )
