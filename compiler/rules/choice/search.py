"""Searches the plans of a job for the fastest one that fits its memory and keeps its promises.

Each plan is the job with its values written, analysed by the same rules and the same account as any job. In a space of
at most `EXACT` plans each is analysed, up to `EXACT_WORK`. In a larger one the search is bounded, in two steps that
depend on no clock, so that each host chooses the same plan:

1. Each split into axes, up to `SPLITS_WORK`, is priced with the defaults of its other fields and the most sharding, and
   with more recomputation until it fits.
2. The best `REFINED` splits, and more up to `BOUNDED_WORK`, are refined: one pair of fields after another takes the
   best of all its values, the rest as they are, until a round changes nothing, at most `ROUNDS` rounds. The pairs are
   `recompute` and `microbatches`, `schedule` and `virtual_stages`, `zero` and `replicas`.

Moves to the host have no time in the model, so plans with `offload` are searched only if none fits without.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace

from dslc.compiler.cost.reuse import Reuse
from dslc.compiler.ir.actions import handed_in
from dslc.compiler.ir.facts import Facts
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.rules.choice.plan_choice import MARGIN, PlanChoice, PricedPlan, ordered
from dslc.compiler.rules.choice.space import Axes, Plan, PlanSpace
from dslc.dsl.diagnostics import Diagnostic, Report, TooManyErrors
from dslc.dsl.language.auto_fields import value_text, with_values
from dslc.dsl.language.job import JobSpec

EXACT = 2_000
EXACT_WORK = 30_000  # of all plans that are analysed where each is, in units of `Layout.work`, about 0.3 ms
REFINED = 4
BOUNDED_WORK = 15_000  # of all plans, after which no split beyond the best `REFINED` is refined
ROUNDS = 2
MANY_SPLITS = 300
SPLITS_WORK = 300_000  # of the plans of all splits, after which no further split is priced
_LIMITS = ("E0501", "E0502")  # the memory's, and promises

FactsOf = Callable[[JobSpec], tuple[Facts, Iterable[Diagnostic]]]
Progress = Callable[[int, int], None]


class PlanSearch:
    """Prices plans of a job, each once. `facts_of` returns the facts of a job, and what is wrong with its network."""

    def __init__(
        self, job: JobSpec, facts_of: FactsOf, reuse: Reuse, progress: Progress = lambda done, of: None
    ) -> None:
        self._job, self._facts_of, self._reuse, self._progress = job, facts_of, reuse, progress
        self._priced: dict[tuple[str, ...], PricedPlan] = {}
        self._total = 0
        self._shared: dict[Hashable, Diagnostic] | None = None

    @property
    def work(self) -> int:
        """The work of all analyses, in units of `Layout.work`."""
        return self._reuse.spent

    @property
    def shared_errors(self) -> list[Diagnostic]:
        """The errors that every plan has, which are the job's."""
        return list((self._shared or {}).values())

    def run(self, space: PlanSpace) -> PlanChoice:
        """Returns the choice among the plans of a space."""
        exact, size = self._search(space), space.size
        if space.may_offload and not ordered(self._priced.values()):
            moved = replace(space, offload=True)
            exact, size = self._search(moved) and exact, size + moved.size
        plans = tuple(self._priced.values())
        best = ordered(plans)
        fields = tuple(path for path in space.fields)
        return PlanChoice(fields=fields, plans=plans, plan=best[0] if best else None, is_exact=exact, space=size)

    def _search(self, space: PlanSpace) -> bool:
        """Prices the plans of a space; returns true if it priced all of them."""
        if space.size <= EXACT:
            self._total = len(self._priced) + space.size
            for plan in space:
                self.price(plan)
                if self._reuse.spent > EXACT_WORK:
                    break
            else:
                return True
        axes = space.axes()
        self._total = len(self._priced) + len(axes) + REFINED * 100
        if len(axes) > MANY_SPLITS:  # so many that work ends: those with the most data ranks are priced first
            axes = sorted(axes, key=lambda each: (-each[3], each))
        first = [self._representative(space, each) for each in axes if self._reuse.spent < SPLITS_WORK]
        splits = sorted((plan for plan in first if plan is not None), key=_distance)
        for n, start in enumerate(splits):
            if n < REFINED or self._reuse.spent < BOUNDED_WORK:
                self._refine(space, start)
        return False

    def price(self, plan: Plan) -> PricedPlan:
        """Returns the price of a plan."""
        key = tuple(map(value_text, plan.values()))
        priced = self._priced.get(key)
        if priced is None:
            priced = self._priced[key] = self._analyse(plan)
            self._progress(len(self._priced), max(self._total, len(self._priced)))
        return priced

    def _analyse(self, plan: Plan) -> PricedPlan:
        job, report = with_values(self._job, PricedPlan(values=plan).settings), Report()
        analysis: Analysis | None = None
        try:
            facts, faults = self._facts_of(job)
            report.extend(faults)
            sound = not report.errors
            analysis = report.collect(analyse(job, facts, sound=sound, remedies=False, reuse=self._reuse))
        except TooManyErrors:
            pass
        errors = {error.text_key(): error for error in report.errors}
        if self._shared is None:
            self._shared = errors
        self._shared = {key: error for key, error in self._shared.items() if key in errors}
        refusals = [error for error in report.errors if error.code not in _LIMITS]
        if refusals:
            return PricedPlan(values=plan, code=refusals[0].code, message=refusals[0].message)
        if analysis is None or analysis.estimate is None:
            return PricedPlan(values=plan, code="W0436", message="its layers are not known")
        limit, estimated = job.memory.limit or analysis.layout.hardware.memory, analysis.estimate
        return PricedPlan(
            values=plan,
            step_time=estimated.step_time,
            source=estimated.source,
            lacks=estimated.lacks,
            peak=max(cost.memory.peak for cost in analysis.costs),
            limit=limit,
            margin=0 if job.memory.limit or limit is None else int(limit * MARGIN),
            bubble=analysis.pipeline.bubble if analysis.pipeline else 0.0,
            traffic=max(handed_in(cost.traffic) for cost in analysis.costs),
            broken_promises=tuple(error.message for error in report.errors if error.code == "E0502"),
            warnings=frozenset(each.code for each in report.found if each.severity == "warning"),
        )

    # ------------------------------------------------------------------------------------------------------- bounded

    def _representative(self, space: PlanSpace, axes: Axes) -> PricedPlan | None:
        """Returns the plan of these axes with the least recomputation that fits, or else the nearest to it; None if all
        are refused.
        """
        most_sharded = max(
            space.sharding(axes), key=lambda each: (each[0] if axes[0] == 1 else -abs(each[0] - 1), -each[1])
        )
        schedule = space.schedules(axes)[0]
        for word, count in space.schedules(axes):
            if word == "1f1b":
                schedule = (word, count)
                break
        pieces = space.pieces(axes)
        enough = next((n for n in pieces if n is None or n >= (2 * axes[0] if axes[0] > 1 else 1)), pieces[-1])
        tried = []
        for recompute in space.recomputations:
            plan = self.price(space.plan(axes, most_sharded, enough, schedule, recompute, space.offloads[-1]))
            if not plan.code:
                tried.append(plan)
            if plan.code or (plan.fits and not plan.is_tight):
                break
        return min(tried, key=_distance, default=None)

    def _refine(self, space: PlanSpace, best: PricedPlan) -> None:
        """Searches one field after another, from a plan on."""
        for _ in range(ROUNDS):
            before = best
            for variants in _variants(space):
                tried = [best, *(self.price({**best.values, **change}) for change in variants(best))]
                best = min((plan for plan in tried if not plan.code), key=_distance)
            if best is before:
                return


def _variants(space: PlanSpace) -> Iterator[Callable[[PricedPlan], list[Plan]]]:
    """Yields for each pair of fields what lists its values on the axes of a plan."""

    def axes(plan: PricedPlan) -> Axes:
        pipeline, tensor, context, data = (
            int(str(plan.values[f"parallelism.{name}"])) for name in ("pipeline", "tensor", "context", "data")
        )
        return pipeline, tensor, context, data

    yield lambda plan: [
        {"memory.recompute": recompute, "parallelism.microbatches": count}
        for recompute in space.recomputations
        for count in space.pieces(axes(plan))
    ]
    yield lambda plan: [
        {"parallelism.schedule": word, "parallelism.virtual_stages": count}
        for word, count in space.schedules(axes(plan))
    ]
    yield lambda plan: [
        {"parallelism.zero": zero, "parallelism.replicas": copies} for zero, copies in space.sharding(axes(plan))
    ]
    yield lambda plan: [{"memory.offload": moved} for moved in space.offloads]


def _distance(plan: PricedPlan) -> tuple[object, ...]:
    """Returns the order of plans in a refinement: those that fit by time, the rest by what they hold too much."""
    over = 0 if plan.limit is None else max(0, plan.peak - (plan.limit - plan.margin))
    time = plan.step_time if plan.step_time is not None else float("inf")
    return (over, len(plan.broken_promises), plan.moved_kinds(), float(f"{time:.6g}"), plan.effort(), plan.peak,
            len(plan.settings), plan.text())  # fmt: skip
