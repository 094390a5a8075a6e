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
from dslc.dsl.words import plural
from dslc.jobs.check_job import check_one, show, summary_text
from dslc.probe.unchecked_parts import describe_unchecked
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT


def main(arguments: argparse.Namespace) -> int:
    reports: dict[str, list[Diagnostic]] = {}
    output_format = "json" if arguments.json else arguments.format
    status = GOOD
    for path in arguments.jobs:
        if arguments.fix or arguments.unsafe_fixes:
            from dslc.jobs.fix_job import fix_job

            for line in fix_job(path, arguments.settings, trace=arguments.trace, unsafe=arguments.unsafe_fixes):
                print(plain(line), file=sys.stderr)
        report, analysis, resume_text = check_with(path, arguments)
        reports[path] = list(report)
        if report.errors:
            status = JOB_AT_FAULT
        if output_format == "text":
            show(report)
            if arguments.fix and not arguments.unsafe_fixes:
                _name_unsafe_fixes(report)
            if not report.errors and analysis:
                unchecked_text = describe_unchecked(analysis, trace=arguments.trace)
                print(
                    plain(
                        f"{path} is good{unchecked_text}: {summary_text(analysis)}"
                        + (f"; {resume_text}" if resume_text else "")
                    )
                )
                if analysis.choice is not None and not analysis.choice.is_exact:
                    from dslc.jobs.choose_plan import chosen_text

                    print(plain(chosen_text(analysis)))
    if output_format != "text":
        _write(output_format, reports)
    return status


def _name_unsafe_fixes(report: Report) -> None:
    from dslc.jobs.fix_job import count_unsafe_fixes

    if count := count_unsafe_fixes(report):
        verb = "has a fix" if count == 1 else "have fixes"
        print(f"{plural(count, 'error')} {verb} by another value: --unsafe-fixes sets it", file=sys.stderr)


def _write(output_format: str, reports: dict[str, list[Diagnostic]]) -> None:
    """Prints the diagnostics of all jobs for another program."""
    if output_format == "json":
        json.dump(
            to_json(diagnostic for diagnostics in reports.values() for diagnostic in diagnostics), sys.stdout, indent=2
        )
        print()
        return
    from dslc.terminal import diagnostic_formats

    if output_format == "sarif":
        json.dump(diagnostic_formats.sarif(reports), sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        sys.stdout.write(
            diagnostic_formats.github(reports) if output_format == "github" else diagnostic_formats.junit(reports)
        )


def check_with(path: str, arguments: argparse.Namespace) -> tuple[Report, Analysis | None, str]:
    """Returns the diagnostics of a job with those that `--resume` and `--locked` ask for, the analysis of its last
    combination, and the checkpoint from which it would resume, in words.
    """
    analyses: list[Analysis] = []
    resume_text = ""

    def then(analysis: Analysis, report: Report) -> None:
        nonlocal resume_text
        analyses.append(analysis)
        if arguments.resume is not None:
            from dslc.runs.resume import check_resume

            resume_text = check_resume(analysis, arguments.resume, report)

    report, analysis = check_one(path, arguments.settings, trace=arguments.trace, then=then)
    if arguments.resume is not None:  # which asks for a folder that holds checkpoints
        report.found = [d for d in report.found if d.code != "W0811"]
    if arguments.locked and analyses and not report.errors:
        from dslc.jobs.lock import check_lock

        check_lock(path, load(path, arguments.settings), analyses[0], report)
    return report, analysis, resume_text
