"""Rules for a step of the user's own: it runs over the data axis, with any `zero`. E0620, E0621, W0620, W0624,
W0625.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.ir.network_facts import NetworkFacts
from dslc.compiler.placement.draws import draws_of_own_step, known_uncontrolled
from dslc.compiler.placement.layout import Layout
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import PythonNetwork
from dslc.dsl.remedy import remedy, remove_at, set_field
from dslc.dsl.source import Span


def check_own_step(job: JobSpec) -> Iterator[Diagnostic]:
    if job.train.step is None:
        return
    note = Note("the step", job.train.value_span("step"))
    loss, network = job.model.loss, job.model.network
    if not isinstance(loss, c.NetworkLoss):
        yield Diagnostic(
            "E0621",
            f"a step of your own returns the loss that is logged, and `{loss.word}` is another",
            job.model.loss_span,
            notes=(note,),
            help=remedy(set_field("model.loss", "own()")),
        )
    if not isinstance(network, PythonNetwork):
        yield Diagnostic(
            "E0621",
            "a step of your own calls the parts of a network of your own",
            job.model.value_span("network"),
            notes=(note,),
            help='`network = python("module:function")`',
        )
    yield Diagnostic(
        "W0620",
        "what a step of your own holds and exchanges is not known before it runs: there is no account of its memory",
        job.train.value_span("step"),
        help="`dslc run --profile` measures it",
    )


def check_step_draws(job: JobSpec, layout: Layout | None, draws: NetworkFacts | None) -> Iterator[Diagnostic]:
    """Warns of a step that draws random numbers which each rank draws for itself, and of one that compares samples."""
    if draws is None or layout is None or layout.world_size == 1:
        return
    if draws.loss_mixes:
        yield Diagnostic(
            "W0625",
            f"the losses of the step depend on the other samples of its batch, and each of {layout.world_size} ranks "
            "has a part of the batch: the training is not that of one process",
            job.train.value_span("step"),
            help="one rank; or, of a training with one loss and one optimizer, a loss of a whole batch instead of a "
            'step: `python("module:function", over = all)`',
        )
    if draws_of_own_step(job, draws) is not None:
        return
    known = known_uncontrolled(draws)
    if known is None and draws.torch_draws is None:
        return
    place, reason = known or (draws.torch_draws, "")
    by_torch = job.train.dropout_generator == "torch"
    yield Diagnostic(
        "W0624",
        f"the step draws random numbers{f' ({place.line})' if place is not None and place.line else ''}, which are "
        f"others on each of {layout.world_size} ranks than in one process",
        job.train.value_span("step"),
        label="`train.dropout_generator` is `torch`" if by_torch else reason,
        help=remedy(set_field("train.dropout_generator", "counter"))
        if by_torch
        else "draw them in the data set, whose random numbers follow from the seed and the sample's number",
    )


def check_step_fields(job: JobSpec, layout: Layout | None) -> Iterator[Diagnostic]:
    """Reports axes and fields that do not leave the step to the user."""
    for what, span in _excluded(job, layout) if job.train.step is not None else ():
        yield Diagnostic(
            "E0620",
            f"{what} changes what happens within a step, and this job does its steps itself",
            span,
            notes=(Note("the step", job.train.value_span("step")),),
            help=remedy(remove_at(span, "leave one of the two out")),
        )


def _excluded(job: JobSpec, layout: Layout | None) -> Iterator[tuple[str, Span | None]]:
    """Yields what does not go with such a step."""
    for axis in ("pipeline", "tensor", "context"):
        if layout is not None and layout.sizes[axis] > 1:
            yield f"the {axis} axis", job.parallelism.value_span(axis)
    if layout is not None and layout.microbatches > 1:
        yield "`microbatches`", job.parallelism.value_span("microbatches")
    for name in ("recompute", "offload"):
        if job.memory.is_set(name):
            yield f"`memory.{name}`", job.memory.value_span(name)
    if job.train.compile:
        yield "`compile`", job.train.value_span("compile")
    if job.train.on_nonfinite == "skip":
        yield "`on_nonfinite = skip`", job.train.value_span("on_nonfinite")
