"""Compiles a JobSpec to a plan and rank programs: the second gate after the first."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import cached_property

from dslc.compiler.emit import emit, places
from dslc.compiler.graph.build import build_graph
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.plan_view import plan_view
from dslc.compiler.ir import program as p
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.model.job_steps import locate_paths
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.language.job import JobSpec
from dslc.dsl.record import Record, record


@record
class Compiled(Record):
    """A plan, and the analysis that it comes from."""

    analysis: Analysis
    graph: PlanGraph

    @cached_property
    def plan(self) -> PlanView:
        """The plan as it is shown."""
        return plan_view(self.graph)

    def program(self) -> p.JobProgram:
        job = self.analysis.job
        program = locate_paths(emit(self.graph, self.plan.hash), job.folder)
        return replace(program, file=job.source.name, calibrate=calibrate_command(job))

    def places(self) -> tuple[p.RankPlace, ...]:
        return places(self.graph)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Returns the plan as a notebook shows it."""
        from dslc.compiler.show.notebook_view import plan_bundle

        return plan_bundle(self.plan)


def calibrate_command(job: JobSpec) -> str:
    """Returns the command that measures anew what the predicted times of a job rest on."""
    output = " -o FILE" if job.devices.catalogue is not None else ""  # else into the user's own folder
    return f"dslc calibrate {shlex.quote(job.source.name)}{output}"


def compile_plan(analysis: Analysis) -> Compiled:
    """Returns the plan of a job that `analyse` accepted. Raises `Unsound` on a bug of the compiler."""
    return Compiled(analysis=analysis, graph=build_graph(analysis))
