"""How much work there is: samples, batches, shares and steps, from the job and what is known of its data.

Sizes that depend on data nobody has seen yet are None. The rules on them are here too, because what cannot be shared
out has no size: E03xx.
"""

from __future__ import annotations

from dataclasses import dataclass

from dslc.compiler.facts import SourceFacts
from dslc.compiler.layout import Layout
from dslc.dsl import calls as c
from dslc.dsl.diagnostics import Diagnostic, Note, Report, division
from dslc.dsl.job import JobSpec
from dslc.dsl.registry import Quantity
from dslc.dsl.source import Span

# Sources whose targets are known to be classes from 0 up.
_CLASSES_FROM_0 = c.Digits | c.Stdlib | c.Text | c.Tokens | c.Images | c.MNIST | c.CIFAR10 | c.Synthetic


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Counts are of samples (sequences, for text) unless they say otherwise."""

    train: int | None
    validation: int | None
    split: str  # random, tail, given, none
    batch: int
    share: int  # of one data rank
    microbatch: int  # the largest micro-batch
    last: int | None  # samples of an epoch's last, partial batch that is kept; 0 if there is none
    steps_per_epoch: int | None
    steps: int | None


def measure_out(job: JobSpec, layout: Layout, source: SourceFacts, report: Report) -> Workload | None:
    """The workload, or None with the reason in the report."""
    before = len(report.errors)
    _missing(job, source, report)
    _check_shares(job, layout, report)
    train, validation, split = _split(job, source, report)
    if len(report.errors) > before:
        return None
    data = job.data
    ranks = layout.sizes["data"]
    last: int | None = None
    per_epoch: int | None = None
    if train is not None:
        full, rest = divmod(train, data.batch)
        last = rest if data.last_batch == "keep" else 0
        per_epoch = full + (1 if last else 0)
        _check_epoch(job, layout, train, full, last, report)
    elif data.last_batch == "drop":
        last = 0
    if len(report.errors) > before:
        return None
    steps = job.train.steps
    if steps is None and job.train.epochs is not None and per_epoch is not None:
        steps = job.train.epochs * per_epoch
    share = data.batch // ranks
    return Workload(
        train=train,
        validation=validation,
        split=split,
        batch=data.batch,
        share=share,
        microbatch=-(-share // layout.microbatches),
        last=last,
        steps_per_epoch=per_epoch,
        steps=steps,
    )


def in_steps(every: Quantity, workload: Workload) -> int | None:
    """`500 steps` or `2 epochs` as a count of steps, at least one; None if an epoch's length is unknown."""
    if every.dimension == "steps":
        return max(1, int(every.value))
    if every.dimension == "epochs" and workload.steps_per_epoch is not None:
        return max(1, round(every.value * workload.steps_per_epoch))
    return None


def _missing(job: JobSpec, source: SourceFacts, report: Report) -> None:
    if source.missing:
        elsewhere = source.code in ("E0309", "E0803")  # another machine may have it
        found = Diagnostic(code=source.code, message=source.missing, span=job.data.at("source"), help=source.help)
        report.extend([found.as_warning() if elsewhere else found])


def _check_shares(job: JobSpec, layout: Layout, report: Report) -> None:
    batch, ranks = job.data.batch, layout.sizes["data"]
    where = job.parallelism.named("data") if job.parallelism.is_set("data") else _devices_span(job)
    what = "`parallelism.data` is set here" if job.parallelism.is_set("data") else "the ranks come from `devices`"
    if batch % ranks:
        each = ranks * (layout.microbatches if job.parallelism.is_set("microbatches") else 1)
        below = batch // each * each
        report.add(
            "E0301",
            f"a global batch of {batch} cannot be shared out over {ranks} data-parallel ranks",
            job.data.at("batch"),
            label=division(batch, ranks),
            notes=[Note(message=what, span=where)],
            help=f"use {below} or {below + each}" if below else f"use {each}, or fewer ranks",
        )
        return
    share = batch // ranks
    if layout.sizes["pipeline"] > 1 and share % layout.microbatches == 0:
        return
    if share % layout.microbatches:
        written = job.parallelism.is_set("microbatches")
        divisors = [m for m in range(1, share + 1) if share % m == 0]
        close = sorted(sorted(divisors, key=lambda m: abs(m - layout.microbatches))[:2])
        report.add(
            "E0302",
            f"a share of {share} samples cannot be cut into {layout.microbatches} equal micro-batches",
            job.parallelism.at("microbatches") if written else job.data.at("batch"),
            label=f"{batch} / {ranks} = {share}" if ranks > 1 else "",
            notes=[Note(message="the global batch is set here", span=job.data.at("batch"))] if written else (),
            help=f"`microbatches = {' or '.join(map(str, close))}`, or a batch that is a multiple of "
            f"{ranks * layout.microbatches}",
        )


def _devices_span(job: JobSpec) -> Span | None:
    devices = job.devices
    return devices.named("gpus" if devices.gpus is not None else "cpus")


def _split(job: JobSpec, source: SourceFacts, report: Report) -> tuple[int | None, int | None, str]:
    """Samples to train on, samples held out, and how they are told apart."""
    ratio = job.data.validation
    if source.validation_samples is not None:
        if ratio:
            report.add(
                "E0306",
                "the source brings a validation set of its own, and `data.validation` would hold out another",
                job.data.at("validation"),
                help="leave `validation` out",
            )
        return source.samples, source.validation_samples, "given"
    if ratio == 0:
        return source.samples, 0, "none"
    split = "tail" if source.stream else "random"
    if source.samples is None:
        return None, None, split
    held = int(source.samples * ratio + 0.5)
    if held == 0 or held == source.samples:
        left = "nothing is held out" if held == 0 else "nothing is left to train on"
        report.add(
            "E0305",
            f"{ratio:.4g} of {source.samples} samples: {left}",
            job.data.at("validation"),
            label=f"{source.samples} x {ratio:.4g} = {source.samples * ratio:.3g}",
            help=f"a share between {1 / source.samples:.2g} and {1 - 1 / source.samples:.4g}, or more data",
        )
    return source.samples - held, held, split


def _check_epoch(job: JobSpec, layout: Layout, train: int, full: int, last: int, report: Report) -> None:
    ranks = layout.sizes["data"]
    if full == 0 and job.data.last_batch == "drop":
        report.add(
            "E0303",
            f"an epoch of {train} samples holds no full batch of {job.data.batch}, and what is left is dropped",
            job.data.at("batch"),
            help=f"a batch of {max(ranks, train // ranks * ranks)} or less, or `last_batch = keep`",
        )
    elif 0 < last < ranks:
        report.add(
            "E0304",
            f"the last batch of an epoch holds {last} of {train} samples: "
            f"{ranks - last} of {ranks} data-parallel ranks would have none",
            job.data.at("last_batch"),
            label=f"{train} = {full} x {job.data.batch} + {last}",
            notes=[Note(message="the global batch is set here", span=job.data.at("batch"))],
            help="`last_batch = drop`, another batch, or fewer ranks",
        )
    elif last and layout.sizes["pipeline"] > 1:
        report.add(
            "E0307",
            f"a pipeline needs micro-batches of one shape, and the last batch of an epoch holds {last} samples",
            job.data.at("last_batch"),
            label=f"{train} = {full} x {job.data.batch} + {last}",
            help="`last_batch = drop`, or a batch that divides the epoch",
        )


def counts_kept(job: JobSpec) -> bool:
    """Whether the ranks have to agree, in each step, on how many targets are not ignored.

    Where all targets are classes from 0 up and none of these is ignored, their count is arithmetic.
    """
    loss = job.model.loss
    return isinstance(loss, c.CrossEntropy) and not (isinstance(job.data.source, _CLASSES_FROM_0) and loss.ignore < 0)
