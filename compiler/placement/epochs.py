"""Finds the global batches that suit an epoch, and the batches nearest to one that does not. E0301 to E0304, E0307,
E0341, E0342.

Model: a batch is split evenly over the data-parallel ranks, or in proportion to `parallelism.data_shares`; each share
into equal micro-batches. The rest of an epoch
is dropped or kept; if kept it is a short batch. Every rank needs a sample of a short batch, and a pipeline needs
micro-batches of one shape. A training that ends before its first short batch never sees one.

An epoch of a mixture: the source that ends it gives all of its samples, once, and the others in proportion to their
weights. The source with the fewest samples for its weight is used up first, the source with the most last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import gcd, isfinite
from typing import Literal

from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.schedules import demands
from dslc.dsl.diagnostics import Diagnostic, Note, division, passes
from dslc.dsl.language.blocks import ParallelismSpec
from dslc.dsl.language.calls import Mixture
from dslc.dsl.language.job import JobSpec
from dslc.dsl.record import Record, record
from dslc.dsl.remedy import either_field, join_remedies, remedy, remove_field, set_field
from dslc.dsl.source import Span
from dslc.dsl.words import plural

TRIED = 10_000  # multiples tried to either side
FARTHEST = 1e12  # a weight of a mixture over another, at most
Fault = Literal["", "E0303", "E0304", "E0307"]


@record
class Epoch(Record):
    """`train` samples (None: not known) for `ranks` data-parallel ranks with `pieces` micro-batches each."""

    train: int | None
    ranks: int
    pieces: int
    staged: bool  # true if there is a pipeline
    keep: bool  # true if the rest is kept as a batch
    steps: int | None  # of the training, if the job gives them

    def short(self, batch: int) -> int:
        """Returns the samples of the short batch that the training reaches; 0 if there is none, or it is unknown."""
        if not self.keep or self.train is None:
            return 0
        full, rest = divmod(self.train, batch)
        return rest if self.steps is None or self.steps > full else 0

    def fault(self, batch: int) -> Fault:
        """Returns the rule that an evenly divisible batch breaks."""
        if self.train is None:
            return ""
        if batch > self.train and not self.keep:
            return "E0303"
        short = self.short(batch)
        if 0 < short < self.ranks:
            return "E0304"
        return "E0307" if short and self.staged else ""

    def nearest_batches(self, batch: int) -> tuple[int, ...]:
        """Returns the batches nearest to this one, below and above, that divide evenly and break no rule."""
        multiple = self.ranks * self.pieces
        most = max(batch, self.train) if self.train is not None else batch + TRIED * multiple
        nearest_below = batch // multiple * multiple
        below = range(nearest_below if nearest_below < batch else nearest_below - multiple, 0, -multiple)[:TRIED]
        above = range(nearest_below + multiple, most + 1, multiple)[:TRIED]
        nearest = (next((b for b in side if not self.fault(b)), None) for side in (below, above))
        return tuple(b for b in nearest if b is not None)


def near_divisors(share: int, count: int) -> Iterator[int]:
    """Yields divisors of `share`, the nearest to `count` (at most all of it) first, those within `TRIED`."""
    count = min(count, share)
    candidates = chain([count], chain.from_iterable((count - d, count + d) for d in range(1, TRIED)))
    return (m for m in candidates if 1 <= m <= share and share % m == 0)


def check_batch(job: JobSpec, layout: Layout, epoch: Epoch) -> Iterator[Diagnostic]:
    """Reports a global batch that the ranks, the micro-batches or the end of an epoch cannot share."""
    if job.parallelism.data_shares is not None:
        if (yield from passes(_check_weights(job, epoch))):
            yield from _check_epoch(job, epoch)
    elif job.data.batch % epoch.ranks:
        yield from _report_share(job, epoch)
    else:
        yield from _check_pieces(job, layout, epoch)
        yield from _check_epoch(job, epoch)


def share_weights(parallelism: ParallelismSpec, ranks: int) -> tuple[int, ...]:
    """Returns the smallest whole numbers to which the shares of the data ranks are in proportion; () without
    `data_shares`. Shares that are measured begin as equal ones.
    """
    shares = parallelism.data_shares
    weights = (1,) * ranks if isinstance(shares, str) else shares or ()
    return tuple(weight // gcd(*weights) for weight in weights)


def _check_weights(job: JobSpec, epoch: Epoch) -> Iterator[Diagnostic]:
    """Reports shares of a batch that do not suit the data ranks, or that leave one of them without samples."""
    weights, batch, pieces = share_weights(job.parallelism, epoch.ranks), job.data.batch, epoch.pieces
    span = job.parallelism.value_span("data_shares")
    if len(weights) != epoch.ranks:
        equal = remove_field("parallelism.data_shares", "leave it out")
        only_data = all(getattr(job.parallelism, axis) in (None, 1) for axis in ("pipeline", "tensor", "context"))
        measured = set_field("parallelism.data_shares", "measured")
        other_shares = measured if only_data and job.parallelism.zero <= 1 else equal
        yield Diagnostic(
            "E0341",
            f"`data_shares` has {plural(len(weights), 'number')}, and the data axis {plural(epoch.ranks, 'rank')}",
            span,
            notes=(Note("the ranks come from here", _ranks_span(job)),),
            help=remedy("one number for each data rank, or ", other_shares),
        )
        return
    if batch % pieces == 0 and batch >= epoch.ranks * pieces:
        return
    written = job.parallelism.is_set("microbatches")
    multiples = [pieces * max(epoch.ranks, n) for n in (batch // pieces, batch // pieces + 1)]
    nearest = sorted({multiple for multiple in multiples if multiple != batch})
    yield Diagnostic(
        "E0342",
        f"a batch of {batch} does not make {plural(pieces, 'equal micro-batch')} for each of "
        f"{plural(epoch.ranks, 'data rank')}",
        job.data.value_span("batch"),
        label=division(batch, pieces) if batch % pieces else f"{batch} < {epoch.ranks} x {pieces}",
        notes=(Note("`parallelism.microbatches` is set here", job.parallelism.value_span("microbatches")),)
        if written
        else (),
        help=remedy("use ", either_batch(nearest)),
    )


def _ranks_span(job: JobSpec) -> Span | None:
    return job.parallelism.name_span("data") if job.parallelism.is_set("data") else _devices_span(job)


def _report_share(job: JobSpec, epoch: Epoch) -> Iterator[Diagnostic]:
    batch, ranks = job.data.batch, epoch.ranks
    span = _ranks_span(job)
    what = "`parallelism.data` is set here" if job.parallelism.is_set("data") else "the ranks come from `devices`"
    nearest = epoch.nearest_batches(batch)
    remedies: list[str] = [remedy("use ", either_batch(nearest))] if nearest else []
    if not any(b < batch for b in nearest):
        remedies.append("fewer ranks")
    yield Diagnostic(
        "E0301",
        f"a global batch of {batch} cannot be shared out over {ranks} data-parallel ranks",
        job.data.value_span("batch"),
        label=division(batch, ranks),
        notes=(Note(what, span),),
        help=join_remedies(", or ", remedies),
    )


def _check_pieces(job: JobSpec, layout: Layout, epoch: Epoch) -> Iterator[Diagnostic]:
    batch, ranks, pieces = job.data.batch, epoch.ranks, epoch.pieces
    share = batch // ranks
    if share % pieces == 0:
        return
    written = job.parallelism.is_set("microbatches")
    nearest = epoch.nearest_batches(batch)
    close = fitting_pieces(job, layout)
    remedies: list[str] = [either_field("parallelism.microbatches", close)] if close else []
    remedies += [remedy("a batch of ", either_batch(nearest))] if nearest else []
    yield Diagnostic(
        "E0302",
        f"a share of {plural(share, 'sample')} cannot be cut into {pieces} equal micro-batches",
        job.parallelism.value_span("microbatches") if written else job.data.value_span("batch"),
        label=f"{batch} / {ranks} = {share}" if ranks > 1 else "",
        notes=(Note("the global batch is set here", job.data.value_span("batch")),) if written else (),
        help=join_remedies(", or ", remedies) or "another batch, or another number of ranks",
    )


def either_batch(batches: Sequence[int]) -> str:
    return either_field("data.batch", batches, "{}")


def fitting_pieces(job: JobSpec, layout: Layout) -> list[int]:
    """Returns the two numbers of micro-batches nearest to the job's that divide its shares and suit its schedule."""
    share, stages = job.data.batch // layout.sizes["data"], layout.sizes["pipeline"]
    schedule = (job.parallelism.schedule, stages)

    def suits(pieces: int) -> bool:
        return stages == 1 or not demands(*schedule, pieces, layout.virtual_stages)

    return sorted(islice(filter(suits, near_divisors(share, layout.microbatches)), 2))


def _devices_span(job: JobSpec) -> Span | None:
    devices = job.devices
    return devices.name_span("gpus" if devices.gpus is not None else "cpus")


def _check_epoch(job: JobSpec, epoch: Epoch) -> Iterator[Diagnostic]:
    batch, train, ranks, fault = job.data.batch, epoch.train, epoch.ranks, epoch.fault(job.data.batch)
    if not fault or train is None:
        return
    full, remainder = divmod(train, batch)
    nearest_text, other_word = either_batch(epoch.nearest_batches(batch)), "drop" if epoch.keep else "keep"
    remedies: list[str] = []
    if not replace(epoch, keep=not epoch.keep).fault(batch):
        remedies.append(remedy(set_field("data.last_batch", other_word)))
    if fault == "E0303":
        yield Diagnostic(
            "E0303",
            f"an epoch of {plural(train, 'sample')} holds no full batch of {batch}, and the rest is dropped",
            job.data.value_span("batch"),
            help=join_remedies(", or ", [remedy("use ", nearest_text), *remedies] if nearest_text else remedies)
            or "fewer ranks, or more data",
        )
        return
    remedies += [remedy("a batch of ", nearest_text)] if nearest_text else []
    count_text = f"{train} = {full} x {batch} + {remainder}"
    if fault == "E0304":
        yield Diagnostic(
            "E0304",
            f"the last batch of an epoch holds {remainder} of {train} samples: "
            f"{ranks - remainder} of {ranks} data-parallel ranks would have none",
            job.data.value_span("last_batch"),
            label=count_text,
            notes=(Note("the global batch is set here", job.data.value_span("batch")),),
            help=join_remedies(", or ", [*remedies, "fewer ranks"]),
        )
    else:
        yield Diagnostic(
            "E0307",
            f"a pipeline needs micro-batches of one shape, and an epoch's last batch holds "
            f"{plural(remainder, 'sample')}",
            job.data.value_span("last_batch"),
            label=count_text,
            help=join_remedies(", or ", remedies) or "another batch",
        )


def are_comparable(weights: Sequence[float]) -> bool:
    """True if the samples that the weights of a mixture ask for can be counted."""
    return max(weights) <= FARTHEST * min(weights) and isfinite(sum(weights))


def counts(mixture: Mixture, train: Sequence[int]) -> tuple[int, ...]:
    """Returns how many training samples of each source an epoch has; `train` has the samples of each source."""
    weights = mixture.weights or tuple(map(float, train))
    if mixture.samples is not None:
        return _shared_out(mixture.samples, weights)
    ends = max if mixture.stopping_strategy == "all_exhausted" else min
    last_ends = ends(range(len(train)), key=lambda n: train[n] / weights[n])
    return tuple(round(train[last_ends] * weight / weights[last_ends]) for weight in weights)


def _shared_out(samples: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Shares out by largest remainders."""
    exact = [samples * weight / sum(weights) for weight in weights]
    shares = [int(value) for value in exact]
    most = sorted(range(len(exact)), key=lambda n: shares[n] - exact[n])
    for n in most[: samples - sum(shares)]:
        shares[n] += 1
    return tuple(shares)
