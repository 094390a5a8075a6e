"""`dslc plan`: the work of every rank."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from dslc.compiler.compile import Compiled, compile_plan
from dslc.compiler.graph.build import build_graph
from dslc.compiler.graph.passes import PASSES
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.plan_text import plan_text
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.rules.choice.choice_text import HEAD, RIGHT, chosen_line, count_line, why_rows
from dslc.compiler.rules.training.custom_optimizer import tell_of_memory
from dslc.compiler.show.chakra import GROUPS, PlanNotTraceableError, write_execution_traces
from dslc.compiler.show.explain import explain, explain_rank
from dslc.compiler.show.schedule import known_times
from dslc.compiler.show.text_table import table
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import LoadResult, load
from dslc.dsl.plain import plain, plain_lines
from dslc.dsl.record import Record, record
from dslc.dsl.words import plural
from dslc.jobs.check_job import inspect, show
from dslc.jobs.choose_plan import chosen_text, with_choice
from dslc.jobs.lock import lock_path, write_lock
from dslc.jobs.plan_file_input import analysis_of_plan, is_plan_file, job_of, open_plan
from dslc.runs.load_one import load_first
from dslc.runs.plan_file_output import file_of
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT, CommandFailedError

T = TypeVar("T")
_RUNNERS_UP = 10


@record
class OpenedPlan(Record):
    """The plan of a job or of a plan file, its view, and what makes the contents of its file. `analyse` returns the
    analysis of its job, None if the job has another plan here.
    """

    graph: PlanGraph
    view: PlanView
    text: Callable[[], str]
    analyse: Callable[[], Analysis | None]


def plan_of(arguments: argparse.Namespace) -> OpenedPlan:
    """Returns the plan of a job or of a plan file. Raises CommandFailedError with the mistakes shown."""
    report = Report()
    if is_plan_file(arguments.job):
        opened_file = open_plan(arguments.job, report, _changes(arguments))
        plan_file = _require(report, opened_file)
        analyse = partial(analysis_of_plan, plan_file, arguments.job)
        return OpenedPlan(graph=plan_file.graph, view=plan_file.plan, text=plan_file.text, analyse=analyse)
    load_result = load_first(arguments.job, arguments.settings)
    analysis = inspect(load_result, report, trace=arguments.trace)
    if analysis is not None:
        report.extend(tell_of_memory(analysis.job, analysis.facts.optimizer))
    compilation = compile_plan(_require(report, analysis))
    if choice := chosen_text(analysis):
        print(plain(f"{choice}; `dslc plan {arguments.job} --why` shows its runners-up"), file=sys.stderr)
    text = partial(_file_text, compilation, load_result)
    return OpenedPlan(graph=compilation.graph, view=compilation.plan, text=text, analyse=lambda: analysis)


def _file_text(compilation: Compiled, load_result: LoadResult) -> str:
    return file_of(compilation, with_choice(load_result, compilation.analysis)).text()


def _require(report: Report, result: T | None) -> T:
    """Shows a report, and returns what was found without mistakes. Raises CommandFailedError."""
    show(report)
    if report.errors or result is None:
        raise CommandFailedError(status=JOB_AT_FAULT)
    return result


def _changes(arguments: argparse.Namespace) -> list[str]:
    """Returns the options of a command line that would change a plan."""
    return [*(f"--set {setting}" for setting in arguments.settings), *(["--trace"] if arguments.trace else [])]


def main(arguments: argparse.Namespace) -> int:
    if arguments.origins:
        _print_origins(arguments)
    elif arguments.after is not None:
        _print_after_pass(arguments)
    elif arguments.why:
        _print_reasons(arguments)
    elif arguments.lock:
        _lock(arguments)
    elif arguments.chakra is not None:
        _write_execution_traces(arguments)
    else:
        _print_plan(arguments)
    return GOOD


def _print_plan(arguments: argparse.Namespace) -> None:
    opened = plan_of(arguments)
    plan, text = opened.view, opened.text
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


def _analyse(arguments: argparse.Namespace, option: str) -> tuple[LoadResult, Analysis]:
    """Returns a job with its analysis; an `option` of a plan file is refused. Raises CommandFailedError."""
    report = Report()
    if is_plan_file(arguments.job):
        _require(report, open_plan(arguments.job, report, [option]))
    load_result = load_first(arguments.job, arguments.settings)
    return load_result, _require(report, inspect(load_result, report, trace=arguments.trace))


def _print_after_pass(arguments: argparse.Namespace) -> None:
    """Prints the plan graph of a job after a pass."""
    names = [plan_pass.name for plan_pass in PASSES]
    if arguments.after not in names:
        raise CommandFailedError(plain(f"there is no pass `{arguments.after}`: the passes are {', '.join(names)}"))
    _, analysis = _analyse(arguments, f"--after {arguments.after}")
    sys.stdout.write(plain_lines(plan_text(build_graph(analysis, after=arguments.after))))


def _print_reasons(arguments: argparse.Namespace) -> None:
    """Prints the chosen plan beside its runners-up."""
    _, analysis = _analyse(arguments, "--why")
    if analysis.choice is None:
        raise CommandFailedError(
            plain(f"{arguments.job} leaves nothing to the compiler: `dslc choose` compares its plan with others")
        )
    rows = why_rows(analysis.choice, _RUNNERS_UP)
    lines = [chosen_line(analysis.choice), count_line(analysis.choice), ""]
    lines += [f"  {line}" for line in table(rows, RIGHT, (*HEAD, "why"))]
    print(plain_lines("\n".join(lines)))


def _lock(arguments: argparse.Namespace) -> None:
    """Writes the lock of a job beside it."""
    load_result, analysis = _analyse(arguments, "--lock")
    write_lock(arguments.job, load_result, analysis)
    print(plain(f"{lock_path(arguments.job)} written; `dslc check {arguments.job} --locked` compares the plan with it"))


def _write_execution_traces(arguments: argparse.Namespace) -> None:
    """Writes the plan as Chakra execution traces, a file for each rank."""
    opened = plan_of(arguments)
    graph, plan = opened.graph, opened.view
    try:
        names = write_execution_traces(graph, plan, arguments.chakra)
    except PlanNotTraceableError as error:
        raise CommandFailedError(plain(f"{arguments.job}: {error}")) from None
    print(plain(f"{arguments.chakra}: {plural(len(names), 'execution trace')} of a step, from {names[0]} on, {GROUPS}"))
    if known_times(plan) is None:
        print(
            plain(f"without durations, as the time of a step is unknown: `dslc calibrate {arguments.job}` measures it")
        )


def _print_origins(arguments: argparse.Namespace) -> None:
    report = Report()
    if is_plan_file(arguments.job):
        opened_file = open_plan(arguments.job, report, _changes(arguments))
        load_result = job_of(opened_file, arguments.job) if opened_file else None
    else:
        load_result = load(arguments.job, arguments.settings)
        report.extend(load_result.report)
    origins = _require(report, load_result).origins
    width = max(map(len, origins), default=0)
    for path, origin in sorted(origins.items()):
        print(plain(f"{path:{width}}  {origin}"))


def _width() -> int | None:
    """Returns the width of the terminal; None for a file or a pipe, which take lines of any length."""
    return max(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
