"""A choice of a plan as text and as plain data."""

from __future__ import annotations

from dslc.compiler.ir.number_text import byte_text, percent_text, time_text
from dslc.compiler.rules.choice.plan_choice import PlanChoice, PricedPlan
from dslc.dsl.json_value import Json
from dslc.dsl.meaning.auto_fields import settings_text
from dslc.dsl.words import plural

HEAD = ("", "plan", "step time", "memory", "bubble", "traffic")
RIGHT = (2, 3, 4, 5)  # columns of figures


def count_line(choice: PlanChoice) -> str:
    """Returns how many plans were analysed, and what became of them."""
    unpriced = sum(choice.refusals.values())
    count = len(choice.plans)
    priced = [plan for plan in choice.plans if not plan.code]
    how = "all were analysed" if choice.is_exact else f"{count:,} were analysed{_part(choice)}: the search is bounded"
    parts = [f"{choice.space:,} plans, {how}"]
    if unpriced:
        codes = ", ".join(f"{code} {n}" for code, n in choice.refusals.most_common())
        parts.append(f"{unpriced:,} refused ({codes})")
    for what, n in (
        ("do not fit", sum(not plan.fits for plan in priced)),
        ("break a promise", sum(plan.fits and bool(plan.broken_promises) for plan in priced)),
        ("have no known time", sum(plan.is_admissible and plan.step_time is None for plan in priced)),
    ):
        if n:
            parts.append(f"{n:,} {what}")
    return ", ".join(parts)


def _part(choice: PlanChoice) -> str:
    """Returns which part of the space a bounded search covers, if it leaves out splits of the devices into axes."""
    priced, splits = choice.splits
    return f", in {priced:,} of {splits:,} splits into axes" if priced < splits else ""


def chosen_line(choice: PlanChoice) -> str:
    """Returns the chosen plan with its figures, in one line."""
    plan = choice.plan
    if plan is None:
        return "no plan was chosen"
    how = "all analysed" if choice.is_exact else f"{len(choice.plans):,} of them analysed{_part(choice)}"
    return f"chosen: {plan.text()}: {plan.figures()}; of {plural(choice.space, 'plan')}, {how}"


def time_cell(plan: PricedPlan) -> str:
    """Returns the time of a step, with what is known about it."""
    if plan.step_time is None:
        return "unknown"
    return f"{'at best ' if plan.source == 'bound' else ''}{time_text(plan.step_time)}"


def plan_row(plan: PricedPlan, mark: str = "") -> tuple[str, ...]:
    """Returns the row of a plan, with the columns of `HEAD`."""
    bubble = percent_text(plan.bubble) if plan.bubble else "none"
    return (mark, plan.text(), time_cell(plan), byte_text(plan.peak), bubble, byte_text(plan.traffic))


def why_rows(choice: PlanChoice, most: int) -> list[tuple[str, ...]]:
    """Returns the chosen plan and its runners-up, each with why it was passed over."""
    rows: list[tuple[str, ...]] = []
    if choice.plan is not None:
        rows.append((*plan_row(choice.plan, "->"), "chosen"))
    return [*rows, *((*plan_row(plan), choice.why_not(plan)) for plan in choice.runners_up(most))]


def choice_json(choice: PlanChoice) -> dict[str, Json]:
    """Returns the choice as plain data: all plans, the front and the chosen one by their places in the list."""
    places = {id(plan): n for n, plan in enumerate(choice.plans)}

    return {
        "searched": list(choice.fields),
        "exact": choice.is_exact,
        "space": choice.space,
        "analysed": len(choice.plans),
        "refused": dict(choice.refusals),
        "chosen": places[id(choice.plan)] if choice.plan is not None else None,
        "front": [places[id(plan)] for plan in choice.front],
        "plans": [_plan_json(plan) for plan in choice.plans],
    }


def _plan_json(plan: PricedPlan) -> dict[str, Json]:
    settings: dict[str, Json] = {"settings": list(settings_text(plan.settings))}
    if plan.code:
        return settings | {"refused": plan.code, "reason": plan.message}
    return settings | {
        "step_time": plan.step_time,
        "source": plan.source if plan.step_time is not None else None,
        "lacks": plan.lacks,
        "peak_memory": plan.peak,
        "fits": plan.fits,
        "bubble": plan.bubble,
        "traffic": plan.traffic,
        "broken_promises": list(plan.broken_promises),
        "warnings": sorted(plan.warnings),
    }
