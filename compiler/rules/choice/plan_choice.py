"""The result of a search: each plan with its price or its refusal, and the chosen one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from dslc.compiler.ir.number_text import byte_text, time_text
from dslc.compiler.ir.records import TimeSource
from dslc.dsl.meaning.auto_fields import default_of, value_text
from dslc.dsl.record import Record, record

MARGIN = 0.05  # of a device's memory, which the allocator loses to fragments

Values = Mapping[str, object]  # of searched fields, by path


@record
class PricedPlan(Record):
    """A job with values of the searched fields, and its figures; `code` is the code of the first error that refuses it.

    `broken_promises` are messages on `expect`, `warnings` the codes of its warnings. `limit` is the memory that it may
    use; `margin` of it should stay free. `is_timed`: its time was asked for; a search that is bounded asks for the
    times of plans that fit.
    """

    values: Values
    code: str = ""
    message: str = ""
    step_time: float | None = None
    source: TimeSource = "bound"
    lacks: str = ""
    peak: int = 0
    limit: int | None = None
    margin: int = 0
    bubble: float = 0.0
    traffic: int = 0
    broken_promises: tuple[str, ...] = ()
    warnings: frozenset[str] = frozenset()
    is_timed: bool = True

    @property
    def fits(self) -> bool:
        return self.limit is None or self.peak <= self.limit

    @property
    def is_tight(self) -> bool:
        """True if the peak leaves less than the margin."""
        return self.limit is not None and self.peak > self.limit - self.margin

    @property
    def is_admissible(self) -> bool:
        """True if no rule refuses the plan, it fits, and it keeps the promises."""
        return not self.code and self.fits and not self.broken_promises

    @property
    def settings(self) -> dict[str, object]:
        """The values that a job with the plan writes: the data axis, and those that differ from their defaults."""
        return {
            path: value
            for path, value in self.values.items()
            if value not in (None, default_of(path)) or path == "parallelism.data"
        }

    def text(self) -> str:
        """Returns the values in words: `data 2, zero 1, recompute full`."""
        return ", ".join(f"{path.partition('.')[2]} {value_text(value)}" for path, value in self.settings.items())

    def moved_kinds(self) -> int:
        """Returns how many kinds of memory move to the host and back, which takes time that is not predicted."""
        moved = self.values["memory.offload"]
        return len(moved) if isinstance(moved, tuple) else 0

    def effort(self) -> tuple[int, int]:
        """Returns what a bound leaves out: kernels of further micro-batches and of recomputation, which an exchange may
        hide, the work of sharding over one rank, and the bytes that arithmetic hides.
        """
        pieces = self.values["parallelism.microbatches"]
        again = self.values["memory.recompute"] != "none"
        copies = self.values["parallelism.replicas"]
        unsharded = bool(self.values["parallelism.zero"]) and copies == self.values["parallelism.data"]
        return (again + unsharded + (pieces if isinstance(pieces, int) else 1), self.traffic)

    def figures(self) -> str:
        """Returns time and memory: `12 ms a step, 1.2 GiB`."""
        best = "at best " if self.source == "bound" else ""
        time = "time unknown" if self.step_time is None else f"{best}{time_text(self.step_time)} a step"
        return f"{time}, {byte_text(self.peak)}"


@record
class PlanChoice(Record):
    """All plans of a search. `is_exact`: each plan of the space was analysed. `space` is their number, at least.
    `splits` of the devices into axes: those that were priced, and all of them, where the search is bounded.
    """

    fields: tuple[str, ...]
    plans: tuple[PricedPlan, ...]
    plan: PricedPlan | None
    is_exact: bool
    space: int
    splits: tuple[int, int] = (0, 0)

    @property
    def refusals(self) -> Counter[str]:
        """The number of plans by the code that refuses them."""
        return Counter(plan.code for plan in self.plans if plan.code)

    @property
    def candidates(self) -> list[PricedPlan]:
        """The plans that may be chosen, best first."""
        return ordered(self.plans)

    @property
    def front(self) -> list[PricedPlan]:
        """The plans that no other beats in both time and memory, the fastest first."""
        front: list[PricedPlan] = []
        for plan in sorted(self.candidates, key=lambda plan: (plan.step_time or 0.0, plan.peak, plan.effort())):
            if not front or plan.peak < front[-1].peak:
                front.append(plan)
        return front

    def runners_up(self, most: int) -> list[PricedPlan]:
        """Returns the best plans besides the chosen one: first one for each split into axes, then the rest."""
        best: dict[tuple[object, ...], PricedPlan] = {}
        others = [plan for plan in self.candidates if plan is not self.plan]
        others += sorted(
            (plan for plan in self.plans if not plan.code and not plan.is_admissible), key=lambda plan: time_key(plan)
        )
        for plan in others:
            axes = tuple(plan.values[f"parallelism.{name}"] for name in ("pipeline", "tensor", "context", "zero"))
            best.setdefault(axes, plan)
        return list(best.values())[:most]

    def why_not(self, plan: PricedPlan) -> str:
        """Returns why a plan was passed over."""
        chosen = self.plan
        if not plan.fits:
            return f"does not fit {byte_text(plan.limit or 0)}"
        if plan.broken_promises:
            return f"breaks a promise: {plan.broken_promises[0]}"
        if plan.step_time is None or (chosen is not None and chosen.source == "measured" != plan.source):
            return f"its time is not known: the calibration lacks {plan.lacks}" if plan.lacks else "its time is unknown"
        if chosen is None or chosen.step_time is None:
            return "no plan was chosen"
        if plan.is_tight and not chosen.is_tight:
            return f"leaves less than {byte_text(plan.margin)} of memory free"
        further = plan.warnings - chosen.warnings
        if further:
            return f"warns of {', '.join(sorted(further))}"
        if plan.moved_kinds() > chosen.moved_kinds():
            return "moves more to the host, which takes time that is not predicted"
        if plan.step_time > chosen.step_time * 1.0005:
            return f"{100 * (plan.step_time / chosen.step_time - 1):.3g}% slower"
        if plan.effort()[0] > chosen.effort()[0]:
            return "as fast, with more work that is not predicted"
        if plan.traffic > chosen.traffic:
            return "as fast, with more traffic"
        return "as fast, with more memory" if plan.peak > chosen.peak else "as fast, with more written fields"


def time_key(plan: PricedPlan) -> tuple[object, ...]:
    """Returns the order of plans by time alone, with unknown times last."""
    return (plan.step_time is None, plan.step_time or 0.0, plan.effort(), plan.peak, len(plan.settings), plan.text())


def ordered(plans: Iterable[PricedPlan]) -> list[PricedPlan]:
    """Returns the plans that may be chosen, best first.

    Where some times are measured, plans whose times are not are left out: a bound is no time. A plan that warns of
    something that not all plans share comes later, as does one that leaves less than the margin, or moves more to the
    host.
    """
    admissible = [plan for plan in plans if plan.is_admissible and plan.step_time is not None]
    if any(plan.source == "measured" for plan in admissible):
        admissible = [plan for plan in admissible if plan.source == "measured"]
    shared = frozenset.intersection(*(plan.warnings for plan in admissible)) if admissible else frozenset()

    def key(plan: PricedPlan) -> tuple[object, ...]:
        time = plan.step_time or 0.0
        further = len(plan.warnings - shared)
        # Times that differ by rounding alone are one.
        rounded = float(f"{time:.6g}")
        return (further, plan.is_tight, plan.moved_kinds(), rounded, plan.effort(), plan.peak, len(plan.settings),
                plan.text())  # fmt: skip

    return sorted(admissible, key=key)
