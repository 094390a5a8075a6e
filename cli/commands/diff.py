"""`dslc diff`: what differs between two plans."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from dslc.compiler.comparison import SECTIONS, PlanDifference, compare_plans, rows, summary
from dslc.compiler.compile import compile_plan
from dslc.compiler.emit import emit
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.stored import plan_hash
from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.program import JobProgram, Training
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.dsl.plain import plain, plain_lines
from dslc.jobs.check_job import inspect, show
from dslc.jobs.plan_file_input import is_plan_file, open_plan
from dslc.jobs.revision import is_revision, load_revision
from dslc.runtime.checkpoint.files import Shapes, fit_of, incompatibilities
from dslc.terminal.exit_codes import CommandFailedError

SAME, DIFFERENT = 0, 1  # exit statuses, as of `diff`; that of CommandFailedError if a plan cannot be made
_TITLES = {"memory": "memory of a rank", "traffic": "traffic of a rank, each step"}


class _Side(NamedTuple):
    name: str
    graph: PlanGraph


def main(arguments: argparse.Namespace) -> int:
    first_side = _open(arguments.first, [], arguments.trace)
    second_side = _open(arguments.second or arguments.first, arguments.settings, arguments.trace)
    changes = compare_plans(first_side.graph, second_side.graph)
    if arguments.json:
        json.dump(_json(first_side, second_side, changes), sys.stdout, indent=2)
        print()
    else:
        lines = _markdown if arguments.markdown else _text
        print(plain_lines("\n".join(lines(first_side, second_side, changes))))
    return DIFFERENT if changes else SAME


def _open(name: str, settings: Sequence[str], trace: bool) -> _Side:
    """Returns the plan of a job, a plan file, a run directory or a job at a revision. Raises CommandFailedError with
    the mistakes shown.
    """
    report = Report()
    path = os.path.join(name, "plan.json") if os.path.isdir(name) else name
    graph = None
    if is_plan_file(path):
        plan_file = open_plan(path, report, [f"--set {setting}" for setting in settings])
        graph = plan_file.graph if plan_file else None
    else:
        load_result = load_revision(path, settings, report) if is_revision(path) else load(path, settings)
        analysis = inspect(load_result, report, trace=trace) if load_result else None
        graph = compile_plan(analysis).graph if analysis and not report.errors else None
    show(report.errors)
    if graph is None:
        raise CommandFailedError
    return _Side(" ".join([name, *(f"--set {setting}" for setting in settings)]), graph)


# ------------------------------------------------------------------------------------------------------- checkpoints


def _misfits(first_graph: PlanGraph, second_graph: PlanGraph, changes: Sequence[PlanDifference]) -> list[str] | None:
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


def _checkpoints(reasons: Sequence[str] | None) -> str:
    if reasons is None:
        return "unknown, as the shapes of all parameters or the samples are"
    if reasons:
        return f"those of the first do not fit: {'; '.join(reasons)}"
    return "those of the first can be resumed by the second"


# ------------------------------------------------------------------------------------------------------------ output


def _text(first_side: _Side, second_side: _Side, changes: Sequence[PlanDifference]) -> list[str]:
    lines = [f"{first_side.name}  ->  {second_side.name}: {summary(changes)}"]
    if not changes:
        return lines
    lines += [f"checkpoints: {_checkpoints(_misfits(first_side.graph, second_side.graph, changes))}"]
    for section in SECTIONS:
        table = rows(changes, section)
        lines += ["", _TITLES.get(section, section)] if table else []
        widths = [max((len(row[n]) for row in table), default=0) for n in range(3)]
        for field, old_value, new_value, relative in table:
            lines.append(
                f"  {field:{widths[0]}}  {old_value:>{widths[1]}}  ->  {new_value:<{widths[2]}}  {relative}".rstrip()
            )
    return lines


def _markdown(first_side: _Side, second_side: _Side, changes: Sequence[PlanDifference]) -> list[str]:
    lines = [f"**`{first_side.name}` → `{second_side.name}`: {summary(changes)}**"]
    if not changes:
        return lines
    lines += ["", f"Checkpoints: {_checkpoints(_misfits(first_side.graph, second_side.graph, changes))}."]
    for section in SECTIONS:
        table = rows(changes, section)
        lines += (
            ["", f"| {_TITLES.get(section, section)} | before | after | |", "| --- | --- | --- | --- |"]
            if table
            else []
        )
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in table]
    return lines


def _json(first_side: _Side, second_side: _Side, changes: Sequence[PlanDifference]) -> dict[str, object]:
    return {
        "before": {"name": plain(first_side.name), "hash": plan_hash(first_side.graph)},
        "after": {"name": plain(second_side.name), "hash": plan_hash(second_side.graph)},
        "same_training": not any(change.section == "training" for change in changes),
        "checkpoint_misfits": _misfits(first_side.graph, second_side.graph, changes),
        "changes": [to_json(change) for change in changes],
    }
