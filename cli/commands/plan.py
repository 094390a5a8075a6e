"""`dslc plan`: the work of every rank."""

from __future__ import annotations

import argparse
import shutil
import sys

from dslc.compiler.compile import Compiled, compile_plan
from dslc.compiler.show.explain import explain, explain_rank
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.dsl.plain import plain, plain_lines
from dslc.front import inspect, show
from dslc.status import GOOD, JOB_AT_FAULT, WRONG_USAGE


def compiled_or_shown(path: str, settings: list[str], *, trace: bool) -> Compiled | None:
    """Returns the plan, or shows the job's mistakes and returns None."""
    report = Report()
    analysis = inspect(load(path, settings), report, trace=trace)
    show(report)
    return None if report.errors or analysis is None else compile_plan(analysis)


def main(arguments: argparse.Namespace) -> int:
    if arguments.origins:
        return _origins(arguments)
    compiled = compiled_or_shown(arguments.job, arguments.settings, trace=arguments.trace)
    if compiled is None:
        return JOB_AT_FAULT
    plan = compiled.plan
    if arguments.rank is not None and not 0 <= arguments.rank < plan.world_size:
        print(f"dslc: there is no rank {arguments.rank}: ranks are 0 to {plan.world_size - 1}", file=sys.stderr)
        return WRONG_USAGE
    if arguments.json:
        sys.stdout.write(plan.text())
    elif arguments.rank is not None:
        print(plain_lines(explain_rank(plan, arguments.rank, _width()).rstrip()))
    else:
        print(plain_lines(explain(plan, _width()).rstrip()))
    return GOOD


def _width() -> int | None:
    """Returns the width of the terminal; None for a file or a pipe, which take lines of any length."""
    return max(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def _origins(arguments: argparse.Namespace) -> int:
    loaded = load(arguments.job, arguments.settings)
    show(loaded.report)
    if loaded.report.errors:
        return JOB_AT_FAULT
    width = max(map(len, loaded.origins), default=0)
    for path, origin in sorted(loaded.origins.items()):
        print(plain(f"{path:{width}}  {origin}"))
    return GOOD
