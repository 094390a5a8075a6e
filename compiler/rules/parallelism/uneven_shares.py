"""Rules for data ranks with unequal shares of a batch: E0343, N0341.

Losses are sums over the global count, and gradients are sums over the ranks. So unequal shares change nothing in a
training, unless a rank weighs as much as another whatever its samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dslc.compiler.ir.actions import Payload
from dslc.compiler.placement.exchange import exchange_of
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.losses import compares, mixtures
from dslc.compiler.placement.workload import Workload
from dslc.compiler.rules.parallelism.exchange import exchange_span
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.no_effect_warnings import no_effect
from dslc.dsl.remedy import remedy, remove_field
from dslc.dsl.source import Span


def check_shares(job: JobSpec, layout: Layout, workload: Workload | None) -> Iterator[Diagnostic]:
    """Reports what needs equal shares; says how a batch is dealt that the shares do not divide."""
    if job.parallelism.data_shares is None:
        return
    span = job.parallelism.value_span("data_shares")
    if layout.sizes["data"] == 1:
        if job.parallelism.data is None:
            yield no_effect("parallelism.data_shares", "one rank has the whole batch", span)
        return
    field = "data_shares = measured" if job.parallelism.data_shares == "measured" else "data_shares"
    for what, where, why in _needs_equal_shares(job, layout, workload):
        yield Diagnostic(
            "E0343",
            f"`{field}` does not go with {what}: {why}",
            span,
            notes=(Note(f"{what} is set here", where),),
            help=remedy(remove_field("parallelism.data_shares")),
        )
    if workload is not None and not workload.measured and workload.weights:
        yield from _note_rounding(workload, layout.microbatches, span)


def _needs_equal_shares(
    job: JobSpec, layout: Layout, workload: Workload | None
) -> Iterator[tuple[str, Span | None, str]]:
    exchange = exchange_of(job, layout)
    if exchange is not None and exchange.agrees is not Payload.GRADIENTS:
        yield f"`{exchange.word}`", exchange_span(job), "its mean over the ranks counts each rank alike"
    if job.train.step is not None:
        yield "a step of your own", job.train.value_span("step"), "your step takes its own mean over a rank's samples"
    if compares(job.model.loss):
        yield "a loss that compares samples", job.model.loss_span, "its ranks exchange equal shares"
    if job.parallelism.data_shares == "measured":
        if job.parallelism.zero > 1:
            why = "each rank measures with unsharded parameters; `data_shares = […]` goes with it"
            yield f"`zero = {job.parallelism.zero}`", job.parallelism.value_span("zero"), why
        if job.parallelism.expert > 1:
            why = "each rank measures by itself, and its rows go to experts of others; `data_shares = […]` goes with it"
            yield "an expert axis", job.parallelism.value_span("expert"), why
        if any(mixture.capacity is not None for mixture in mixtures(job)):
            why = "each rank measures by itself, and a layer counts the tokens of all; `data_shares = […]` goes with it"
            yield "a `capacity` of experts", job.model.value_span("network"), why
        if workload is not None and workload.stream is not None:
            yield "a stream", job.data.value_span("source"), "its samples come once, and measuring would take some"


def _note_rounding(workload: Workload, microbatches: int, span: Span | None) -> Iterator[Diagnostic]:
    total = sum(workload.weights)
    exact = [workload.batch * weight / total for weight in workload.weights]
    if all(share == value for share, value in zip(workload.shares, exact, strict=True)):
        return
    unit = f" in multiples of {microbatches} micro-batches" if microbatches > 1 else ""
    yield Diagnostic(
        "N0341",
        f"a batch of {workload.batch} is dealt as {_listed(workload.shares)}{unit}: the exact proportions are "
        f"{_listed([f'{value:.2f}' for value in exact])}",
        span,
    )


def _listed(values: Sequence[object], most: int = 8) -> str:
    """Returns `43, 21`; of many the first."""
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return f"{', '.join(map(str, values[:most]))}{more}"
