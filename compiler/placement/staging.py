"""A job with its model's stages on the pipeline: the input of the memory, traffic and time computations; and the
tensors that one stage sends to the next, with the layers with which none can end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from dslc.compiler.ir.network_facts import OptimizerFacts
from dslc.compiler.ir.nodes import LayerNode, ModelGraph
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.placement import sharding
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.losses import HeadChunks, chunked_head
from dslc.compiler.placement.schedules import SPLITS_BACKWARD, ScheduleTable
from dslc.compiler.placement.sharding import Sharding, Unit, low_copy, low_dtype
from dslc.compiler.placement.tensor_plan import TensorPlan
from dslc.compiler.placement.workload import Workload
from dslc.dsl.language.job import JobSpec
from dslc.dsl.record import Record, record
from dslc.dsl.sums import float_sum


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
    def chunked_head(self) -> HeadChunks | None:
        """The head that computes the losses in chunks; None for a loss of whole logits."""
        return chunked_head(self.job, self.layout, self.workload.microbatch, self.model)

    @cached_property
    def trained(self) -> frozenset[str]:
        return sharding.trained(self.job, self.model)

    @cached_property
    def with_gradients(self) -> frozenset[str]:
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
        return tuple(stage for stage, rank in enumerate(self.placement) if rank == pipeline)

    def updated_numbers(self, pipeline: int) -> float:
        """Returns how many numbers of parameters a rank at a pipeline coordinate updates."""
        layers = [self.model.of_a_rank[n] for stage in self.stages_of(pipeline) for n in self.stages[stage]]
        trained = [q for layer in layers for q in layer.parameters if q.name in self.trained]
        return float_sum(q.count / self.sharding.shards_of(q) for q in trained)


def first_trained_stage(job: JobSpec, model: ModelGraph, stages: Sequence[range]) -> int:
    """Returns the first stage with a parameter that trains. A parameter of no layer may be used by any stage."""
    trains = sharding.trained(job, model)
    for index, stage in enumerate(stages):
        if any(q.first_name in trains for n in stage for q in model.layers[n].parameters):
            return index if all(layer.name or trains.isdisjoint(_names(layer)) for layer in model.layers) else 0
    return 0


def _names(layer: LayerNode) -> set[str]:
    return {q.first_name for q in layer.parameters}


def stages_with_whole_backward(
    job: JobSpec, model: ModelGraph, stages: Sequence[range], schedule: ScheduleTable
) -> list[int]:
    """Returns the stages but the first with a whole backward pass: torch cannot split it, or needs no gradients."""
    if schedule.name not in SPLITS_BACKWARD:
        return []
    untrained = range(1, first_trained_stage(job, model, stages) + 1)
    return sorted({*untrained, *repeated_uses(job, model, stages, schedule)})


def repeated_uses(
    job: JobSpec, model: ModelGraph, stages: Sequence[range], schedule: ScheduleTable
) -> dict[int, tuple[str, ...]]:
    """Returns the stages whose backward pass cannot be split, each with an entry of `ModelFacts.repeated`: they use a
    parameter again after another. torch does not split the backward pass of the first stage.
    """
    if schedule.name not in SPLITS_BACKWARD or model.traced is None:
        return {}
    trains = sharding.trained(job, model)
    entries: dict[int, tuple[str, ...]] = {}
    for index, stage in enumerate(stages[1:], 1):
        layers = {model.layers[n].name for n in stage}
        for entry in model.traced.repeated:
            parameter, *places, other_parameter = entry
            if trains.issuperset((parameter, other_parameter)) and layers.issuperset(places):
                entries.setdefault(index, entry)
    return entries


def holders(model: ModelGraph, stages: Sequence[range], placement: Sequence[int]) -> dict[str, set[int]]:
    """Returns the pipeline coordinates that have each parameter, by the first name of a tied weight."""
    coordinates_of: dict[str, set[int]] = {}
    for stage, rank in zip(stages, placement, strict=True):
        for q in (q for n in stage for q in model.layers[n].parameters):
            coordinates_of.setdefault(q.first_name, set()).add(rank)
    return coordinates_of


def boundary_tensors(job: JobSpec, model: ModelGraph, last_layer: int) -> tuple[TensorFact, ...]:
    """Returns the tensors of one sample that a stage ending with layer `last_layer` sends, in their own dtypes."""
    if model.traced is not None:
        return model.traced.seams[last_layer].sent
    layer = model.layers[last_layer]
    output = layer.output
    if output.dtype != "float32" or not (layer.low or low_copy(job)):
        return (output,)
    return (replace(output, dtype=low_dtype(job)),)


def unsendable(model: ModelGraph, last_layer: int) -> str:
    """Returns the reason why no stage can end with layer `last_layer`, which is not the model's last; "" if one can."""
    if model.traced is not None:
        return model.traced.seams[last_layer].refused
    return (
        "" if model.layers[last_layer].output.dtype == "float32" else "what it sends are tokens, which have no gradient"
    )
