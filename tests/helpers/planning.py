"""From the text or the file of a job to its plan, as the commands do it."""

from __future__ import annotations

from pathlib import Path

from dslc.compiler.compile import Compiled, compile_plan
from dslc.compiler.ir.facts import Facts
from dslc.compiler.placement.schedules import ScheduleTable
from dslc.compiler.rules.analyse import analyse
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from helpers.paths import ROOT

JOBS = ROOT / "tests" / "compiler" / "jobs"


def compiled(path: Path, *settings: str, facts: Facts = Facts()) -> Compiled:  # noqa: B008 - it is frozen
    """Returns the plan and its graph. Raises AssertionError if the job has a mistake."""
    loaded = load(str(path), list(settings))
    assert loaded.job is not None, loaded.report.found
    report = Report()
    analysis = report.collect(analyse(loaded.job, facts))
    assert analysis is not None and not report.errors, report.errors
    return compile_plan(analysis)


def schedule_csv(schedule: ScheduleTable) -> str:
    """Returns the text that `_PipelineScheduleRuntime._load_csv(format="compute_only")` reads: a line per rank."""
    return "".join(",".join("" if action is None else str(action) for action in row) + "\n" for row in schedule.rows)
