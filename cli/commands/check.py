"""`dslc check`: every reason to reject a job, or to resume from a checkpoint with it. Starts no process and, without
`--trace`, runs no user code.
"""

from __future__ import annotations

import argparse
import json
import sys

from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Diagnostic, Report
from dslc.dsl.meaning.load import load
from dslc.dsl.plain import plain
from dslc.dsl.show import to_json
from dslc.dsl.words import either, plural
from dslc.jobs.check_job import check_one, inspect, show
from dslc.probe.unchecked_parts import describe_unchecked
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT


def main(arguments: argparse.Namespace) -> int:
    found: list[Diagnostic] = []
    status = GOOD
    for path in arguments.jobs:
        report, analysis, goes_on = check_with(path, arguments.settings, arguments.trace, arguments.resume)
        if arguments.locked and analysis and not report.errors:
            _compare_with_lock(path, arguments, report)
        found.extend(report)
        if report.errors:
            status = JOB_AT_FAULT
        if not arguments.json:
            show(report)
            if not report.errors and analysis:
                so_far = describe_unchecked(analysis, trace=arguments.trace)
                print(plain(f"{path} is good{so_far}: {_summary(analysis)}" + (f"; {goes_on}" if goes_on else "")))
    if arguments.json:
        json.dump(to_json(found), sys.stdout, indent=2)
        print()
    return status


def check_with(path: str, settings: list[str], trace: bool, resume: str | None) -> tuple[Report, Analysis | None, str]:
    """Returns the same, and the checkpoint in `resume` from which the job would resume, in words."""
    if resume is None:
        return *check_one(path, settings, trace=trace), ""
    from dslc.runs.resume import check_resume

    goes_on = [""]

    def then(analysis: Analysis, report: Report) -> None:
        goes_on.append(check_resume(analysis, resume, report))

    report, analysis = check_one(path, settings, trace=trace, then=then)
    report.found = [d for d in report.found if d.code != "W0811"]  # the option asks for a folder that holds some
    return report, analysis, goes_on[-1]


def _compare_with_lock(path: str, arguments: argparse.Namespace, report: Report) -> None:
    from dslc.jobs.lock import check_lock

    loaded = load(path, arguments.settings)
    analysis = inspect(loaded, Report(), trace=arguments.trace)
    assert analysis is not None, "the job was checked"
    check_lock(path, loaded, analysis, report)


def _summary(analysis: Analysis) -> str:
    from dslc.compiler.ir.number_text import byte_text, count_text

    counts, world = analysis.layout.node_counts, analysis.layout.world_size
    parts = [plural(world, "rank")]
    if len(counts) > 1:
        on = f"trains on {either(counts)} nodes"
        parts = [on, f"on {counts[-1]}: {parts[0]}"]
    if analysis.model:
        count = analysis.model.parameters
        parts.append(f"{count_text(count)} parameter{'s' * (count != 1)}")
    if analysis.costs:
        parts.append(f"peak {byte_text(max(cost.memory.peak for cost in analysis.costs))} a rank")
    if analysis.workload.steps is not None:
        parts.append(plural(analysis.workload.steps, "step"))
    return ", ".join(parts)
