"""Rules for mixtures: their sources give samples of one kind, and all of them are drawn. E0327."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.placement.epochs import are_comparable
from dslc.compiler.placement.workload import Workload
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import Call
from dslc.dsl.words import plural


def check_mixture(job: JobSpec, workload: Workload | None, source: SourceFacts) -> Iterator[Diagnostic]:
    mixture = job.data.source
    if not isinstance(mixture, c.Mixture):
        return
    nested = [each for each in mixture.sources if isinstance(each, c.Mixture)]
    for each in nested:
        yield Diagnostic(
            "E0327", "a source of a mixture is a mixture", each.span, help="name its sources in the outer one"
        )
    if mixture.weights is not None and len(mixture.weights) != len(mixture.sources):
        yield Diagnostic(
            "E0327",
            f"the mixture has {plural(len(mixture.sources), 'source')} and {plural(len(mixture.weights), 'weight')}",
            mixture.value_span("weights"),
            help="one weight for each source",
        )
    if mixture.weights is not None and not are_comparable(mixture.weights):
        yield Diagnostic(
            "E0327",
            f"the weights of the mixture are too far apart, or too large: {min(mixture.weights):g} to "
            f"{max(mixture.weights):g}",
            mixture.value_span("weights"),
            help="no weight above 1e12 times another",
        )
    alone = [(each, facts) for each, facts in zip(mixture.sources, source.parts, strict=True) if each not in nested]
    for call, facts in alone:
        if facts.shards is not None:
            what = f"`{call.word}` is a stream here, whose samples have no numbers, and a mixture takes some of each"
            yield Diagnostic("E0327", what, call.span, help="a data set with `len` and indexing")
    for (first, a), (second, b) in pairwise(alone):
        yield from _check_alike(first, a, second, b)
    for call, mixed in zip(mixture.sources, workload.mixed if workload else (), strict=False):
        if mixed.visited == 0:
            yield Diagnostic(
                "E0327",
                f"no sample of `{call.word}` is in an epoch: its weight is too small",
                call.span,
                help="a larger weight, more `samples`, or leave it out",
            )


def _check_alike(first: Call, a: SourceFacts, second: Call, b: SourceFacts) -> Iterator[Diagnostic]:
    chats = isinstance(first, c.Chat) and isinstance(second, c.Chat)  # each tells the largest token that it uses
    for what, one, other in _kinds(a, b)[: 4 if chats else None]:
        if one is not None and other is not None and one != other:
            yield Diagnostic(
                "E0327",
                f"the sources of a mixture differ in {what}: {_text(one)} in `{first.word}`, {_text(other)} in "
                f"`{second.word}`",
                second.span,
                notes=(Note("the source before it", first.span),),
                help="sources of one kind; a `python(…)` source may bring samples into another form",
            )
            return


def _kinds(a: SourceFacts, b: SourceFacts) -> list[tuple[str, object, object]]:
    """Returns the properties that samples of one kind have alike; None is an unknown."""

    def form(facts: SourceFacts) -> str | None:
        return "a structure" if facts.structures else "a tensor" if facts.input else None

    return [
        ("form", form(a), form(b)),
        ("the structure of a sample", a.structures, b.structures),
        ("the input", a.input, b.input),
        ("the target", a.target, b.target),
        ("vocabulary", a.vocab, b.vocab),
        ("the number of classes", a.classes, b.classes),
    ]


def _text(value: object) -> str:
    if isinstance(value, int | str):
        return str(value)
    if isinstance(value, TensorFact):
        return f"{value.dtype} of shape {' x '.join(map(str, value.shape)) or 'none'}"
    return "another"
