"""A job with its model's stages on the pipeline: the input of the memory, traffic and time computations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.ir.optimizer_facts import OptimizerFacts
from dslc.compiler.placement import sharding
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.schedules import SPLITS_BACKWARD, ScheduleTable
from dslc.compiler.placement.sharding import Sharding, Unit
from dslc.compiler.placement.tensor_plan import TensorPlan
from dslc.compiler.placement.workload import Workload
from dslc.dsl.language.job import JobSpec
from dslc.dsl.record import Record, record


@record
class Staging(Record):
    """A model in stages: `stages` are the layers of each, by index in the model. Without a pipeline there is one stage,
    and no schedule. `cuts` is the plan of the tensor axis, which is empty without one.
    """

    job: JobSpec
    layout: Layout
    workload: Workload
    model: ModelGraph
    cuts: TensorPlan
    stages: tuple[range, ...]
    schedule: ScheduleTable | None
    optimizer: OptimizerFacts | None = None  # of a user's own

    @property
    def placement(self) -> tuple[int, ...]:
        """Pipeline coordinate of each stage."""
        return self.schedule.placement if self.schedule else (0,) * len(self.stages)

    @cached_property
    def sharding(self) -> Sharding:
        """Layout of parameters, gradients and the optimizer's state over the data and context axes."""
        return sharding.sharding_of(self.job, self.layout)

    @cached_property
    def trained(self) -> frozenset[str]:
        """The parameters that train."""
        return sharding.trained(self.job, self.model)

    @cached_property
    def with_gradients(self) -> frozenset[str]:
        """Those of them that have a gradient."""
        return self.trained - set(self.model.unused)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The units that `fully_shard` gathers, of the whole model."""
        return sharding.units(self.model)

    @cached_property
    def holders(self) -> dict[str, set[int]]:
        """Pipeline coordinates that have each parameter, by the first name of a tied weight."""
        return holders(self.model, self.stages, self.placement)

    def stages_of(self, pipeline: int) -> tuple[int, ...]:
        """Returns the stages of the ranks at a pipeline coordinate."""
        return tuple(stage for stage, rank in enumerate(self.placement) if rank == pipeline)


def stages_with_whole_backward(
    job: JobSpec, model: ModelGraph, stages: Sequence[range], schedule: ScheduleTable
) -> dict[int, tuple[str, ...]]:
    """Returns the stages whose backward pass cannot be split, each with an entry of `ModelFacts.repeated`: they use a
    parameter again after another. torch does not split that of the first stage.
    """
    if schedule.name not in SPLITS_BACKWARD or model.traced is None:
        return {}
    trains = sharding.trained(job, model)
    entries: dict[int, tuple[str, ...]] = {}
    for index, stage in enumerate(stages[1:], 1):
        layers = {model.layers[n].name for n in stage}
        for entry in model.traced.repeated:
            parameter, *places, other = entry
            if trains.issuperset((parameter, other)) and layers.issuperset(places):
                entries.setdefault(index, entry)
    return entries


def holders(model: ModelGraph, stages: Sequence[range], placement: Sequence[int]) -> dict[str, set[int]]:
    """Returns the pipeline coordinates that have each parameter, by the first name of a tied weight."""
    found: dict[str, set[int]] = {}
    for stage, rank in zip(stages, placement, strict=True):
        for q in (q for n in stage for q in model.layers[n].parameters):
            found.setdefault(q.first_name, set()).add(rank)
    return found
