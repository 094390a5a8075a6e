"""`dslc plan`: the work of every rank."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable

from dslc.compiler.compile import compile_plan
from dslc.compiler.graph.build import build_graph
from dslc.compiler.graph.passes import PASSES
from dslc.compiler.graph.plan_text import plan_text
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.rules.training.custom_optimizer import tell_of_memory
from dslc.compiler.show.explain import explain, explain_rank
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import LoadResult, load
from dslc.dsl.plain import plain, plain_lines
from dslc.jobs.check_job import inspect, show
from dslc.jobs.lock import lock_path, write_lock
from dslc.jobs.plan_file_input import is_plan_file, job_of, open_plan
from dslc.jobs.prepare_run import file_of
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT, CommandFailedError


def planned_or_shown(arguments: argparse.Namespace) -> tuple[PlanView, Callable[[], str]] | None:
    """Returns the plan of a job or of a plan file, and what makes the contents of its file; or shows the mistakes and
    returns None.
    """
    report = Report()
    if is_plan_file(arguments.job):
        made = open_plan(arguments.job, report, _changes(arguments))
        show(report)
        return (made.plan, made.text) if made is not None else None
    loaded = load(arguments.job, arguments.settings)
    analysis = inspect(loaded, report, trace=arguments.trace)
    if analysis is not None:
        report.extend(tell_of_memory(analysis.job, analysis.facts.optimizer))
    show(report)
    if report.errors or analysis is None:
        return None
    compiled = compile_plan(analysis)
    return compiled.plan, lambda: file_of(compiled, loaded).text()


def _changes(arguments: argparse.Namespace) -> list[str]:
    """Returns the options of a command line that would change a plan."""
    return [*(f"--set {each}" for each in arguments.settings), *(["--trace"] if arguments.trace else [])]


def main(arguments: argparse.Namespace) -> int:
    if arguments.origins:
        return _origins(arguments)
    if arguments.after is not None:
        return _print_after_pass(arguments)
    if arguments.lock:
        return _lock(arguments)
    planned = planned_or_shown(arguments)
    if planned is None:
        return JOB_AT_FAULT
    plan, text = planned
    if arguments.rank is not None and not 0 <= arguments.rank < plan.world_size:
        raise CommandFailedError(f"there is no rank {arguments.rank}: ranks are 0 to {plan.world_size - 1}")
    if arguments.json:
        sys.stdout.write(text())
    elif arguments.summary:
        sys.stdout.write(plan.text())
    elif arguments.rank is not None:
        print(plain_lines(explain_rank(plan, arguments.rank, _width()).rstrip()))
    else:
        print(plain_lines(explain(plan, _width()).rstrip()))
    return GOOD


def _print_after_pass(arguments: argparse.Namespace) -> int:
    """Prints the plan graph of a job after a pass."""
    names = [each.name for each in PASSES]
    if arguments.after not in names:
        raise CommandFailedError(plain(f"there is no pass `{arguments.after}`: the passes are {', '.join(names)}"))
    report = Report()
    if is_plan_file(arguments.job):
        open_plan(arguments.job, report, [f"--after {arguments.after}"])
        analysis = None
    else:
        analysis = inspect(load(arguments.job, arguments.settings), report, trace=arguments.trace)
    show(report)
    if report.errors or analysis is None:
        return JOB_AT_FAULT
    sys.stdout.write(plain_lines(plan_text(build_graph(analysis, after=arguments.after))))
    return GOOD


def _lock(arguments: argparse.Namespace) -> int:
    """Writes the lock of a job beside it."""
    report = Report()
    if is_plan_file(arguments.job):
        open_plan(arguments.job, report, ["--lock"])
        show(report)
        return JOB_AT_FAULT
    loaded = load(arguments.job, arguments.settings)
    analysis = inspect(loaded, report, trace=arguments.trace)
    show(report)
    if report.errors or analysis is None:
        return JOB_AT_FAULT
    write_lock(arguments.job, loaded, analysis)
    print(plain(f"{lock_path(arguments.job)} written; `dslc check {arguments.job} --locked` compares the plan with it"))
    return GOOD


def _width() -> int | None:
    """Returns the width of the terminal; None for a file or a pipe, which take lines of any length."""
    return max(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def _load_job_or_plan(arguments: argparse.Namespace) -> LoadResult | None:
    """Loads a job, or the job of a plan file; shows its mistakes and returns None."""
    report = Report()
    if is_plan_file(arguments.job):
        made = open_plan(arguments.job, report, _changes(arguments))
        loaded = job_of(made, arguments.job) if made else None
    else:
        loaded = load(arguments.job, arguments.settings)
        report.extend(loaded.report)
    show(report)
    return None if report.errors else loaded


def _origins(arguments: argparse.Namespace) -> int:
    loaded = _load_job_or_plan(arguments)
    if loaded is None:
        return JOB_AT_FAULT
    width = max(map(len, loaded.origins), default=0)
    for path, origin in sorted(loaded.origins.items()):
        print(plain(f"{path:{width}}  {origin}"))
    return GOOD
