"""The result of the analysis of a job, after every rule has been asked (analyse.py)."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property

from dslc.compiler.cost.cost import RankCost
from dslc.compiler.cost.estimate import StepEstimate
from dslc.compiler.cost.schedule_cost import Timeline
from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.schedules import ScheduleTable
from dslc.compiler.placement.sharding import Sharding, sharding_of
from dslc.compiler.placement.staging import Staging
from dslc.compiler.placement.workload import Workload
from dslc.compiler.rules.choice.plan_choice import PlanChoice
from dslc.dsl.language.job import JobSpec
from dslc.dsl.record import Record, record


@record
class PipelinePlan(Record):
    """The stages, their schedule and its time in units of the mean stage's forward and backward."""

    stages: tuple[range, ...]
    schedule: ScheduleTable | None
    timeline: Timeline | None
    bubble: float


@record
class Analysis(Record):
    """All facts derived from a job. `model`, and what needs it, is None for an untraced network of the user's."""

    job: JobSpec
    source: SourceFacts
    layout: Layout
    workload: Workload
    model: ModelGraph | None
    pipeline: PipelinePlan | None
    costs: tuple[RankCost, ...]  # by pipeline coordinate
    estimate: StepEstimate | None
    staging: Staging | None  # None without a model
    facts: Facts = field(default_factory=Facts)  # those that were gathered
    choice: PlanChoice | None = None  # of a job that leaves fields to the compiler

    @cached_property
    def sharding(self) -> Sharding:
        """Layout of parameters, gradients and the optimizer's state over the data and context axes."""
        return sharding_of(self.job, self.layout)
