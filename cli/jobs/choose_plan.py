"""Chooses the fields that a job leaves to the compiler, before it is analysed as if they were written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from dslc.compiler.cost.reuse import Reuse
from dslc.compiler.ir.facts import Facts
from dslc.compiler.placement.schedules import SPLITS_BACKWARD
from dslc.compiler.placement.sharding import low_copy
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.rules.choice.choice_text import chosen_line
from dslc.compiler.rules.choice.choose import choose_plan, untraced, with_plan
from dslc.compiler.rules.choice.plan_choice import PlanChoice, PricedPlan
from dslc.compiler.rules.choice.search import Progress
from dslc.dsl.diagnostics import Diagnostic, Findings, Report, TooManyErrors
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.auto_fields import SEARCHED, auto_fields, settings_text, without_auto
from dslc.dsl.meaning.load import LoadResult
from dslc.probe.collect_facts import collect_facts
from dslc.terminal.progress_bar import progress_bar


class FactsOfPlans:
    """The facts of a job with other plans: gathered once, except for a user's network, which is traced for its axes."""

    def __init__(self, job: JobSpec, facts: Facts, *, trace: bool, run: bool) -> None:
        self._traced, self._run = trace and job.model.has_user_network, run
        self._facts: dict[tuple[object, ...], tuple[Facts, Sequence[Diagnostic]]] = {self._key(job): (facts, ())}

    def _key(self, job: JobSpec) -> tuple[object, ...]:
        """Returns all that the facts of a network depend on."""
        if not self._traced:
            return ()
        parallelism = job.parallelism
        sharded = (parallelism, job.memory) if low_copy(job) else ()
        staged = parallelism.pipeline > 1
        return (parallelism.tensor, parallelism.context, staged, staged and parallelism.schedule in SPLITS_BACKWARD,
                sharded)  # fmt: skip

    def __call__(self, job: JobSpec) -> tuple[Facts, Iterable[Diagnostic]]:
        key = self._key(job)
        if key not in self._facts:
            report, facts = Report(), Facts()
            with contextlib.suppress(TooManyErrors):
                facts = report.collect(collect_facts(job, trace=True, run=self._run))
            self._facts[key] = facts, report.found
        return self._facts[key]

    def chosen_facts(self, job: JobSpec) -> Findings[Facts]:
        """Returns the facts of the chosen job, as if it were written."""
        if self._traced and self._key(job) != next(iter(self._facts)):
            return (yield from collect_facts(job, trace=True, run=self._run))
        return self(job)[0]


def choose_fields(
    job: JobSpec, facts: Facts, reuse: Reuse, *, trace: bool, run: bool
) -> Findings[tuple[JobSpec, Facts, PlanChoice | None]]:
    """Returns the job with the chosen values, its facts, and the choice; None if it yields why nothing was chosen.
    `facts` belong to the job with defaults in their place.
    """
    plain = without_auto(job)
    if job.model.has_user_network and facts.model is None:
        yield untraced(job)
        return plain, facts, None
    facts_of = FactsOfPlans(plain, facts, trace=trace, run=run)
    with search_progress() as progress:
        choice = yield from choose_plan(job, auto_fields(job), facts_of, reuse, facts.machine, progress)
    if choice is None or choice.plan is None:
        return plain, facts, None
    chosen = with_plan(job, choice.fields, choice.plan)
    return chosen, (yield from facts_of.chosen_facts(chosen)), choice


def explore_plans(
    job: JobSpec, report: Report, *, trace: bool, fields: Sequence[str] = SEARCHED, progress: Progress | None = None
) -> PlanChoice | None:
    """Searches the plans of a job, whatever it says of the `fields`; returns None with the reasons in the report.
    `progress` receives the count of plans that are done and of all; by default a terminal shows it.
    """
    plain = without_auto(job)
    facts = report.collect(collect_facts(plain, trace=trace and not report.errors, run=False))
    if job.model.has_user_network and facts.model is None:
        if not report.errors:
            report.extend([replace(untraced(job), code="E0494", help="`--trace` calls the function that makes it")])
        return None
    with search_progress() if progress is None else contextlib.nullcontext(progress) as shown:
        facts_of = FactsOfPlans(plain, facts, trace=trace, run=False)
        choice = report.collect(choose_plan(job, fields, facts_of, Reuse(), facts.machine, shown))
    if choice is None and not report.errors:
        report.collect(analyse(plain, facts))  # which says why its devices are not known
    return choice


def price_written(job: JobSpec, *, trace: bool) -> PricedPlan | None:
    """Returns the figures of a job as it is written; None if there are none."""
    choice = explore_plans(job, Report(), trace=trace, fields=())
    return choice.plans[0] if choice else None


def chosen_text(analysis: Analysis | None) -> str:
    """Returns what was chosen for a job, in one line; "" if it leaves nothing to the compiler."""
    return chosen_line(analysis.choice) if analysis is not None and analysis.choice is not None else ""


def with_choice(loaded: LoadResult, analysis: Analysis) -> LoadResult:
    """Returns a job with the values that were chosen for its analysis written out, and as its settings."""
    if loaded.job is None or analysis.choice is None or analysis.choice.plan is None:
        return loaded
    plan = analysis.choice.plan
    settings = (*loaded.settings, *settings_text(plan.settings))
    origins = dict(loaded.origins) | dict.fromkeys(analysis.choice.fields, "auto")
    return replace(loaded, job=with_plan(loaded.job, analysis.choice.fields, plan), settings=settings, origins=origins)


@contextlib.contextmanager
def search_progress() -> Iterator[Progress]:
    """Yields what shows the progress of a search on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with progress_bar() as bar:
        task = bar.add_task("choosing a plan", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
