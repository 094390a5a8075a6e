"""Searches the plans of a job for the fastest one that fits its memory and keeps its promises.

Each plan is the job with its values written, analysed by the same rules and the same account as any job. In a space of
at most `EXACT` plans each is analysed, up to `EXACT_WORK`. In a larger one the search is bounded, in two steps that
depend on no clock, so that each host chooses the same plan:

1. Each split into axes, up to `SPLITS_WORK`, is priced with the defaults of its other fields and the most sharding, and
   with more recomputation until it fits.
   Of more than `MANY_SPLITS` the ones with the most data ranks are priced, up to `MANY_SPLITS_WORK`.
2. The best `REFINED` splits, and more up to `BOUNDED_WORK`, are refined: one group of fields after another takes the
   best of all its values, the rest as they are, until a round changes nothing, at most `ROUNDS` rounds. The groups are
   `recompute` and `microbatches`, `schedule` and `virtual_stages`, `zero`, `replicas` and `expert`, and `sequence`.
   After `REFINED_WORK` no further plan is priced.

A plan that does not fit has no time, unless none fits.

Moves to the host have no time in the model, so plans with `offload` are searched only if none fits without.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace

from dslc.compiler.cost.reuse import Reuse
from dslc.compiler.ir.actions import handed_in
from dslc.compiler.ir.facts import Facts
from dslc.compiler.rules.analyse import analyse, check_limits
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.rules.choice.plan_choice import MARGIN, PlanChoice, PricedPlan, ordered
from dslc.compiler.rules.choice.space import Axes, Plan, PlanSpace
from dslc.dsl.diagnostics import Diagnostic, Report, TooManyErrors
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.auto_fields import value_text, with_values

EXACT = 2_000
EXACT_WORK = 30_000  # of all plans that are analysed where each is, in units of `Layout.work`, about 0.3 ms
REFINED = 4
BOUNDED_WORK = 15_000  # of all plans, after which no split beyond the best `REFINED` is refined
ROUNDS = 2
REFINED_WORK = 40_000  # of the plans of all refinements
MANY_SPLITS = 300
MANY_SPLITS_WORK = 20_000
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
        self._splits = (0, 0)
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
        exact, size = self._search(space), space.size
        if space.may_offload and not ordered(self._priced.values()):
            moved = replace(space, offload=True)
            exact, size = self._search(moved) and exact, size + moved.size
        plans = tuple(self._priced.values())
        best = ordered(plans)
        fields = tuple(path for path in space.fields)
        plan = best[0] if best else None
        return PlanChoice(fields=fields, plans=plans, plan=plan, is_exact=exact, space=size, splits=self._splits)

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
        most_work = SPLITS_WORK
        if len(axes) > MANY_SPLITS:  # so many that work ends: those with the most data ranks are priced first
            axes, most_work = sorted(axes, key=lambda each: (-each[3], each)), MANY_SPLITS_WORK
        first = []
        for each in axes:
            if self._reuse.spent >= most_work:
                break
            first.append(self._representative(space, each))
        self._splits = (len(first), len(axes))
        most_work = self._reuse.spent + REFINED_WORK
        for n, start in enumerate(sorted((plan for plan in first if plan is not None), key=_distance)):
            if n < REFINED or self._reuse.spent < BOUNDED_WORK:
                self._refine(space, start, most_work)
        return False

    def price(self, plan: Plan, *, timed: bool = True) -> PricedPlan:
        """Returns the price of a plan; if not `timed`, of one that does not fit only its memory."""
        key = tuple(map(value_text, plan.values()))
        priced = self._priced.get(key)
        if priced is None or (timed and not priced.is_timed):
            priced = self._priced[key] = self._analyse(plan, timed=timed)
            self._progress(len(self._priced), max(self._total, len(self._priced)))
        return priced

    def _analyse(self, plan: Plan, *, timed: bool) -> PricedPlan:
        job, report = with_values(self._job, PricedPlan(values=plan).settings), Report()
        analysis: Analysis | None = None
        limit: int | None = None
        peak = 0
        try:
            facts, faults = self._facts_of(job)
            report.extend(faults)
            sound = not report.errors
            analysis = report.collect(analyse(job, facts, sound=sound, limits=False, remedies=False, reuse=self._reuse))
            if analysis is not None:
                limit = job.memory.limit or analysis.layout.hardware.memory
                peak = max((cost.memory.peak for cost in analysis.costs), default=0)
                timed = timed or limit is None or peak <= limit
                if timed:
                    report.extend(check_limits(analysis, self._reuse, remedies=False))
        except TooManyErrors:
            pass
        errors = {error.text_key(): error for error in report.errors}
        if self._shared is None:
            self._shared = errors
        self._shared = {key: error for key, error in self._shared.items() if key in errors}
        refusals = [error for error in report.errors if error.code not in _LIMITS]
        if refusals:
            return PricedPlan(values=plan, code=refusals[0].code, message=refusals[0].message)
        if analysis is None or analysis.staging is None:
            return PricedPlan(values=plan, code="W0436", message="its layers are not known")
        priced = PricedPlan(
            values=plan,
            peak=peak,
            limit=limit,
            margin=0 if job.memory.limit or limit is None else int(limit * MARGIN),
            warnings=frozenset(each.code for each in report.found if each.severity == "warning"),
            is_timed=timed,
        )
        estimated = analysis.estimate if timed else None
        if estimated is None:
            return priced
        return replace(
            priced,
            step_time=estimated.step_time,
            source=estimated.source,
            lacks=estimated.lacks,
            bubble=analysis.pipeline.bubble if analysis.pipeline else 0.0,
            traffic=max(handed_in(cost.traffic) for cost in analysis.costs),
            broken_promises=tuple(error.message for error in report.errors if error.code == "E0502"),
        )

    # ------------------------------------------------------------------------------------------------------- bounded

    def _representative(self, space: PlanSpace, axes: Axes) -> PricedPlan | None:
        """Returns the plan of these axes with the least recomputation that fits, or the nearest; None if refused."""
        most_sharded = max(
            space.sharding(axes),
            key=lambda each: (each[0] if axes[0] == 1 else -abs(each[0] - 1), -each[1], -each[2]),
        )
        schedule = space.schedules(axes)[0]
        for word, count in space.schedules(axes):
            if word == "1f1b":
                schedule = (word, count)
                break
        pieces = space.pieces(axes)
        enough = next((n for n in pieces if n is None or n >= (2 * axes[0] if axes[0] > 1 else 1)), pieces[-1])
        pieces_of_sequence = space.sequences(axes)[-1]
        tried = []
        for recompute in space.recomputations:
            values = space.plan(axes, most_sharded, enough, schedule, pieces_of_sequence, recompute, space.offloads[-1])
            plan = self.price(values, timed=False)
            if not plan.code:
                tried.append(plan)
            if plan.code or (plan.fits and not plan.is_tight):
                break
        least = min(map(_excess, tried), default=0)
        nearest = [plan for plan in tried if _excess(plan) == least]
        if len(nearest) > 1:
            nearest = [self.price(dict(plan.values)) for plan in nearest]
        return min(nearest, key=_distance, default=None)

    def _refine(self, space: PlanSpace, best: PricedPlan, most_work: int) -> None:
        """Searches one field after another, from a plan on, up to an amount of work."""
        for _ in range(ROUNDS):
            before = best
            for variants in _variants(space):
                timed = _excess(best) > 0  # else no plan that does not fit is better
                tried = [best]
                for change in variants(best):
                    if self._reuse.spent > most_work:
                        break
                    tried.append(self.price({**best.values, **change}, timed=timed))
                best = min((plan for plan in tried if not plan.code), key=_distance)
            if best is before:
                return


def _variants(space: PlanSpace) -> Iterator[Callable[[PricedPlan], list[Plan]]]:
    """Yields for each group of fields what lists its values on the axes of a plan."""

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
        {"parallelism.zero": zero, "parallelism.replicas": copies, "parallelism.expert": experts}
        for zero, copies, experts in space.sharding(axes(plan))
    ]
    yield lambda plan: [{"parallelism.sequence": sequence} for sequence in space.sequences(axes(plan))]
    yield lambda plan: [{"memory.offload": moved} for moved in space.offloads]


def _excess(plan: PricedPlan) -> int:
    """Returns the bytes that a plan holds too much, or without leaving the margin."""
    return 0 if plan.limit is None else max(0, plan.peak - (plan.limit - plan.margin))


def _distance(plan: PricedPlan) -> tuple[object, ...]:
    """Returns the order of plans in a refinement: those that fit by time, the rest by what they hold too much."""
    time = plan.step_time if plan.step_time is not None else float("inf")
    rounded = float(f"{time:.6g}")
    return (_excess(plan), len(plan.broken_promises), plan.moved_kinds(), rounded, plan.effort(), plan.peak,
            len(plan.settings), plan.text())  # fmt: skip
