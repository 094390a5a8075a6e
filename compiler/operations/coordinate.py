"""One pipeline coordinate of a job: its stages and layers, and the ranks that its operations are among."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from math import prod

from dslc.compiler.ir.nodes import LayerNode, ParameterNode
from dslc.compiler.model.float8 import gathered_weights
from dslc.compiler.operations import moments as m
from dslc.compiler.operations.moments import Moment, RankGroup
from dslc.compiler.placement.sharding import with_copies
from dslc.compiler.placement.shares import largest
from dslc.compiler.placement.staging import Staging
from dslc.compiler.placement.tensor_plan import shape_on_a_rank
from dslc.dsl.record import record


@record
class Coordinate(Staging):
    """The part of one pipeline coordinate: `mine` are its stages, `held` the layers of each, with copies of weights
    that another coordinate owns.
    """

    pipeline: int
    mine: tuple[int, ...]
    held: tuple[tuple[LayerNode, ...], ...]
    whole: Staging  # of all coordinates
    shape: Callable[[ParameterNode], tuple[int, ...]]  # of a rank's share, along the tensor axis

    @property
    def layers(self) -> list[LayerNode]:
        return [layer for stage in self.held for layer in stage]

    @cached_property
    def float8_weights(self) -> frozenset[str]:
        """The weights that `fully_shard` gathers in 8 bits."""
        return gathered_weights(self.job, self.model)

    def along(self, axis: str) -> RankGroup:
        return RankGroup(axis=axis, ranks=self.layout.sizes[axis], stride=self.layout.stride(axis))

    @property
    def shards(self) -> RankGroup:
        """The ranks that have the shares of one copy of the parameters."""
        return RankGroup(axis="data", ranks=self.sharding.shards, stride=self.layout.stride("context"))

    @property
    def owners(self) -> RankGroup:
        """The ranks that have copies or shares of the same parameters."""
        ranks = self.sharding.shards * self.sharding.replicas
        return RankGroup(axis="data", ranks=ranks, stride=self.layout.stride("context"))

    @property
    def replicas(self) -> RankGroup:
        """The ranks that have copies of the same share."""
        stride = self.layout.stride("context") * self.sharding.shards
        return RankGroup(axis="data", ranks=self.sharding.replicas, stride=stride)

    @property
    def experts(self) -> RankGroup:
        """The ranks that share the experts of each layer."""
        return RankGroup(axis="expert", ranks=self.sharding.experts, stride=self.layout.stride("data"))

    @property
    def expert_shards(self) -> RankGroup:
        """The ranks that have the shares of one copy of the experts of a rank of the expert axis."""
        return self._with_sequences(self.sharding.expert_shards, 1)

    @property
    def expert_replicas(self) -> RankGroup:
        """The ranks that have copies of the same share of experts."""
        return self._with_sequences(self.sharding.expert_replicas, self.sharding.expert_shards)

    def _with_sequences(self, ranks: int, apart: int) -> RankGroup:
        """Returns a group of ranks that hold the same experts, each `apart` after the one before among all of these:
        the ranks of a sequence, then the ranks of the next copy.
        """
        pieces, copy = self.layout.sizes["context"], self.layout.stride("data") * self.sharding.experts
        if apart % pieces == 0:  # at one place in their sequences
            return RankGroup(axis="data", ranks=ranks, stride=copy * (apart // pieces))
        if ranks <= pieces:
            return RankGroup(axis="data", ranks=ranks, stride=apart * self.layout.stride("context"))
        return RankGroup(axis="data", ranks=ranks, stride=copy, run=pieces)

    @property
    def complete(self) -> Moment:
        """Where the gradients of a stage are complete; of a micro-batch, if they are not accumulated."""
        if self.schedule and self.sharding.reduces:
            return m.REDUCE_GRADIENTS
        return m.LAST_WEIGHT_GRADIENTS if self.sharding.accumulate else m.WEIGHT_GRADIENTS

    def padded(self, parameter: ParameterNode) -> int:
        """Returns a parameter's numbers as tensor and expert axes leave it, padded to equal rows on all shards."""
        shape, shards = self.shape(parameter), self.sharding.shards_of(parameter)
        return largest(shape[0], shards) * shards * prod(shape[1:]) if shape else 0


def place_of(staging: Staging, pipeline: int) -> Coordinate:
    mine, model = staging.stages_of(pipeline), staging.model
    layers = iter(with_copies([model.layers[n] for stage in mine for n in staging.stages[stage]]))
    return Coordinate(
        **{each.name: getattr(staging, each.name) for each in fields(Staging)},
        pipeline=pipeline,
        mine=mine,
        held=tuple(tuple(next(layers) for _ in staging.stages[stage]) for stage in mine),
        whole=staging,
        shape=shape_on_a_rank(staging.cuts, staging.layout.sizes["tensor"], staging.sharding.experts),
    )
