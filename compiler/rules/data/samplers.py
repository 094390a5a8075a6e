"""Rules for samplers: their numbers fit the samples, and they decide the order alone. E0318, E0328, W0327."""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.facts.sample_numbers import count_of
from dslc.compiler.facts.source_look import MissingDataError
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.number_text import path_text
from dslc.compiler.ir.tensors import LeafFact
from dslc.compiler.placement.workload import Workload
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import calls as c
from dslc.dsl.language.blocks import Balanced, ByLength, PythonNumbers, Weighted
from dslc.dsl.language.job import JobSpec
from dslc.dsl.remedy import remedy, remove_field, set_argument
from dslc.dsl.source import Span
from dslc.dsl.words import plural


def check_sampler(job: JobSpec, workload: Workload | None, source: SourceFacts) -> Iterator[Diagnostic]:
    sampler = job.data.sampler
    if sampler is None:
        return
    span = sampler.span or job.data.value_span("sampler")
    for what, where, help in _excluded(job, source):
        notes = (Note("the sampler", span),) if where != span else ()
        yield Diagnostic("E0328", what, where, notes=notes, help=help)
    yield from _check_numbers(job, workload, source)
    if isinstance(sampler, Weighted) and not sampler.replacement:
        most = workload.train if workload else None
        if most is not None and sampler.samples is not None and sampler.samples > most:
            yield Diagnostic(
                "E0318",
                f"{plural(sampler.samples, 'sample')} cannot be drawn from {most:,} without drawing some again",
                sampler.value_span("samples"),
                help=remedy(
                    set_argument(sampler.span, "samples", most),
                    " at most, or ",
                    set_argument(sampler.span, "replacement", "true"),
                ),
            )
    yield from _warn(job, source)


def _excluded(job: JobSpec, source: SourceFacts) -> Iterator[tuple[str, Span | None, str]]:
    """Yields what does not go with a sampler: the message, its place, the remedy."""
    sampler = job.data.sampler
    assert sampler is not None
    if isinstance(job.data.source, c.Mixture):
        what = f"a mixture has an order of its own, and `{sampler.word}` would be another"
        yield what, sampler.span or job.data.value_span("sampler"), "the `weights` of the mixture, or one source"
    if not job.data.shuffle:
        what = f"`{sampler.word}` decides the order of the samples, and so does `shuffle = false`"
        yield what, job.data.value_span("shuffle"), remedy(remove_field("data.shuffle", "leave one of the two out"))
    if not isinstance(sampler, Balanced):
        return
    target, span = source.target, sampler.span or job.data.value_span("sampler")
    if isinstance(job.model.loss, c.NetworkLoss):
        what = "`balanced` needs the class of each sample, and `own()` takes samples that are not pairs (input, target)"
        yield what, span, '`weighted(python("module:weights"))`'
    elif source.structures is not None and not _one_class_each(source.structures[1].leaves):
        what = "`balanced` needs targets that are one class each, and those of the data are structures"
        yield what, span, '`weighted(python("module:weights"))`'
    elif target is not None and (target.dtype != "int64" or target.shape):
        shape = " x ".join(map(str, target.shape))
        held = f"{shape} numbers each" if shape else "one number with a fraction each"
        yield (
            f"`balanced` needs targets that are one class each, and those of the data are {held}",
            span,
            ('`weighted(python("module:weights"))`'),
        )


def _one_class_each(leaves: tuple[LeafFact, ...]) -> bool:
    """True if a target is one whole number, beside an input that is a structure."""
    return len(leaves) == 1 and leaves[0].dtype == "int64" and (leaves[0].fixed, leaves[0].grown) == ((0,), (1,))


def _check_numbers(job: JobSpec, workload: Workload | None, source: SourceFacts) -> Iterator[Diagnostic]:
    sampler = job.data.sampler
    if isinstance(sampler, Weighted):
        what, numbers = "weights", sampler.weights
    elif isinstance(sampler, ByLength) and sampler.length is not None:
        what, numbers = "length", sampler.length
    else:
        return
    if isinstance(numbers, PythonNumbers):
        return
    span, name = sampler.value_span(what), path_text(numbers)
    try:
        count = count_of(numbers, name)
    except MissingDataError as absent:
        yield Diagnostic("E0318", str(absent), span, help=absent.help)
        return
    wanted = (workload.train if workload.split == "given" else source.samples) if workload else None
    if wanted is not None and count != wanted:
        yield Diagnostic(
            "E0318",
            f"{name} holds {plural(count, 'number')}, and the data has {plural(wanted, 'sample')}",
            span,
            notes=(Note("the source", job.data.value_span("source")),),
            help="one for each sample, in the order of the source, whether it is held out or not"
            if workload and workload.split in ("random", "tail")
            else "one for each training sample, in the order of the source",
        )


def _warn(job: JobSpec, source: SourceFacts) -> Iterator[Diagnostic]:
    sampler = job.data.sampler
    assert sampler is not None
    span = sampler.span or job.data.value_span("sampler")
    if isinstance(sampler, ByLength) and source.input is not None:
        yield Diagnostic(
            "W0327",
            "all samples of the data have one shape, so that batches of like length are no smaller than others",
            span,
            help="a data set of your own that gives samples as long as they are, with `data.collate`",
        )
    elif isinstance(job.data.source, c.Parquet):
        yield Diagnostic(
            "W0327",
            f"`{sampler.word}` takes rows from anywhere, and a Parquet file is read a row group at a time: a batch may "
            "read as many as it has samples",
            span,
            help="`arrays(…)` or `tokens(…)`, which are mapped into memory",
        )
