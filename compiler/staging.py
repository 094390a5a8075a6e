"""A job and how its model lies on the pipeline: what memory, traffic and time are computed from."""

from __future__ import annotations

from dataclasses import dataclass

from dslc.compiler.layout import Layout
from dslc.compiler.nodes import ModelGraph
from dslc.compiler.schedules import ScheduleTable
from dslc.compiler.workload import Workload
from dslc.dsl.job import JobSpec


@dataclass(frozen=True, kw_only=True)
class Staging:
    """`stages` are the layers of each, by their place in the model. Without a pipeline there is one stage, and no
    schedule."""

    job: JobSpec
    layout: Layout
    workload: Workload
    model: ModelGraph
    stages: tuple[range, ...]
    schedule: ScheduleTable | None

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline coordinate of each stage."""
        return self.schedule.placement if self.schedule else (0,) * len(self.stages)

    def stages_of(self, pipeline: int) -> tuple[int, ...]:
        """The stages of the ranks at a pipeline coordinate."""
        return tuple(stage for stage, rank in enumerate(self.placement) if rank == pipeline)
