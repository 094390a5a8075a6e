"""The memory of moments: its largest is the account's peak, and it is never below what the schedule holds."""

from __future__ import annotations

import itertools

import pytest
from helpers.paths import EXAMPLES

from dslc.compiler.compile import compile_plan
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.show.page.memory_moments import memory_moments
from dslc.compiler.show.page.plan_page import timeline
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.check_job import inspect

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev")
PLANS = [
    ("digits.plt", ()),
    ("accumulate.plt", ()),
    ("chunks.plt", ()),
    ("gpt_cpu.plt", ("memory.recompute=full",)),
    ("gpt_cpu.plt", ("parallelism.zero=3", "parallelism.microbatches=4")),
    ("gpt_cpu.plt", ("parallelism.zero=2",)),
    ("cluster.plt", ()),
]


def analysis_of(name: str, *settings: str) -> Analysis:
    loaded, report = load(str(EXAMPLES / name), settings), Report()
    analysis = inspect(loaded, report)
    assert analysis is not None and not report.errors, [error.message for error in report.errors]
    return analysis


def check(analysis: Analysis) -> None:
    moments = memory_moments(analysis)
    assert [each.peak for each in moments] == [cost.memory.peak for cost in analysis.costs]
    shown = timeline(compile_plan(analysis).plan, moments)
    for row in shown.rows:
        sizes = [size for *_, size in row.passes if size is not None]
        assert row.rest is not None and min(sizes) >= row.rest and max(sizes) <= moments[row.pipeline].peak


@pytest.mark.parametrize("name, settings", PLANS)
def test_the_largest_is_the_peak(name: str, settings: tuple[str, ...]) -> None:
    check(analysis_of(name, *settings))


@pytest.mark.parametrize("schedule, zero", list(itertools.product(SCHEDULES, (0, 2))))
def test_the_largest_of_each_schedule_is_the_peak(schedule: str, zero: int) -> None:
    analysis = analysis_of("pipeline.plt", f"parallelism.schedule={schedule}", f"parallelism.zero={zero}")
    check(analysis)
    for row in timeline(compile_plan(analysis).plan, memory_moments(analysis)).rows:
        sizes = {(kind, stage, number): size for kind, stage, number, _, _, size in row.passes}
        forwards = [size for (kind, _, _), size in sizes.items() if kind == "F"]
        assert len(set(forwards)) > 1 and None not in forwards  # each beside other micro-batches
