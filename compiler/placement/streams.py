"""The order of a stream, and the rules on it: E0330 to E0332, W0330.

Model: lanes read the shards of a stream, and each batch takes equally many samples from each lane
(runtime/data/streams.py). Their number follows from the shards and the batch, never from the ranks, so that the order
of samples does not either.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.steps import StreamStep
from dslc.dsl.diagnostics import Diagnostic, Findings, Note, passes
from dslc.dsl.language.calls import PythonSource
from dslc.dsl.language.job import JobSpec, values_within
from dslc.dsl.language.no_effect_warnings import changed, no_effect
from dslc.dsl.language.registry import BLOCKS, Node, Quantity, fields
from dslc.dsl.remedy import remedy, remove_field, set_field
from dslc.dsl.source import Span
from dslc.dsl.words import plural

LANES = 16  # read at the same time, where the job does not say how many


def stream_of(job: JobSpec, source: SourceFacts, ranks: int) -> Findings[StreamStep | None]:
    """Returns the order of a stream, over `ranks` data-parallel ranks; None if the source is none, or not known."""
    if source.shards is None:
        if source.samples is not None and isinstance(job.data.source, PythonSource):
            yield from _check_unstreamed(job)
        return None
    length = job.data.samples or source.samples or 0
    times = () if length else _check_times(job)
    if not (yield from passes(chain(_check_fields(job, source), times, _check_lanes(job, source.shards)))):
        return None
    lanes = job.data.interleave or _lanes(job.data.batch, source.shards)
    yield from _warn(job, source.shards, lanes, ranks)
    window = job.data.shuffle_buffer if job.data.shuffle else 0
    return StreamStep(shards=source.shards, lanes=lanes, window=window, length=length, held=source.held_shards)


def _check_unstreamed(job: JobSpec) -> Iterator[Diagnostic]:
    """Reports fields for streams where a user's source turns out to be none."""
    for name in ("samples", "shuffle_buffer", "interleave"):
        if changed(job.data, name):
            yield no_effect(f"data.{name}", "the source is no stream", job.data.name_span(name))


def _lanes(batch: int, shards: int) -> int:
    return max(n for n in range(1, min(shards, LANES) + 1) if batch % n == 0)


def _check_fields(job: JobSpec, source: SourceFacts) -> Iterator[Diagnostic]:
    data, notes = job.data, (Note("the stream", job.data.value_span("source")),)
    for field in ("validation", "test"):
        if getattr(data, field):
            yield Diagnostic(
                "E0331",
                "a stream has no share that can be held out: its samples come one after another",
                data.value_span(field),
                notes=notes,
                help="let the source give a pair (train, validation), of which each may be a stream or a data set"
                if field == "validation"
                else "let the source give a triple (train, validation, test), of which the last is a data set",
            )
    if data.sampler is not None:
        yield Diagnostic(
            "E0331",
            f"`{data.sampler.word}` decides the order of samples by their numbers, and those of a stream have none",
            data.value_span("sampler"),
            notes=notes,
            help=remedy(remove_field("data.sampler"), ": `shuffle_buffer` samples are shuffled at a time"),
        )
    if data.last_batch == "keep":
        yield Diagnostic(
            "E0331",
            "the batches of a stream are all full: the next pass fills the last of a pass",
            data.value_span("last_batch"),
            notes=notes,
            help=remedy(remove_field("data.last_batch")),
        )


def _check_lanes(job: JobSpec, shards: int) -> Iterator[Diagnostic]:
    data = job.data
    requested = data.interleave
    if requested is None:
        return
    best = remedy(set_field("data.interleave", _lanes(data.batch, shards)))
    if requested > shards:
        message = f"the stream has {plural(shards, 'shard')}, and {requested} cannot be read at the same time"
        yield Diagnostic("E0332", message, data.value_span("interleave"), help=best)
    elif data.batch % requested:
        yield Diagnostic(
            "E0332",
            f"a batch of {data.batch} cannot have equally many samples of each of {requested} shards",
            data.value_span("interleave"),
            label=f"{data.batch} = {requested} x {data.batch // requested} + {data.batch % requested}",
            notes=(Note("the global batch is set here", data.value_span("batch")),),
            help=best,
        )


def _check_times(job: JobSpec) -> Iterator[Diagnostic]:
    """Reports times in epochs, whose length is not known."""
    for path, span in _in_epochs(job):
        yield Diagnostic(
            "E0330",
            f"`{path}` is in epochs, and nothing says how many samples a pass of the stream has",
            span,
            notes=(Note("the stream", job.data.value_span("source")),),
            help="give it in steps; or `data.samples = …`, the samples of a pass",
        )


def _in_epochs(job: JobSpec) -> Iterator[tuple[str, Span | None]]:
    for word in BLOCKS:
        block: Node = getattr(job, word)
        for declared in fields(type(block)):
            value = getattr(block, declared.name)
            if (word, declared.name) == ("train", "epochs"):
                counts_epochs = value is not None
            else:
                counts_epochs = any(quantity.dimension == "epochs" for quantity in values_within(value, Quantity))
            if counts_epochs:
                yield f"{word}.{declared.name}", block.value_span(declared.name)


def _warn(job: JobSpec, shards: int, lanes: int, ranks: int) -> Iterator[Diagnostic]:
    if lanes < ranks:
        reads_whole_shards = shards >= ranks and job.data.batch % ranks == 0
        yield Diagnostic(
            "W0330",
            f"{plural(ranks, 'data-parallel rank')} read {plural(lanes, 'shard')} of the stream at a time: some read "
            "the same one, and each of them drops what is another's",
            job.data.value_span("interleave") if job.data.interleave else job.data.value_span("source"),
            help=remedy(set_field("data.interleave", ranks, f"`data.interleave = {ranks}`"))
            if reads_whole_shards
            else "as many shards as ranks",
        )
    if job.data.workers > 1:
        yield Diagnostic(
            "W0330",
            f"one process reads a stream ahead for each rank, and `data.workers` asks for {job.data.workers}",
            job.data.value_span("workers"),
            help=remedy(
                set_field("data.workers", 1),
                "; what takes time may be done in `data.collate`, which has this rank's samples alone",
            ),
        )
