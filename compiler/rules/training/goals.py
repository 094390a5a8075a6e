"""Rules for goals: the metrics that early stopping, the best checkpoint and a schedule look at. E0317.

Limits: the names within a dict that a user's own metric returns are known once the metric was tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dslc.compiler.placement.workload import Workload
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import metrics as m
from dslc.dsl.language.calls import PythonSource, parts_of
from dslc.dsl.language.goals import Goal
from dslc.dsl.language.job import JobSpec, goals_of
from dslc.dsl.language.lr_schedules import Plateau
from dslc.dsl.language.registry import Call
from dslc.dsl.language.suggest import meant_instead, nearest_choice
from dslc.dsl.remedy import remedy, set_argument, set_field
from dslc.dsl.source import Span
from dslc.dsl.words import listed

LOSS = "loss"  # every evaluation has it


def check_goals(job: JobSpec, workload: Workload | None) -> Iterator[Diagnostic]:
    """Reports each goal whose metric the evaluations do not give as one number, and goals of a job that has none."""
    named: dict[str, Call] = {m.name_of(metric): metric for metric in job.evaluate.metrics}
    for field, goal in goals_of(job):
        if workload is not None and workload.validation == 0:
            yield Diagnostic(
                "E0317",
                f"`{field}` looks at evaluations, and the job holds no samples out",
                job.data.value_span("validation") if job.data.is_set("validation") else goal.span,
                help=remedy(set_field("data.validation", "10%", "`data.validation = 10%`")),
            )
            continue
        if workload is not None and workload.sets:
            yield from _check_set(job, field, goal, workload, named)
            continue
        name, of_set = goal.metric, goal.metric.partition(".")[2]
        if (of_set in named or of_set == LOSS or _within(of_set, named)) and _may_have_sets(job, workload):
            name = of_set
        metric = named.get(name)
        if metric is None and name != LOSS and not _within(name, named):
            yield from _report_missing(job, field, goal.metric, goal.value_span("metric"), [*named, LOSS])
        elif metric is not None and _is_list(metric):
            yield Diagnostic(
                "E0317",
                f"`{goal.metric}` is a list of numbers, and `{field}` needs one",
                goal.value_span("metric"),
                notes=(Note("the metric", metric.span or job.evaluate.value_span("metrics")),),
                help=remedy(set_argument(metric.span, "average", "macro", f"`{metric.word}(average = macro, …)`"))
                if hasattr(metric, "average")
                else "another metric",
            )


def _may_have_sets(job: JobSpec, workload: Workload | None) -> bool:
    """True if a source of the user's own, which was not called, may give validation sets with names."""
    unknown = workload is None or workload.validation is None
    return unknown and any(isinstance(source, PythonSource) for source in parts_of(job.data.source))


def _check_set(
    job: JobSpec, field: str, goal: Goal | Plateau, workload: Workload, named: Mapping[str, Call]
) -> Iterator[Diagnostic]:
    """Reports a goal that does not name a metric of one of several validation sets."""
    names = [f"{name}.{metric}" for name, _ in workload.sets for metric in dict.fromkeys((*named, LOSS))]
    own, _, metric = goal.metric.partition(".")
    if goal.metric not in names and not (own in dict(workload.sets) and _within(metric, named)):
        yield from _report_missing(job, field, goal.metric, goal.value_span("metric"), names)
    elif (of := named.get(metric)) is not None and _is_list(of):
        yield Diagnostic(
            "E0317", f"`{goal.metric}` is a list of numbers, and `{field}` needs one", goal.value_span("metric")
        )


def check_names(job: JobSpec, metric: m.PythonMetric, numbers: Sequence[str]) -> Iterator[Diagnostic]:
    """Reports each goal that looks for a number at a user's own metric, which gives these."""
    name = m.name_of(metric)
    for field, goal in goals_of(job):
        if goal.metric not in numbers and (goal.metric == name or _within(goal.metric, {name: metric})):
            meant = nearest_choice(goal.metric, numbers)
            yield Diagnostic(
                "E0317",
                f"`{field}` looks for a number `{goal.metric}`, which `{metric.function}` does not give",
                goal.value_span("metric"),
                notes=(Note("the metric", metric.span),),
                help=meant_instead(meant, goal.value_span("metric"))
                or f"it gives {listed(numbers) or 'no single number'}",
            )


def _within(name: str, named: Mapping[str, Call]) -> bool:
    """True for a number within the dict of a user's own metric: `name.key`."""
    return any(isinstance(metric, m.PythonMetric) and name.startswith(f"{own}.") for own, metric in named.items())


def _is_list(metric: Call) -> bool:
    return isinstance(metric, m.ConfusionMatrix) or getattr(metric, "average", "") == "each"


def _report_missing(job: JobSpec, field: str, name: str, span: Span | None, names: list[str]) -> Iterator[Diagnostic]:
    meant = nearest_choice(name, names)
    yield Diagnostic(
        "E0317",
        f"`{field}` looks at `{name}`, which is not among the metrics of the evaluations",
        span,
        notes=(Note("the metrics", job.evaluate.value_span("metrics")),) if job.evaluate.is_set("metrics") else (),
        help=meant_instead(meant, span) or f"{listed(sorted(set(names)))}; or add it to `evaluate.metrics`",
    )
