"""Says what an exchange costs a step and what it saves, where the links are what a plan waits for: N0640.

A note, not a warning: the job is good as it is, and another exchange is another training. The times are the estimate's,
so a note is given only where the catalogue has the speeds of the devices and their links.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import islice

from dslc.compiler.cost.cost import RankCost, rank_costs
from dslc.compiler.cost.estimate import StepEstimate, estimate
from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.ir.number_text import time_text
from dslc.compiler.placement.exchange import exchange_of
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.staging import Staging
from dslc.compiler.rules.parallelism.exchange import check_exchange, exchange_span
from dslc.dsl.diagnostics import Diagnostic, has_errors
from dslc.dsl.language import exchanges as x
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.optimizers import Adam, Compressed
from dslc.dsl.language.registry import fields as arguments

WAITS = 0.2  # of a step's time, from which on its links are worth a note
LEAST = 1e-3  # seconds of waiting: less is within what the estimate leaves out
MOST = 4  # exchanges named
# In the order of what they give up: tried as a remedy with their defaults.
TRIED: tuple[x.Exchange, ...] = (x.Bf16Gradients(), x.ByteGrad(), x.PowerSGD(), x.LocalSGD(), x.DiLoCo())


def check_network(staging: Staging, costs: tuple[RankCost, ...], found: StepEstimate) -> Iterator[Diagnostic]:
    """Adds the note, if the plan waits for its network, or exchanges otherwise than exactly."""
    job, layout, step = staging.job, staging.layout, found.step_time
    if not step or layout.sizes["data"] == 1 or job.train.step is not None:
        return
    exchange = staging.sharding.exchange
    if exchange is not None:
        exact = _time(staging, _exactly(job))
        if exact is not None and exact.step_time and exact.exposed >= LEAST:
            yield Diagnostic(
                "N0640",
                f"a step takes {time_text(step)} with `{exchange.word}`, and would take "
                f"{time_text(exact.step_time)} with exact sums",
                exchange_span(job),
                help="both are estimates, from the speeds in the catalogue",
            )
        return
    if found.exposed < max(LEAST, WAITS * step):
        return
    others = list(islice(_faster_exchanges(staging, step), MOST))
    if others:
        times = ", ".join(f"`{word}` {time_text(seconds)}" for word, seconds in others)
        yield Diagnostic(
            "N0640",
            f"a step waits {time_text(found.exposed)} of its {time_text(step)} for gradients on their way",
            job.parallelism.value_span("gradients") if job.parallelism.is_set("gradients") else job.devices.span,
            help=f"other exchanges, each another training (docs/exchanges.md), would take a step in {times}",
        )


def _exactly(job: JobSpec) -> JobSpec:
    optimizer, parallelism = job.train.optimizer, replace(job.parallelism, gradients=x.Allreduce())
    if isinstance(optimizer, Compressed):
        known = {f.name for f in fields(Adam)}
        same = {f.name: getattr(optimizer, f.name) for f in arguments(type(optimizer)) if f.name in known}
        return replace(job, parallelism=parallelism, train=replace(job.train, optimizer=Adam(**same)))
    return replace(job, parallelism=parallelism)


def _faster_exchanges(staging: Staging, step: float) -> Iterator[tuple[str, float]]:
    """Yields the faster exchanges that this job may have, as they are written: those first that give up least."""
    for other in TRIED:
        job = replace(staging.job, parallelism=replace(staging.job.parallelism, gradients=other))
        if not _allowed(job, staging.layout, staging.model):
            continue
        found = _time(staging, job)
        if found is not None and found.step_time and found.step_time < (1 - WAITS) * step:
            period = getattr(other, "period", None)
            yield f"{other.word}({f'period = {period}' if period else ''})", found.step_time


def _allowed(job: JobSpec, layout: Layout, model: ModelGraph) -> bool:
    return exchange_of(job, layout) is not None and not has_errors(check_exchange(job, layout, model))


def _time(staging: Staging, job: JobSpec) -> StepEstimate | None:
    """Returns the estimate of the same work with another exchange."""
    other = replace(staging, job=job)
    return estimate(other, rank_costs(other))
