"""The result of the analysis of a job, after every rule has been asked (analyse.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import cached_property

from dslc.compiler.cost.cost import RankCost
from dslc.compiler.cost.estimate import StepEstimate, estimate
from dslc.compiler.cost.schedule_cost import Timeline, timeline
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
    """The stages of a model and their schedule."""

    model: ModelGraph
    stages: tuple[range, ...]
    schedule: ScheduleTable | None

    @cached_property
    def timeline(self) -> Timeline | None:
        """The time of a step in FLOPs; None without a schedule."""
        return played(self.model, self.stages, self.schedule) if self.schedule else None

    @property
    def bubble(self) -> float:
        return self.timeline.bubble if self.timeline else 0.0


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
    staging: Staging | None  # None without a model
    facts: Facts = field(default_factory=Facts)  # those that were gathered
    choice: PlanChoice | None = None  # of a job that leaves fields to the compiler

    @cached_property
    def estimate(self) -> StepEstimate | None:
        """The time of a step; None without a model."""
        return estimate(self.staging, self.costs) if self.staging is not None else None

    @cached_property
    def sharding(self) -> Sharding:
        """Layout of parameters, gradients and the optimizer's state over the data and context axes."""
        return sharding_of(self.job, self.layout)


def played(model: ModelGraph, stages: Sequence[range], schedule: ScheduleTable) -> Timeline:
    """Plays a step of the schedule with these stages, by their FLOPs."""
    forward = [float(sum(model.layers[n].forward_flops for n in stage)) for stage in stages]
    backward = [float(sum(model.layers[n].backward_flops for n in stage)) for stage in stages]
    if sum(forward) == 0:
        forward, backward = [1.0] * len(stages), [2.0] * len(stages)
    return timeline(schedule, forward, backward)
