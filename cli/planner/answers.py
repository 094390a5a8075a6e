"""Answers of the planner in a browser tab: functions from the text of a job to JSON, SVG or HTML.

`edit` has what an editor shows of the text. `summary` and `plan` return what `dslc plan` and `dslc plan --json` print,
`page` what `dslc render -o page.html` writes. `choose_table` returns what `dslc choose` prints.
Nothing here loads torch, starts a process or opens a connection. A job that only torch can plan is checked as far as
`dslc check` goes without `--trace`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dslc.compiler.compile import Compiled, compile_plan
from dslc.compiler.facts.sources import use_stdlib_bytes
from dslc.compiler.rules.choice.choice_text import HEAD, count_line, plan_row
from dslc.compiler.rules.choice.plan_choice import PlanChoice, PricedPlan
from dslc.compiler.rules.choice.search import Progress
from dslc.compiler.show.explain import explain
from dslc.compiler.show.page.memory_moments import memory_moments
from dslc.compiler.show.page.plan_page import plan_page
from dslc.compiler.show.picture import svg, use_renderer
from dslc.compiler.show.plan_scatter import draw_choice
from dslc.dsl.diagnostics import Report
from dslc.dsl.editor.edits import with_fields
from dslc.dsl.editor.hints import hints
from dslc.dsl.editor.semantic_tokens import tokens
from dslc.dsl.editor.snapshot import Snapshot
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.auto_fields import SEARCHED, auto_fields, value_text
from dslc.dsl.meaning.load import LoadResult, load_each
from dslc.dsl.show import to_json
from dslc.editor.analysis import AnalysisRequest, CheckedText, analyse_text, check_text
from dslc.jobs.check_job import presented, summary_text
from dslc.jobs.choose_plan import explore_plans, with_choice
from dslc.probe.unchecked_parts import describe_unchecked
from dslc.runs.plan_file_output import file_of

NAME = "job.plt"
_ROWS = 12  # plans of a choice that the page lists


def start(render_dot: Callable[[str], str], stdlib_bytes: int) -> None:
    """Draws by a function from DOT text to SVG from now on. `stdlib_bytes` is the size of the text of the standard
    library of the Python that trains.
    """
    use_renderer(render_dot)
    use_stdlib_bytes(stdlib_bytes)


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A job without mistakes, with its plan."""

    loaded: LoadResult
    compiled: Compiled


def plan(text: str, name: str = NAME) -> str:
    """Returns the plan file, as `dslc plan --json` prints it; "" for a job with mistakes, which `edit` names."""
    planned = _plan(text, name)
    return file_of(planned.compiled, planned.loaded).text() if planned else ""


def summary(text: str, name: str = NAME) -> str:
    """Returns the plan as `dslc plan` prints it; "" for a job with mistakes."""
    planned = _plan(text, name)
    return explain(planned.compiled.plan) if planned else ""


def page(text: str, view: str = "placement", name: str = NAME) -> str:
    """Returns the page of the plan, as `dslc render -o page.html` writes it; "" for a job with mistakes."""
    planned = _plan(text, name)
    return plan_page(planned.compiled.plan, view, memory_moments(planned.compiled.analysis)) if planned else ""


def edit(text: str, name: str = NAME) -> str:
    """Returns what an editor shows of a text, as JSON: diagnostics with their offsets, coloured words, hints, and the
    job in one line (`status`, "" for a job with mistakes).
    """
    snapshot = Snapshot(text, name)
    reply = analyse_text(AnalysisRequest(path=name, text=text, repaired=snapshot.repaired()), _check)
    diagnostics = []
    for diagnostic, plain in zip(reply.diagnostics, to_json(reply.diagnostics), strict=True):
        place = snapshot.place_of(diagnostic.span) if diagnostic.span is not None else None
        diagnostics.append(plain | {"start": place.start if place else None, "end": place.end if place else None})
    return json.dumps(
        {
            "diagnostics": diagnostics,
            "tokens": [[token.start, token.end, token.type] for token in tokens(snapshot)],
            "hints": [[hint.offset, hint.label] for hint in hints(snapshot, reply.figures)],
            "status": _status(text, name),
        }
    )


def choose_table(text: str, name: str = NAME, progress: Progress | None = None) -> str:
    """Returns a choice for people, as JSON: its `count`, the plans of the front as rows with the `text` of the job that
    has each plan written, and a `picture` of all plans.
    """
    job, report, choice = _choose(text, name, progress)
    table: dict[str, Any] = {"diagnostics": to_json(presented(report)), "rows": [], "picture": "", "count": ""}
    if job is None or choice is None:
        return json.dumps(table)
    plans = choice.front or sorted((each for each in choice.plans if each.is_admissible), key=lambda each: each.peak)
    if choice.plan is not None and choice.plan not in plans[:_ROWS]:
        plans = [choice.plan, *plans]
    table |= {"count": count_line(choice), "head": HEAD}
    for each in plans[:_ROWS]:
        mark = "→" if each is choice.plan else ""
        table["rows"].append({"cells": plan_row(each, mark), "text": _with_plan(text, choice, each)})
    if any(each.step_time for each in choice.plans):
        table["picture"] = svg(draw_choice(name, choice))
    return json.dumps(table)


# ------------------------------------------------------------------------------------------------------------ parts


@functools.lru_cache(maxsize=2)  # the page asks for diagnostics and for views of a text, and of its repaired text
def _check(name: str, text: str) -> CheckedText:
    return check_text(name, text)


@functools.lru_cache(maxsize=1)
def _plan(text: str, name: str) -> PlannedJob | None:
    """Returns the plan of the first combination of a job; None for a job with mistakes."""
    checked = _check(name, text)
    if checked.report.errors or not checked.analyses:
        return None
    loaded, _ = load_each(name, [], text)
    analysis = checked.analyses[0]
    return PlannedJob(loaded=with_choice(loaded, analysis), compiled=compile_plan(analysis))


def _status(text: str, name: str) -> str:
    """Returns the job in one line, as `dslc check` prints it; "" for a job with mistakes."""
    checked = _check(name, text)
    analyses = checked.analyses
    if checked.report.errors or not analyses:
        return ""
    needs_torch = "; its network needs torch, which no browser has" * analyses[-1].job.model.has_user_network
    return f"good{describe_unchecked(analyses[-1], trace=False)}: {summary_text(analyses[-1])}{needs_torch}"


def _choose(text: str, name: str, progress: Progress | None) -> tuple[JobSpec | None, Report, PlanChoice | None]:
    """Returns the first combination of a job, what the search reports, and the choice."""
    loaded, combinations = load_each(name, [], text)
    job = combinations[0].job
    if loaded.report.errors or job is None:
        return None, loaded.report, None
    job, report = replace(job, sweep={}), Report()
    choice = explore_plans(job, report, trace=False, fields=auto_fields(job) or SEARCHED, progress=progress)
    return job, report, choice


def _with_plan(text: str, choice: PlanChoice, chosen: PricedPlan) -> str:
    """Returns the text of a job with the values of a plan written into it."""
    values = dict.fromkeys(choice.fields) | {path: value_text(value) for path, value in chosen.settings.items()}
    return with_fields(text, values)
