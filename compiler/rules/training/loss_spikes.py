"""The rule of rewinds after a spike of the loss (`train.on_spike`): there is a checkpoint to go back to. E0665."""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.placement.workload import Workload, in_steps
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.goals import RewindOnSpike
from dslc.dsl.language.job import JobSpec
from dslc.dsl.remedy import remedy, set_argument, set_field
from dslc.dsl.words import plural


def check_spikes(job: JobSpec, workload: Workload | None) -> Iterator[Diagnostic]:
    """Reports a rewind without checkpoints at known steps, one to before the last checkpoint, and one of a stream."""
    rewind, every = job.train.on_spike, job.checkpoint.every
    if not isinstance(rewind, RewindOnSpike):
        return
    span = job.train.value_span("on_spike")
    half = plural(max(1, rewind.steps // 2), "step")
    if every is None or every.dimension == "time":
        where = () if every is None else (Note("checkpoints follow the clock", job.checkpoint.value_span("every")),)
        yield Diagnostic(
            "E0665",
            "a rewind goes back to a checkpoint, and `checkpoint.every` is not set in steps or epochs",
            span,
            notes=where,
            help=remedy(set_field("checkpoint.every", half, f"`checkpoint {{ every = {half} }}`")),
        )
    if workload is None:
        return
    if every is not None and (steps := in_steps(every, workload)) is not None and steps > rewind.steps:
        yield Diagnostic(
            "E0665",
            f"a rewind by {plural(rewind.steps, 'step')} needs a checkpoint as often, and they are "
            f"{plural(steps, 'step')} apart",
            rewind.value_span("steps") if rewind.is_set("steps") else span,
            notes=(Note("checkpoints", job.checkpoint.value_span("every")),),
            help=remedy(set_field("checkpoint.every", half), ", or ", set_argument(rewind.span, "steps", steps)),
        )
    if workload.stream is not None:
        yield Diagnostic(
            "E0665",
            "the samples of a stream have no numbers by which skipped ones can be listed",
            span,
            notes=(Note("the stream", job.data.value_span("source")),),
            help=remedy(set_field("train.on_spike", "note", "`on_spike = note`"), ", or data with a length"),
        )
