"""Two plans that are compared: opened by what the user named, and whether checkpoints of the first fit the second."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dslc.compiler.comparison import SECTIONS, PlanDifference, Section, compare_plans, rows, summary
from dslc.compiler.compile import compile_plan
from dslc.compiler.emit import emit
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.stored import plan_hash
from dslc.compiler.ir.program import JobProgram, Training
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.show.page.content import ComparedSection, PlanComparison
from dslc.dsl.diagnostics import Report
from dslc.jobs.check_job import inspect, show
from dslc.jobs.plan_file_input import is_plan_file, open_plan
from dslc.jobs.revision import is_revision, load_revision
from dslc.runs.load_one import load_first
from dslc.runtime.checkpoint.files import Shapes, fit_of, incompatibilities
from dslc.terminal.exit_codes import CommandFailedError

_TITLES: Mapping[Section, str] = {"memory": "memory of a rank", "traffic": "traffic of a rank, each step"}


class PlanSide(NamedTuple):
    """One of two compared plans, by what the user named. `analysis` is None for a plan file."""

    name: str
    graph: PlanGraph
    analysis: Analysis | None = None


def open_plan_side(name: str, settings: Sequence[str], trace: bool) -> PlanSide:
    """Returns the plan of a job (also at a revision), a plan file or a run directory. Raises CommandFailedError."""
    report = Report()
    path = os.path.join(name, "plan.json") if os.path.isdir(name) else name
    graph = analysis = None
    if is_plan_file(path):
        plan_file = open_plan(path, report, [f"--set {setting}" for setting in settings])
        graph = plan_file.graph if plan_file else None
    else:
        load_result = load_revision(path, settings, report) if is_revision(path) else load_first(path, settings)
        analysis = inspect(load_result, report, trace=trace) if load_result else None
        graph = compile_plan(analysis).graph if analysis and not report.errors else None
    show(report.errors)
    if graph is None:
        raise CommandFailedError
    return PlanSide(" ".join([name, *(f"--set {setting}" for setting in settings)]), graph, analysis)


def comparison_of(first_side: PlanSide, second_side: PlanSide) -> PlanComparison:
    """Returns what `dslc diff` prints of two plans; `checkpoints` is "" for equal ones."""
    changes = compare_plans(first_side.graph, second_side.graph)
    tables = [(_TITLES.get(section, section), rows(changes, section)) for section in SECTIONS]
    reasons = checkpoint_incompatibilities(first_side.graph, second_side.graph, changes) if changes else None
    return PlanComparison(
        summary=summary(changes),
        checkpoints=_checkpoint_text(reasons) if changes else "",
        sections=tuple(ComparedSection(title=title, rows=tuple(table)) for title, table in tables if table),
    )


# ------------------------------------------------------------------------------------------------------- checkpoints


def checkpoint_incompatibilities(
    first_graph: PlanGraph, second_graph: PlanGraph, changes: Sequence[PlanDifference]
) -> list[str] | None:
    """Returns why the second job cannot resume from checkpoints of the first; None if that is unknown."""
    if first_graph.find(Training) is None or second_graph.find(Training) is None:
        return None
    first_program, second_program = (emit(graph, plan_hash(graph)) for graph in (first_graph, second_graph))
    shapes = _shapes(first_program), _shapes(second_program)
    if None in shapes and any(change.what.startswith("model.") for change in changes):
        return None
    return incompatibilities(fit_of(first_program, shapes[0]), fit_of(second_program, shapes[1]))


def _shapes(job: JobProgram) -> Shapes | None:
    """Returns the shapes of the parameters; None for a network of the user's or of transformers."""
    return {init.parameter: init.shape for init in job.model.inits} or None


def _checkpoint_text(reasons: Sequence[str] | None) -> str:
    if reasons is None:
        return "unknown, as the shapes of all parameters or the samples are"
    if reasons:
        return f"those of the first do not fit: {'; '.join(reasons)}"
    return "those of the first can be resumed by the second"
