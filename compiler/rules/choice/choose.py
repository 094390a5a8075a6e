"""Chooses the plan of a job that leaves fields to the compiler, or says why there is none: E0490 to E0493, W0494."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator

from dslc.compiler.cost.estimate import missing_figures
from dslc.compiler.cost.reuse import Reuse
from dslc.compiler.ir.facts import MachineFacts
from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.placement.exchange import exchange_of
from dslc.compiler.placement.layout import Layout, lay_out
from dslc.compiler.rules.choice.plan_choice import PlanChoice, PricedPlan
from dslc.compiler.rules.choice.search import FactsOf, PlanSearch, Progress
from dslc.compiler.rules.choice.space import PlanSpace
from dslc.dsl.diagnostics import Diagnostic, Findings, Note, Report
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import Range
from dslc.dsl.meaning.auto_fields import auto_span, with_defaults, with_values
from dslc.dsl.words import listed, plural

_AXES = ("parallelism.data", "parallelism.pipeline", "parallelism.tensor", "parallelism.context")


def choose_plan(
    job: JobSpec,
    fields: Collection[str],
    facts_of: FactsOf,
    reuse: Reuse,
    machine: MachineFacts | None = None,
    progress: Progress = lambda done, of: None,
) -> Findings[PlanChoice | None]:
    """Returns the choice of `fields`; None if the devices are unknown; without a plan, an error, if none will do."""
    layout = devices_of(job, machine)
    if layout is None:
        return None
    refusal = next(_refusals(job, fields, layout), None)
    if refusal is not None:
        yield refusal
        return None
    search = PlanSearch(with_defaults(job, fields), facts_of, Reuse(), progress)
    choice = search.run(PlanSpace(job=job, layout=layout, fields=tuple(fields)))
    reuse.spent += search.work
    if choice.plan is None:
        yield from search.shared_errors or _no_plan(job, choice, layout)
    return choice


def with_plan(job: JobSpec, fields: Collection[str], plan: PricedPlan) -> JobSpec:
    return with_values(with_defaults(job, fields), plan.settings)


def devices_of(job: JobSpec, machine: MachineFacts | None = None) -> Layout | None:
    """Returns the layout of the job's devices on the data axis; None if they are not known."""
    plain = with_defaults(job, (*_AXES, "parallelism.virtual_stages"))
    return Report().collect(lay_out(plain, machine))


def _refusals(job: JobSpec, fields: Collection[str], layout: Layout) -> Iterator[Diagnostic]:
    """Reports a job whose fields may not be chosen."""
    span = auto_span(job)
    if isinstance(job.devices.nodes, Range):
        yield Diagnostic(
            "E0492",
            f"`auto` needs the count of devices, and the job takes {layout.node_counts[0]} to {layout.nodes} nodes",
            span or job.devices.value_span("nodes"),
            notes=(Note("the range is here", job.devices.value_span("nodes")),),
            help="one count of nodes; or write the axes, of which `data` grows with the nodes",
        )
    plain = with_defaults(job, _AXES)
    exchange = exchange_of(plain, layout)
    changing = [path for path in (_AXES if layout.nodes > 1 else _AXES[:1]) if path in fields]
    if exchange is not None and changing:
        yield Diagnostic(
            "E0493",
            f"`{exchange.word}` is another training on another number of data ranks, and "
            f"`{changing[0]}` is left to the compiler",
            span or job.parallelism.span,
            help=f"write {listed(changing)}: the compiler chooses only what leaves the training as it is",
        )


def _no_plan(job: JobSpec, choice: PlanChoice, layout: Layout) -> Iterator[Diagnostic]:
    """Reports that no plan will do: the limit that is closest, or that no time is known."""
    span = auto_span(job) or job.parallelism.span or job.devices.span
    admissible = [plan for plan in choice.plans if plan.is_admissible]
    if admissible:
        yield _unknown_time(job, admissible, layout)
        return
    priced = [plan for plan in choice.plans if not plan.code]
    counts = [f"{plural(count, 'plan')} refused by {code}" for code, count in choice.refusals.most_common(3)]
    tried = f"{plural(len(choice.plans), 'plan')}{'' if choice.is_exact else f' of {choice.space:,}'}"
    if not priced:
        example = choice.plans[0]
        yield Diagnostic(
            "E0490",
            f"no plan is admissible: the rules refuse each of {tried}",
            span,
            notes=_notes([*counts, f"{example.text()}: {example.message}"]),
            help="another batch or count of devices; `dslc choose` lists the plans",
        )
        return
    fitting = [plan for plan in priced if plan.fits]
    if fitting:
        nearest = min(
            fitting, key=lambda plan: (len(plan.broken_promises), plan.step_time or 0.0, plan.peak, plan.text())
        )
        message = f"no plan keeps every promise: of {tried} the nearest is {nearest.text()}"
        reasons, help = list(nearest.broken_promises), "relax the promise, or take more devices"
        reasons += [f"{plural(len(priced) - len(fitting), 'plan')} would not fit"] * (len(fitting) < len(priced))
    else:
        nearest = min(priced, key=lambda plan: (plan.peak, plan.text()))
        limit = nearest.limit or 0
        message = (
            f"no plan fits: of {tried} the one of least memory holds {byte_text(nearest.peak)}, "
            f"{byte_text(nearest.peak - limit)} over the limit of {byte_text(limit)}"
        )
        reasons = [f"it is {nearest.text()}"]
        help = "more devices, a smaller batch, or a lower precision"
        if job.memory.limit:
            help += "; or a higher `memory.limit`"
    yield Diagnostic("E0490", message, span, notes=_notes([*reasons, *counts]), help=help)


def _unknown_time(job: JobSpec, plans: list[PricedPlan], layout: Layout) -> Diagnostic:
    span = auto_span(job) or job.parallelism.span or job.devices.span
    lacks = next((plan.lacks for plan in plans if plan.lacks), "")
    if lacks:
        message = f"the times of plans are not known: the calibration lacks {lacks}"
    else:
        figures = " and ".join(f"`{figure}`" for figure in missing_figures(layout, job.train.precision.word))
        message = (
            f"the times of {plural(len(plans), 'admissible plan')} are not known, as the catalogue lacks {figures}"
        )
    name = job.source.name if job.source.name.endswith(".plt") else "JOB"
    command = f"`dslc calibrate {shlex.quote(name)}` measures them, on the machine that trains"
    help = command if layout.device == "cpu" else "name a `devices.kind` of the catalogue"
    return Diagnostic("E0491", message, span, help=help)


def untraced(job: JobSpec) -> Diagnostic:
    """Returns the warning that nothing is chosen, as the network was not traced."""
    return Diagnostic(
        "W0494",
        "the plan is not chosen: the layers of the network are known only after tracing",
        auto_span(job),
        notes=(Note("the network", job.model.value_span("network")),),
        help="`--trace` calls the function that makes it; `dslc run` always does",
    )


def _notes(texts: list[str]) -> tuple[Note, ...]:
    return tuple(Note(message=text) for text in texts)
