"""Places the collectives of the traffic account among the actions of a process.

The account counts them as torch issues them. Those of parameters and of their gradients are placed by group of weights;
of the others each count is divided over the actions that cause it, so that the sum is kept. All ranks of a process do
the same, so all of them issue the collectives at one place in the same order; the order of the operations within one
action is torch's own, and the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, assert_never

from dslc.compiler.cost.exchange_traffic import over_replicas
from dslc.compiler.cost.traffic import Coordinate, gathered_again, over_tensor, units_by_stage
from dslc.compiler.graph.graph import PlanGraph
from dslc.compiler.ir.records import Action, SharedWeight, Weights
from dslc.compiler.ir.tensors import DTYPE_BYTES
from dslc.compiler.ir.traffic import Payload, TrafficNode
from dslc.compiler.placement.whole_losses import EXCHANGED, compared_ranks


class Spot(NamedTuple):
    """Before or after the action at `position` of a line."""

    position: int
    after: bool


class Placing:
    """The exchanges of one process, whose actions are `line`."""

    def __init__(self, process: int, place: Coordinate, plan: PlanGraph, line: Sequence[Action]) -> None:
        self._process, self._place, self._plan, self._line = process, place, plan, line
        self._at: dict[str, list[int]] = {}
        for n, action in enumerate(line):
            self._at.setdefault(action.what, []).append(n)
        self._update = self._at["update"][0]
        self._forward = sorted(self._at["F"] + self._at.get("E", []))
        self._backward = sorted(self._at.get("B", []) + self._at.get("I", []))
        self._weights: dict[int, dict[str, Weights]] = {stage: {} for stage in place.mine}
        for name, weights in plan.of_kind(Weights):
            if weights.stage in self._weights:
                self._weights[weights.stage][name] = weights

    def exchanges(self, traffic: TrafficNode) -> Iterator[tuple[Spot, Action]]:
        """Yields the collectives as actions, each with its place in the line."""
        line, sharding = self._line, self._place.sharding
        match traffic.what:
            case Payload.PARAMETERS if traffic.operation == "all_gather":
                yield from self._gathers(traffic)
            case Payload.PARAMETERS | Payload.MOMENTA:
                yield (
                    Spot(self._update, traffic.what is Payload.PARAMETERS),
                    self._all_of(traffic, list(self._trained())),
                )
            case Payload.SECOND_FACTORS:
                own = [name for each in self._weights.values() for name, found in each.items() if found.factors]
                yield Spot(self._update, False), self._all_of(traffic, own)
            case Payload.GRADIENTS:
                yield from self._sums(traffic)
            case Payload.SCALE | Payload.SCALE_OF_SUMS if sharding.engine == "fsdp":
                yield from self._sums(traffic)
            case Payload.WEIGHTS:
                ahead = sharding.exchange is not None and sharding.exchange.ahead
                spot = Spot(self._at["F"][0], False) if ahead else Spot(self._update, True)
                yield spot, self._all_of(traffic, list(self._trained()))
            case Payload.SHARED_GRADIENTS:
                own = [name for name, each in self._plan.of_kind(SharedWeight) if each.summed and self._has(each)]
                yield Spot(self._update, False), self._all_of(traffic, own)
            case Payload.PARTIAL_GRADIENTS:
                yield from self._beside_pieces(traffic)
            case Payload.ACTIVATIONS | Payload.KEYS_AND_VALUES:
                yield from self._divided(traffic, [Spot(n, True) for n in self._forward])
            case Payload.LOSS_PARTS:
                last = max(line[n].stage for n in self._forward)
                yield from self._divided(traffic, [Spot(n, True) for n in self._forward if line[n].stage == last])
            case Payload.ACTIVATIONS_AGAIN | Payload.ACTIVATION_GRADIENTS | Payload.KEY_VALUE_GRADIENTS:
                yield from self._divided(traffic, [Spot(n, True) for n in self._backward])
            case Payload.BATCH_STATISTICS:
                yield from self._divided(traffic, [Spot(n, True) for n in sorted(self._forward + self._backward)])
            case Payload.OUTPUTS | Payload.TARGETS | Payload.OUTPUT_GRADIENTS:
                yield from self._divided(traffic, [Spot(self._at.get("E", self._at["F"])[-1], True)])
            case Payload.BUFFERS | Payload.KEPT_COUNT | Payload.ROUND_END:
                yield from self._divided(traffic, [Spot(self._forward[0], False)])
            case (
                Payload.SCALE
                | Payload.SCALE_OF_SUMS
                | Payload.LOSS_COUNT
                | Payload.USED_PARAMETERS
                | Payload.GRADIENT_NORM
                | Payload.NONFINITE
            ):
                yield from self._divided(traffic, [Spot(self._update, False)])
            case Payload.NOTHING:
                raise AssertionError(f"an exchange of nothing: {traffic}")
            case _:
                assert_never(traffic.what)

    # --------------------------------------------------------------------------------------- parameters and gradients

    def _gathers(self, traffic: TrafficNode) -> Iterator[tuple[Spot, Action]]:
        """Yields a gather wherever parameters are used, or about to be, and are not there."""
        again = {stage: self._regathered_weights(stage) for stage in self._weights}
        there: set[str] = set()
        for n, action in enumerate(self._line):
            own = self._weights.get(action.stage, {})
            match action.what:
                case "RESHARD":
                    there -= own.keys()
                case "UNSHARD" | "E" | "F" | "B" | "I" | "W":
                    wanted = own if action.what in ("UNSHARD", "E", "F") else again[action.stage]
                    missing = [name for name in wanted if name not in there]
                    if missing:
                        sizes = [own[name].numbers // own[name].shards for name in missing]
                        size = DTYPE_BYTES[traffic.dtype] * sum(sizes)
                        yield Spot(n, action.what == "UNSHARD"), self._action(traffic, len(missing), size, missing)
                    there.update(missing)
                    if action.what in ("E", "F"):
                        there -= {name for name, each in own.items() if each.freed}

    def _regathered_weights(self, stage: int) -> list[str]:
        """Returns the weights of a stage that are gathered for the backward pass too."""
        if not self._place.sharding.reshard:
            return []
        units = next(units for index, units in units_by_stage(self._place) if index == stage)
        names = gathered_again(self._place, stage, units)
        apart = [unit.name in names for unit in units if unit.parameters]
        return [name for name, again in zip(self._weights[stage], apart, strict=True) if again]

    def _sums(self, traffic: TrafficNode) -> Iterator[tuple[Spot, Action]]:
        """Yields the sums of a stage's gradients once they are complete; over replicas those of its last micro-batch,
        and of DistributedDataParallel all before the update.
        """
        if self._place.sharding.engine != "fsdp":
            yield Spot(self._update, False), self._all_of(traffic, list(self._trained()))
            return
        last = over_replicas(traffic.operation, traffic.what)
        shards = self._place.sharding.shards if last else 1
        complete = self._complete()
        for n in complete[-1:] if last and "REDUCE_GRAD" not in self._at else complete:
            own = {name: each for name, each in self._weights[self._line[n].stage].items() if each.trained}
            if own:
                size = sum(each.trained or 0 for each in own.values()) * DTYPE_BYTES[traffic.dtype] // shards
                if traffic.what in (Payload.SCALE, Payload.SCALE_OF_SUMS):
                    size = 4 * len(own)
                yield Spot(n, True), self._action(traffic, len(own), size, list(own))

    def _complete(self) -> list[int]:
        """Returns the actions after which gradients of a stage, or of a micro-batch, are complete."""
        weights = sorted(self._at.get("B", []) + self._at.get("W", []))
        return self._at.get("REDUCE_GRAD") or self._last_passes(weights)

    def _last_passes(self, passes: list[int]) -> list[int]:
        """Returns the last pass of each stage, or all if gradients are not accumulated over micro-batches."""
        if not self._place.sharding.accumulate:
            return passes
        return sorted({self._line[n].stage: n for n in passes}.values())

    def _beside_pieces(self, traffic: TrafficNode) -> Iterator[tuple[Spot, Action]]:
        """Yields the sums along the tensor axis once gradients are complete; the rest belongs to single calls."""
        axis, count, size = over_tensor(self._place), 0, 0
        for n in self._complete():
            stage = self._line[n].stage
            layers = self._place.held[self._place.mine.index(stage)]
            sizes = [each.bytes for each in axis.complete(layers) if each.dtype == traffic.dtype]
            if sizes:
                own = [name for name, each in self._weights[stage].items() if each.pieces]
                yield Spot(n, True), self._action(traffic, len(sizes), sum(sizes), own)
                count, size = count + len(sizes), size + sum(sizes)
        rest = replace(traffic, count=traffic.count - count, bytes=traffic.bytes - size)
        if rest.count:
            passes = sorted(self._at.get("B", []) + self._at.get("W", []))
            yield from self._divided(rest, [Spot(n, True) for n in passes])

    def _trained(self) -> Iterator[str]:
        return (name for own in self._weights.values() for name, each in own.items() if each.trained)

    def _has(self, shared: SharedWeight) -> bool:
        return any(stage in self._weights for stage in shared.stages)

    # ------------------------------------------------------------------------------------------------------ the others

    def _divided(self, traffic: TrafficNode, spots: list[Spot]) -> Iterator[tuple[Spot, Action]]:
        for n, spot in enumerate(spots):
            before, after = (traffic.count * m // len(spots) for m in (n, n + 1))
            size = traffic.bytes * after // traffic.count - traffic.bytes * before // traffic.count
            if after > before:
                yield spot, self._action(traffic, after - before, size)

    def _all_of(self, traffic: TrafficNode, weights: list[str]) -> Action:
        return self._action(traffic, traffic.count, traffic.bytes, weights)

    def _action(self, traffic: TrafficNode, count: int, size: int, weights: Sequence[str] = ()) -> Action:
        ranks, stride = self._group(traffic)
        return Action(
            process=self._process,
            what=traffic.operation,
            axis=traffic.axis,
            carries=traffic.what,
            dtypes=(traffic.dtype,),
            count=count,
            bytes=size,
            ranks=ranks,
            stride=stride,
            weights=tuple(weights),
            when=traffic.when,
        )

    def _group(self, traffic: TrafficNode) -> tuple[int, int]:
        """Returns the ranks of a collective's group, and how far they are apart; nothing for a message
        between stages."""
        layout, sharding = self._place.layout, self._place.sharding
        if traffic.operation in ("send", "receive") and traffic.axis == "pipeline":
            return 0, 0
        if traffic.axis == "all":
            return layout.world_size, 1
        if traffic.among:
            assert sharding.exchange is not None
            pieces, members = sharding.exchange.pieces, sharding.exchange.members
            return (pieces, 1) if traffic.among == "node" else (members, pieces)
        if traffic.what in EXCHANGED:
            return compared_ranks(self._place.job, layout), layout.stride("data")
        if traffic.axis != "data" or sharding.engine != "fsdp" or traffic.what in _OVER_DATA:
            return layout.sizes[traffic.axis], layout.stride(traffic.axis)
        inner = layout.stride("context")
        if over_replicas(traffic.operation, traffic.what):
            return sharding.replicas, inner * sharding.shards
        return sharding.shards, inner


_OVER_DATA = (Payload.BATCH_STATISTICS, Payload.KEPT_COUNT, Payload.LOSS_COUNT, Payload.USED_PARAMETERS)
