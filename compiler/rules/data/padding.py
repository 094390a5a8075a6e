"""Rules for sequences that are padded to one length. E0606, W0612.

A model of `transformers` gets an attention mask if the job names the padding token (`data.pad`). Other networks take
only their input, and cannot be given a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dslc.compiler.ir.facts import SourceFacts
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import TransformersNetwork
from dslc.dsl.language.preferences import Preferences
from dslc.dsl.remedy import remedy, remove_field, set_field

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import ModelFacts

# Sources without padding that a network has to be told of.
_WITHOUT = Preferences | c.Chat | c.Digits | c.Stdlib | c.Text | c.Tokens | c.Images | c.MNIST | c.CIFAR10 | c.Synthetic


def check_padding(job: JobSpec, source: SourceFacts, model: ModelFacts | None) -> Iterator[Diagnostic]:
    pad, network = job.data.pad, job.model.network
    if pad is None:
        yield from _warn(job, source, model)
        return
    tokens = source.input is None or source.input.dtype == "int64"
    note = Note("the network", job.model.value_span("network"))
    if not isinstance(network, TransformersNetwork):
        fault = "only a model of `transformers(…)` can be told what is padding"
        help = remedy(remove_field("data.pad"), "; `cross_entropy(ignore = …)` leaves targets out of the loss")
    elif _unpadded(job) or not tokens:
        fault = "the samples of this source have no padding"
        if not tokens:
            fault = "padding is a token, and the data holds no tokens"
        elif isinstance(job.data.source, c.Chat | Preferences):
            fault = f"`{job.data.source.word}` fills up sequences after their ends, where nothing attends to it"
        note, help = Note("the source", job.data.value_span("source")), remedy(remove_field("data.pad"))
    elif not isinstance(job.model.loss, c.CrossEntropy | c.PythonLoss):
        fault = f"`{job.model.loss.word}` cannot leave out the targets at padding"
        note = Note("the loss", job.model.value_span("loss"))
        help = remedy(set_field("model.loss", "cross_entropy()", "`cross_entropy()`"), " and `python(…)` can")
    else:
        return
    yield Diagnostic("E0606", fault, job.data.value_span("pad"), notes=(note,), help=help)


def _warn(job: JobSpec, source: SourceFacts, model: ModelFacts | None) -> Iterator[Diagnostic]:
    padding = model.padding if model is not None else None
    tokens = source.input is not None and source.input.dtype == "int64"
    if padding is None or not tokens or _unpadded(job):
        return
    yield Diagnostic(
        "W0612",
        f"where the data has padding, the model attends to it: by its configuration that is the token {padding}",
        job.data.value_span("source"),
        notes=(Note("the network", job.model.value_span("network")),),
        help=remedy(set_field("data.pad", padding), " gives it a mask, if sequences are filled up with that"),
    )


def _unpadded(job: JobSpec) -> bool:
    return all(isinstance(source, _WITHOUT) for source in c.parts_of(job.data.source))
