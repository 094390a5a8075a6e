"""`dslc render`: the plan as a picture, or as a page that also shows its run or a second plan beside it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.draw import draw
from dslc.compiler.show.page.content import PageSide, RunFigures
from dslc.compiler.show.page.memory_moments import memory_moments
from dslc.compiler.show.page.plan_page import page
from dslc.compiler.show.picture import write
from dslc.dsl.files import write_file
from dslc.dsl.plain import plain
from dslc.terminal.exit_codes import GOOD, CommandFailedError

if TYPE_CHECKING:
    from dslc.commands.plan import OpenedPlan
    from dslc.compiler.rules.analysis import Analysis


def main(arguments: argparse.Namespace) -> int:
    if os.path.splitext(arguments.output)[1] not in (".svg", ".png", ".dot", ".html"):
        raise CommandFailedError(plain(f"{arguments.output}: a picture is .svg, .png, .dot or .html"))
    is_page = arguments.output.endswith(".html")
    if arguments.second is not None and not is_page:
        raise CommandFailedError(plain(f"{arguments.output}: two plans are shown by a page, a .html file"))
    if arguments.second is not None:
        write_file(arguments.output, _pair_page(arguments))
    elif is_page:
        opened = _opened(arguments)
        side = _side(arguments.job, arguments.job, opened.view, opened.analyse())
        write_file(arguments.output, page([side], arguments.view))
    else:
        write(draw(_opened(arguments).view, arguments.view), arguments.output)
    print(plain(f"{arguments.output} written"), file=sys.stderr)
    return GOOD


def _opened(arguments: argparse.Namespace) -> OpenedPlan:
    from dslc.commands.plan import plan_of

    job = os.path.join(arguments.job, "plan.json") if os.path.isdir(arguments.job) else arguments.job
    return plan_of(argparse.Namespace(**{**vars(arguments), "job": job}))


def _pair_page(arguments: argparse.Namespace) -> str:
    from dslc.compiler.graph.plan_view import plan_view
    from dslc.jobs.compared_plans import comparison_of, open_plan_side

    first = open_plan_side(arguments.job, [], arguments.trace)
    second = open_plan_side(arguments.second, arguments.settings, arguments.trace)
    sides = [
        _side(path, opened.name, plan_view(opened.graph), opened.analysis)
        for path, opened in ((arguments.job, first), (arguments.second, second))
    ]
    return page(sides, arguments.view, comparison_of(first, second))


def _side(path: str, name: str, plan: PlanView, analysis: Analysis | None) -> PageSide:
    run = _figures(path) if os.path.isdir(path) else None
    return PageSide(name=name, plan=plan, run=run, moments=memory_moments(analysis) if analysis else ())


def _figures(folder: str) -> RunFigures:
    from dslc.launching.run_state import run_states
    from dslc.runs.run_figures import run_figures

    (state,) = run_states([folder])
    try:
        return run_figures(folder, state.line())
    except ValueError as error:
        raise CommandFailedError(plain(str(error))) from None
