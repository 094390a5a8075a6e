"""The stages of one rank, in bytes: its layers, and what it holds beside each action of a step.

Model: `fully_shard` gathers units as gathered_units.py has it; a schedule holds micro-batches as schedule_cost.py has
it. Actions of one kind that hold the same gathered units are one, with the most that the rank holds beside any of them.
Contract: the account (account.py) walks a step over these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from dslc.compiler.cost.gathered_units import GatheredBytes, GatheredUnits, UnitBytes, gathered_by_action, last_backward
from dslc.compiler.cost.layer_bytes import (
    LayerBytes,
    Recomputation,
    halves_bytes,
    layer_bytes,
    loss_kept_bytes,
    recomputation,
    saved_input_bytes,
    sent_bytes,
)
from dslc.compiler.cost.loss_bytes import chunked_bytes, chunked_halves
from dslc.compiler.cost.schedule_cost import HeldBytes, bytes_beside
from dslc.compiler.ir.memory import Halves
from dslc.compiler.ir.nodes import LayerNode, ParameterNode
from dslc.compiler.model.float8 import gathered_weights
from dslc.compiler.placement.draws import draws_by_sample
from dslc.compiler.placement.schedules import ScheduledAction, ScheduleTable
from dslc.compiler.placement.sharding import channels_last, low_copy, low_precision, offloaded, with_copies
from dslc.compiler.placement.shares import largest
from dslc.compiler.placement.staging import Staging, stages_with_whole_backward
from dslc.compiler.placement.workload import masks_documents
from dslc.dsl.record import Record, record

RANDOM_STATE = 5056  # bytes of the CPU generator's state, as torch keeps it
ActionKey = tuple[str, bool, bool]  # the kind, whether gradients of weights exist, and whether it is the stage's last
Step = tuple[ScheduledAction, int]  # an action, and bytes beside it


class ActionMemory(NamedTuple):
    """Bytes that a rank holds beside the micro-batch of an action; under `fully_shard` also what it has gathered, and
    the gradients of weights of its other stages.
    """

    beside: int
    gathered: GatheredBytes | None = None
    gradients: int = 0


@record
class StageMemory(Record):
    """A stage of a rank, in bytes of a micro-batch. `layers` are the places of its layers among the rank's.

    `splits`: its backward pass has two halves where the schedule splits it; else the action `backward` is the whole.
    `actions` are those that differ, by kind, whether the rank has gradients of weights, and whether the micro-batch is
    the last. `between` are the bytes of a micro-batch between the halves; `output` the bytes of what the stage returns;
    `of_loss` what the loss keeps, with the output.
    """

    layers: range
    splits: bool = False
    actions: Mapping[ActionKey, tuple[ActionMemory, ...]] = field(default_factory=dict)
    between: int = 0
    output: int = 0
    of_loss: int = 0

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, _, _ in self.actions}

    @property
    def backward(self) -> str:
        """The kind of the action in which a split backward pass begins: torch skips the first half at stage 0."""
        return "W" if "W" in self.kinds and not self.splits else "I"


class LayerSizes:
    """The bytes of a model's layers in a plan, which its ranks read; equal layers are computed once."""

    def __init__(self, staging: Staging) -> None:
        self._job, self._layout, self._model = staging.job, staging.layout, staging.model
        self._staging, self._chunked = staging, staging.chunked_head
        self.samples = staging.workload.microbatch / staging.layout.sizes["context"]
        self.recomputation = recomputation(self._job, self._model)
        self._channels_last = channels_last(self._layout, staging.sharding, self._model)
        self._of_layers: dict[tuple[int, Recomputation], LayerBytes] = {}
        self._halves: dict[int, Halves] = {}
        self._boundaries: dict[int, int] = {}

    def of_layer(self, layer: LayerNode) -> LayerBytes:
        recompute = self.recomputation[layer.name]
        key = self._model.equal_layers.get(id(layer), 0), recompute
        if key not in self._of_layers or not key[0]:
            self._of_layers[key] = self._layer_bytes(layer, recompute)
        return self._of_layers[key]

    def halves(self, layer: LayerNode) -> Halves:
        key = self._model.equal_layers.get(id(layer), 0)
        if key not in self._halves or not key:
            halves = halves_bytes(self._job, layer, self.samples)
            if self._chunked is not None and layer.name == self._chunked.module:
                halves = chunked_halves(self._staging, self.of_layer(layer))
            self._halves[key] = halves
        return self._halves[key]

    def _layer_bytes(self, layer: LayerNode, recompute: Recomputation) -> LayerBytes:
        on_cpu = self._layout.device == "cpu"
        sizes = layer_bytes(self._job, layer, recompute, self.samples, on_cpu=on_cpu, channels_last=self._channels_last)
        if self._chunked is not None and layer.name == self._chunked.module:
            sizes = chunked_bytes(self._staging, layer, sizes)
        if not self._draws_again(recompute.layer):
            return sizes
        if not sizes.backward:
            return replace(sizes, forward=sizes.forward + RANDOM_STATE)
        return replace(
            sizes,
            kept=sizes.kept + RANDOM_STATE,
            forward=sizes.forward + RANDOM_STATE,
            again=sizes.again + 2 * RANDOM_STATE,  # and the generator's state, to be restored
            backward=tuple(replace(moment, bytes=moment.bytes + RANDOM_STATE) for moment in sizes.backward),
        )

    def _draws_again(self, is_recomputed: bool) -> bool:
        """True if the layer is recomputed and may draw random numbers of a generator, as any of a user's own may: the
        state of the generator is kept.
        """
        if not is_recomputed or self._layout.device != "cpu":
            return False
        by_generator = self._model.noise and not draws_by_sample(self._job, self._layout, self._model)
        return by_generator or self._model.traced is not None

    def boundary_bytes(self, layer: int) -> int:
        """Returns the bytes of a micro-batch that a stage ending with this layer sends."""
        if layer + 1 == len(self._model.layers) and self._chunked is not None:
            return 4 * self._chunked.tokens
        if layer not in self._boundaries:
            self._boundaries[layer] = int(self.samples * sent_bytes(self._job, self._model, layer))
        return self._boundaries[layer]


class RankStages:
    """The layers of a rank, with the copies of weights that it shares with another stage, and its stages.

    `received` are bytes of torch's receive buffers, which exist from the first step on: inputs and gradients of outputs
    of all micro-batches. Values passed between stages of the rank are kept there, too. `steps` are the actions in
    order, each with the memory of those like it and the bytes beside it; without a schedule those of the first and the
    last micro-batch, and of one between them.
    """

    def __init__(self, staging: Staging, pipeline: int, sizes: LayerSizes) -> None:
        self._sizes, self.samples = sizes, sizes.samples
        self._staging, self._job, self._layout, self._model = staging, staging.job, staging.layout, staging.model
        job, layout, model = staging.job, staging.layout, staging.model
        stages, self._sharding, self._used = staging.stages, staging.sharding, staging.with_gradients
        mine = staging.stages_of(pipeline)
        self.has_loss = mine[-1] == len(stages) - 1
        self.layers = with_copies([model.of_a_rank[n] for stage in mine for n in stages[stage]])
        self.bytes = [sizes.of_layer(layer) for layer in self.layers]
        self.moved = offloaded(job, layout)
        ends = list(accumulate((len(stages[stage]) for stage in mine), initial=0))
        self._ranges = {stage: range(*ends[n : n + 2]) for n, stage in enumerate(mine)}
        self.steps = list[tuple[ScheduledAction, ActionMemory, int]]()
        self.stages = self._with_actions(staging.schedule, pipeline)
        self.received = 0
        for stage in mine if staging.schedule else ():
            for cut in range(max(0, stage - 1), min(stage + 1, len(stages) - 1)):
                self.received += layout.microbatches * sizes.boundary_bytes(stages[cut][-1])

    @cached_property
    def mask_of_documents(self) -> int:
        """Returns the bytes of a micro-batch's mask that keeps attention within documents, which all layers of a pass
        share: a number for each pair of positions, the first of the rank's piece.
        """
        if not masks_documents(self._job, self._layout, self._model):
            return 0
        length = self._model.input.shape[0]
        return int(self.samples * length * length) * (2 if low_precision(self._job) else 4)

    def halves(self, layer: int) -> Halves:
        return self._sizes.halves(self.layers[layer])

    # --------------------------------------------------------------------------------------------------- the actions

    def _with_actions(self, schedule: ScheduleTable | None, pipeline: int) -> list[StageMemory]:
        if schedule is None:
            # All micro-batches between the first and the last are alike.
            microbatches = range(min(3, self._layout.microbatches))
            actions = self._by_action((ScheduledAction(kind, 0, n), 0) for n in microbatches for kind in ("F", "B"))
            return [StageMemory(layers=layers, actions=actions[stage]) for stage, layers in self._ranges.items()]
        if "activations" in self.moved:
            actions = self._by_action((action, 0) for action in schedule.work(pipeline))
            return [
                StageMemory(layers=layers, splits=stage > 0, actions=actions[stage])
                for stage, layers in self._ranges.items()
            ]
        return self._beside_microbatches(schedule, pipeline)

    def _beside_microbatches(self, schedule: ScheduleTable, pipeline: int) -> list[StageMemory]:
        """Returns the stages with the bytes of the other micro-batches that the schedule has in flight."""
        stages = self._staging.stages
        outputs = [self._sizes.boundary_bytes(stage[-1]) for stage in stages]
        crosses = [a != b for a, b in pairwise(schedule.placement)]  # else it lies where the next receives
        messages = [size * sends for size, sends in zip(outputs, crosses, strict=False)]  # of each cut
        kept_by_loss = 0 if self._staging.chunked_head else int(self.samples * loss_kept_bytes(self._job, self._model))
        of_loss = kept_by_loss + outputs[-1] if self.has_loss else 0
        unsplit = {0, *stages_with_whole_backward(self._job, self._model, stages, schedule)}
        received = self._received_inputs()
        # Each micro-batch has its own masks and copies of weights; its input lies where it was received.
        sizes = [0] * len(stages)
        for stage, layers in self._ranges.items():
            layer_sizes = [self.bytes[n] for n in layers]
            sizes[stage] = (
                sum(layer.kept + (0 if layer.again else layer.copies) for layer in layer_sizes) - received[stage]
            ) + self.mask_of_documents
        between_halves = [0 if stage in unsplit and stage else size for stage, size in enumerate(sizes)]
        for stage in self._ranges.keys() - unsplit:
            between_halves[stage] += self._between_halves(self._ranges[stage], stage + 1 == len(stages))
        sizes[-1] += of_loss
        held_bytes = HeldBytes(
            kept=sizes,
            between=between_halves,
            output=[*messages, 0],
            gradient=[0, *messages],
        )
        actions = self._by_action(
            (action, int(size) - (received[action.stage] if action.kind != "W" or action.stage in unsplit else 0))
            for action, size in bytes_beside(schedule, pipeline, held_bytes)
            if action.kind != "W" or between_halves[action.stage] or action.stage not in unsplit
        )
        return [
            StageMemory(
                layers=layers,
                splits=stage not in unsplit,
                actions=actions[stage],
                between=between_halves[stage],
                output=outputs[stage],
                of_loss=of_loss if stage + 1 == len(stages) else 0,
            )
            for stage, layers in self._ranges.items()
        ]

    def _received_inputs(self) -> dict[int, int]:
        """Returns for each stage the part of what a micro-batch keeps that lies in the receive buffers."""
        received = {}
        for stage, layers in self._ranges.items():
            entry = layers.start
            layer = self.layers[entry]
            size = saved_input_bytes(self._job, layer, self._sizes.recomputation[layer.name])
            received[stage] = int(self.samples * size) if stage else 0
        return received

    def _between_halves(self, layers: range, is_final: bool) -> int:
        """Returns the bytes of a stage's micro-batch between the halves of its backward pass, beside what it keeps."""
        halves = [self.halves(n) for n in layers]
        passed = 0 if is_final else halves[-1].passed  # it lies where this stage receives
        size = sum(half.gradients for half in halves) - passed
        for n, half in zip(reversed(layers), reversed(halves), strict=True):
            # What torch recomputes it has not kept.
            size -= 0 if self.bytes[n].again else half.tail
            if half.moments:
                break
        return size

    def _by_action(self, steps: Iterable[Step]) -> dict[int, dict[ActionKey, tuple[ActionMemory, ...]]]:
        """Returns the memory of the rank's actions by stage: the most of actions that hold the same gathered units and
        gradients.
        """
        order = list(steps)
        actions = [action for action, _ in order]
        gathered: Sequence[GatheredBytes | None] = [None] * len(order)
        final, sharded = last_backward(actions), self._sharding.engine == "fsdp"
        if sharded:
            gathered = gathered_by_action(self._gathered_units(), actions)
        most: dict[int, dict[ActionKey, dict[tuple[GatheredBytes | None, int], int]]] = {}
        kinds = list[tuple[ActionKey, tuple[GatheredBytes | None, int]]]()
        gradients = self._gradients_by_action(actions, final)
        for n, ((action, beside_bytes), units, (later, other_gradients)) in enumerate(
            zip(order, gathered, gradients, strict=True)
        ):
            key = (action.kind, later, sharded and final.get(action.stage) == n)
            largest_bytes = most.setdefault(action.stage, {}).setdefault(key, {})
            largest_bytes[units, other_gradients] = max(
                largest_bytes.get((units, other_gradients), beside_bytes), beside_bytes
            )
            kinds.append((key, (units, other_gradients)))
        memories = {
            stage: {
                key: {units: ActionMemory(size, *units) for units, size in sizes.items()}
                for key, sizes in by_key.items()
            }
            for stage, by_key in most.items()
        }
        self.steps = [
            (action, memories[action.stage][key][units], beside_bytes)
            for (action, beside_bytes), (key, units) in zip(order, kinds, strict=True)
        ]
        return {
            stage: {key: tuple(by_units.values()) for key, by_units in by_key.items()}
            for stage, by_key in memories.items()
        }

    def _gradients_by_action(
        self, actions: Sequence[ScheduledAction], final: Mapping[int, int]
    ) -> Iterator[tuple[bool, int]]:
        """Yields for each action whether its stage has gradients of weights, and the bytes of other stages' gradients.
        A stage has them whole from its first backward pass on, and in shards after its last one.
        """
        splits = {action.stage for action in actions if action.kind == "W"}
        shards = 0 if "parameters" in self.moved else 4
        sizes = {}
        for stage, layers in self._ranges.items():
            parameters = [q for n in layers for q in self.layers[n].parameters]
            sizes[stage] = (
                4 * self.numbers(parameters, in_shards=False),
                shards * self.numbers(parameters, in_shards=True),
            )
        gradients: dict[int, int] = {}
        for n, action in enumerate(actions):
            stage = action.stage
            yield stage in gradients, sum(gradients.values()) - gradients.get(stage, 0)
            if action.kind in ("B", "W") or (action.kind == "I" and stage not in splits):
                gradients[stage] = sizes[stage][final[stage] == n]

    # ------------------------------------------------------------------------------------------------- the parameters

    def numbers(self, parameters: Iterable[ParameterNode], *, in_shards: bool) -> int:
        """Returns a rank's numbers of those parameters that have a gradient; gathered, or of its shards of them."""
        return sum(
            share(q, self._sharding.shards_of(q) if in_shards else 1)
            for q in parameters
            if q.tied_to is None and q.name in self._used
        )

    @cached_property
    def trains(self) -> list[int]:
        """Returns the numbers with a gradient, by layer; in DistributedDataParallel's buckets, all that train."""
        names = self._staging.trained if self._sharding.engine in ("ddp", "zero1") else self._used
        return [
            sum(share(q, 1) for q in layer.parameters if q.tied_to is None and q.name in names) for layer in self.layers
        ]

    @cached_property
    def units(self) -> tuple[list[int], list[list[ParameterNode]]]:
        """Returns the unit of each layer, and the parameters of each unit. The root of a stage comes before the stage's
        other units, each a layer.
        """
        unit_of, units = list[int](), list[list[ParameterNode]]()
        names = {unit.name for unit in self._staging.units if unit.name}
        for layers in self._ranges.values():
            root = len(units)
            units.append([])
            for layer in (self.layers[n] for n in layers):
                if layer.name in names:
                    units.append([])
                unit_of.append(len(units) - 1 if layer.name in names else root)
                units[unit_of[-1]].extend(q for q in layer.parameters if q.tied_to is None)
        return unit_of, units

    @cached_property
    def unit_shards(self) -> list[int]:
        """Returns a rank's numbers with a gradient, by unit."""
        return [self.numbers(unit, in_shards=True) for unit in self.units[1]]

    @cached_property
    def summed_numbers(self) -> list[int]:
        """Returns the numbers of a unit's gradients, by unit, padded to equal shards."""
        return [
            sum(
                self._sharding.shards_of(q) * share(q, self._sharding.shards_of(q))
                for q in unit
                if q.tied_to is None and q.name in self._used
            )
            for unit in self.units[1]
        ]

    def _gathered_units(self) -> dict[int, GatheredUnits]:
        unit_of, units = self.units
        shards, element = self._sharding.shards, 2 if low_copy(self._job) else 4
        float8 = gathered_weights(self._job, self._model)
        sizes = []
        for unit in units:
            parts = [(q, self._sharding.shards_of(q)) for q in unit]
            sizes_of = [(n, n * (1 if q.quantized or q.name in float8 else element) * share(q, n)) for q, n in parts]
            size, sent = sum(size for _, size in sizes_of), sum(size for n, size in sizes_of if n > 1)
            moved = 4 * self.numbers(unit, in_shards=True) if "parameters" in self.moved else 0  # from the host
            copied = sent if self._layout.device == "cpu" else 0
            sizes.append(UnitBytes(size, sent + moved if shards > 1 else 0, copied))
        by_stage, root = {}, 0
        for stage, layers in self._ranges.items():
            units_here = [unit_of[n] for n in layers]
            by_stage[stage] = GatheredUnits(
                units_here,
                [bool(self.bytes[n].backward) for n in layers],
                sizes,
                root,
                reshard=self._sharding.reshard,
                staged=self._layout.sizes["pipeline"] > 1,
            )
            root = max(root, *units_here) + 1
        return by_stage


def share(parameter: ParameterNode, shards: int) -> int:
    """Returns the numbers of the first rank's share, which is the largest."""
    return _share(parameter.shape, shards)


@lru_cache(maxsize=4096)
def _share(shape: tuple[int, ...], shards: int) -> int:
    numbers = prod(shape)
    if shards == 1:
        return numbers
    rows = shape[0] if shape else 1
    return largest(rows, shards) * (numbers // max(1, rows)) if rows else numbers
