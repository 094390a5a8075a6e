"""A job with its model's stages on the pipeline: the input of the memory, traffic and time computations; the process
groups that its ranks open; and the tensors that one stage sends to the next, with the layers with which none can end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from dslc.compiler.ir.network_facts import OptimizerFacts
from dslc.compiler.ir.nodes import LayerNode, ModelGraph
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.placement import sharding
from dslc.compiler.placement.axes import AXES, neighbours
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.losses import HeadChunks, chunked_head, compared_ranks
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


def process_groups(staging: Staging, rank: int) -> list[tuple[int, ...]]:
    """Returns the ranks of each process group that a rank opens in a training: of all ranks, of the mesh, of
    `fully_shard`, of an exchange, of a loss and of checks. Groups of one rank are left out, and groups that gloo
    carries in any job.

    runtime/parallel/mesh.py opens most of them. Torch opens a new group for each axis of a mesh, even if another group
    has the same ranks. An axis of all ranks has the group of all ranks.
    """
    layout, ranks = staging.layout, range(staging.layout.world_size)
    opened = [*_mesh_groups(staging, rank), *_shared_groups(staging, rank)]
    groups = [tuple(ranks), *(group for group in opened if len(group) < len(ranks))]
    groups += [tuple(ranks)] * _further_worlds(staging.sharding)
    return [group for group in groups if len(group) > 1] if layout.world_size > 1 else []


def ranks_that_share(group: Sequence[int], processes: int) -> int:
    """Returns the number of ranks of a group on each node of `processes` ranks; 0 if nodes have unequal numbers of
    them, with which no rank shares memory.
    """
    if group[0] // processes == group[-1] // processes:
        return len(group)
    counts = set(Counter(rank // processes for rank in group).values())
    return counts.pop() if len(counts) == 1 else 0


def _mesh_groups(staging: Staging, rank: int) -> list[tuple[int, ...]]:
    """Returns the groups of a rank along the axes of the mesh, and along the axes of the mesh for `fully_shard`."""
    sizes, policy = staging.layout.sizes, staging.sharding
    parts: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in AXES}
    digits = dict(sizes)
    if policy.experts > 1:
        parts["data"] = ("copies", "expert")
        digits = {
            "pipeline": sizes["pipeline"],
            "copies": sizes["data"] // policy.experts,
            "expert": policy.experts,
            "context": sizes["context"],
            "tensor": sizes["tensor"],
        }
    has_root = sizes["data"] != staging.layout.world_size or policy.experts > 1
    groups = [neighbours(digits, (name,), rank) for name in digits] if has_root else []
    sequence = neighbours(sizes, ("data", "context"), rank)
    if policy.engine == "fsdp":
        groups += _split(sequence, policy.replicas, rank, is_new=has_root)
        if policy.experts > 1:
            copies = neighbours(digits, ("copies", "context"), rank)
            replicas = min(policy.replicas, len(copies))
            groups += _split(copies, replicas, rank, is_new=sizes["context"] > 1)
    asked = [("data", "context")]  # in a checked step, for batch statistics and copies
    if staging.model.traced is not None:
        staged = sizes["pipeline"] > 1
        asked += [("pipeline", "data")] if staged else [("context", "tensor")] if staging.job.train.step is None else []
    for axes in asked:
        wide = [name for axis in axes if sizes[axis] > 1 for name in parts[axis]]
        groups += [neighbours(digits, wide, rank)] if len(wide) > 1 else []
    return groups


def _split(members: tuple[int, ...], replicas: int, rank: int, *, is_new: bool) -> list[tuple[int, ...]]:
    """Returns the groups of a mesh of `fully_shard`: replicas, shards, and `members` if their group `is_new`."""
    shards = len(members) // replicas
    copy, part = divmod(members.index(rank), shards)
    split = [members[part::shards], members[copy * shards : (copy + 1) * shards]] if replicas > 1 else []
    return [members, *split] if is_new else split


def _shared_groups(staging: Staging, rank: int) -> list[tuple[int, ...]]:
    """Returns the groups of a rank for an exchange of nodes, and for a loss that compares the samples of a node."""
    layout, exchange = staging.layout, staging.sharding.exchange
    groups = []
    if (together := compared_ranks(staging.job, layout)) > 1 and together < layout.sizes["data"]:
        first, tensor = divmod(rank, layout.sizes["tensor"])
        begin = first // together * together
        groups.append(tuple((begin + n) * layout.sizes["tensor"] + tensor for n in range(together)))
    if exchange is not None and exchange.pieces > 1 and staging.sharding.engine != "fsdp":
        node = rank // exchange.pieces * exchange.pieces
        groups.append(tuple(range(node, node + exchange.pieces)))
        groups.append(tuple(range(rank % exchange.pieces, layout.world_size, exchange.pieces)))
    return groups


def _further_worlds(policy: Sharding) -> int:
    """Returns the number of groups of all ranks that an exchange opens beside the first."""
    exchange = policy.exchange
    if exchange is None or policy.engine == "fsdp":
        return 0
    return 2 if exchange.every == 0 and exchange.pieces == 1 else 1


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
