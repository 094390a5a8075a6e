"""The rule on random numbers that a loss of the user's own draws. W0608."""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.ir.network_facts import NetworkFacts
from dslc.compiler.placement.draws import uncontrolled_loss_draw
from dslc.compiler.placement.layout import Layout
from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.language.job import JobSpec
from dslc.dsl.remedy import remedy, set_field


def check_loss_draws(job: JobSpec, layout: Layout | None, draws: NetworkFacts | None) -> Iterator[Diagnostic]:
    """Warns of a loss whose random numbers each rank or micro-batch draws for itself."""
    if draws is None or layout is None or (layout.world_size == 1 and layout.microbatches == 1):
        return
    uncontrolled = uncontrolled_loss_draw(job, layout, draws)
    if uncontrolled is None:
        return
    place, reason = uncontrolled
    where = "on each rank" if layout.world_size > 1 else "for each micro-batch than for a whole batch"
    yield Diagnostic(
        "W0608",
        f"the loss draws random numbers{f' ({place.line})' if place.line else ''}, different ones {where}: training "
        "agrees with one process in distribution only",
        job.model.value_span("loss"),
        label=reason,
        help=remedy(set_field("train.dropout_generator", "counter"))
        if job.train.dropout_generator == "torch"
        else "draw them in the network's `forward`, or in the data set, where they follow from the sample",
    )
