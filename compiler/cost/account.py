"""Peak memory of one rank, by simulating a step layer by layer.

Model: the state exists all the time. The step walks forward through the layers, through the loss, backward, and to the
update. At each stop the memory is the sum of five parts: the state, the activations that earlier layers keep, the
layer's working memory (`working`), the gradients made so far, and whatever is gathered or scattered there. Kinds:

    parameters      float32, a rank's share of them
    gradients       float32: buckets of DistributedDataParallel, which stay, and beside them the gradients of
                    micro-batches before the exchange; else made in the backward pass, whole until `fully_shard` has
                    scattered them
    optimizer       float32 state, by optimizer, and its step counts; under ZeRO-1 of the rank dealt the most. And the
                    average of the weights, in float32, of each parameter that trains, sharded as it is; also for an
                    optimizer with `train()` and `eval()`
    activations     tensors that autograd keeps of the micro-batches in flight, under `recompute`; autocast's copies of
                    weights; a layer's working memory, including gradients that are made to be added to other gradients;
                    the output of a stage; on a GPU the samples
    buffers         batch statistics and the like
    communication   parameters that `fully_shard` gathers, the input of a reduce-scatter; a stage's receive buffers;
                    what an exchange of gradients or weights keeps, and what it works in
    framework       the CUDA context, NCCL's buffers, and cuBLAS's workspaces; on a CPU nothing that is a tensor

Contract: arithmetic over the model graph, with a rank's own shapes along the tensor axis
(compiler/model/tensor_tape.py); linear in the layers of the rank. Torch 2.13's kernels on CPUs take these bytes;
tests/training/test_memory.py compares them with measured runs.

A loss that compares samples holds the outputs of other ranks beside this rank's, and a few numbers for each pair that
it compares (loss_bytes.py).

Limits: not counted are the batch itself on a CPU, the allocator's slack, and scratch memory that libraries allocate
outside torch. GPU kernels keep slightly other tensors (compiler/model/tape.py). Under a pipeline the walk follows one
micro-batch beside the most that the schedule holds, once without gradients and once with them. ZeRO: Rajbhandari et al.
2019 (arXiv:1910.02054); recomputation: Chen et al. 2016 (arXiv:1604.06174), `selective` Korthikanti et al. 2022
(arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

from dslc.compiler.cost.layer_bytes import (
    LayerBytes,
    buffer_bytes,
    copy_bytes,
    halves_bytes,
    has_backward,
    layer_bytes,
    loss_bytes,
    loss_kept_bytes,
    mask_bytes,
    saved_bytes,
    saved_input_bytes,
    sent_bytes,
)
from dslc.compiler.cost.loss_bytes import LossBytes, whole_loss_bytes
from dslc.compiler.cost.optimizer_bytes import OptimizerBytes, Updated
from dslc.compiler.cost.schedule_cost import NEVER, HeldBytes, StageMemory, bytes_beside
from dslc.compiler.cost.unsharded_memory import ShardedMemory, UnshardedMemory
from dslc.compiler.facts.hardware import framework_bytes, workspace_bytes
from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.memory import Halves, LayerShare, MemoryNode, Phase, WorkingSet
from dslc.compiler.ir.nodes import LayerNode, ParameterNode
from dslc.compiler.operations.exchange_rules import kept_bytes, passing_bytes, summed_bytes
from dslc.compiler.placement.schedules import ScheduleTable
from dslc.compiler.placement.sharding import (
    fused_on,
    low_copy,
    low_precision,
    offloaded,
    optimizer_groups,
    recomputed,
    with_copies,
    zero1_partition,
)
from dslc.compiler.placement.shares import largest
from dslc.compiler.placement.staging import Staging, stages_with_whole_backward

SECOND_HALF = "gradients of weights"
MOST_LAYERS = 3  # layers named at the peak, at most
RANDOM_STATE = 5056  # bytes of the CPU generator's state, as torch keeps it


def account(staging: Staging, pipeline: int) -> MemoryNode:
    """Returns the peak memory of the ranks at one pipeline coordinate."""
    return _Account(staging, pipeline).highest()


class _Account:
    def __init__(self, staging: Staging, pipeline: int) -> None:
        self._job, self._layout, self._model = job, layout, model = staging.job, staging.layout, staging.model
        stages, schedule = staging.stages, staging.schedule
        self._sharding, self._trained = staging.sharding, staging.trained
        self._used = staging.with_gradients
        self._units = staging.units if self._sharding.engine == "fsdp" else ()
        self._samples = staging.workload.microbatch / layout.sizes["context"]
        self._samples_of_a_step = staging.workload.share
        self._steps = staging.workload.steps
        mine = staging.stages_of(pipeline)
        self._ends = mine[-1] == len(stages) - 1  # the rank has the last stage, and the loss
        again = set(recomputed(job, model))
        self._mine = [n for stage in mine for n in stages[stage]]
        self._layers = with_copies([model.of_a_rank[n] for n in self._mine])
        self._bytes = [self._layer_bytes(layer, layer.name in again) for layer in self._layers]
        self._moved = offloaded(job, layout)
        self._others = self._first = 0  # bytes of other micro-batches and stages; the first layer of the stage
        self._stages = self._stages_of(staging, schedule, again, pipeline)
        # torch's receive buffers, from the first step on: inputs and gradients of outputs, of all micro-batches. Values
        # passed between stages of this rank are kept there, too.
        self._received = 0
        for stage in mine if schedule else ():
            if stage:
                self._received += layout.microbatches * self._boundary_bytes(stages[stage - 1][-1])
            if stage + 1 < len(stages):
                self._received += layout.microbatches * self._boundary_bytes(stages[stage][-1])
        self._optimizer = OptimizerBytes(job, staging.optimizer)
        self._updated: list[tuple[ParameterNode, int]] = []  # parameters, and the numbers that the rank updates
        self._whole = whole_loss_bytes(staging)  # of a loss that compares samples
        self._most = -1

    def _layer_bytes(self, layer: LayerNode, again: bool) -> LayerBytes:
        found, state = layer_bytes(self._job, layer, again, self._samples), self._state_of_noise(again)
        if not state:
            return found
        if not found.backward:
            return replace(found, forward=found.forward + state)
        return replace(
            found,
            kept=found.kept + state,
            forward=found.forward + state,
            again=found.again + 2 * state,  # and the generator's state, to be restored
            backward=tuple(replace(moment, bytes=moment.bytes + state) for moment in found.backward),
        )

    def _state_of_noise(self, again: bool) -> int:
        """Returns the size of a generator's state if the layer is recomputed and may draw random numbers, as any of a
        user's own may.
        """
        noise = self._model.noise or self._model.traced is not None
        return RANDOM_STATE if again and noise and self._layout.device == "cpu" else 0

    def _stages_of(
        self, staging: Staging, schedule: ScheduleTable | None, again: set[str], pipeline: int
    ) -> list[StageMemory]:
        """Returns the stages of the rank, with the bytes beside each of their actions."""
        mine, sizes = staging.stages_of(pipeline), [len(stage) for stage in staging.stages]
        ends = list(accumulate((sizes[stage] for stage in mine), initial=0))
        ranges = {stage: range(*ends[n : n + 2]) for n, stage in enumerate(mine)}
        if schedule is None:
            return [StageMemory(layers=layers) for layers in ranges.values()]
        if "activations" in self._moved:
            return [StageMemory(layers=layers, splits=stage > 0) for stage, layers in ranges.items()]
        outputs = [self._boundary_bytes(stage[-1]) for stage in staging.stages]
        apart = [a != b for a, b in pairwise(schedule.placement)]  # else it lies where the next receives
        messages = [size * sends for size, sends in zip(outputs, apart, strict=False)]  # of each cut
        kept, received = self._kept_by_stage(staging, again, mine)
        of_loss = int(self._samples * loss_kept_bytes(self._job, self._model)) + outputs[-1] if self._ends else 0
        whole = {0, *stages_with_whole_backward(self._job, self._model, staging.stages, schedule)}
        between = [0 if stage in whole and stage else size for stage, size in enumerate(kept)]
        for stage in set(mine) - whole:
            halves = [self._halves(n) for n in ranges[stage]]
            passed = halves[-1].passed if stage + 1 < len(kept) else 0  # it lies where this stage receives
            between[stage] += sum(half.gradients for half in halves) - passed
            for n, half in zip(reversed(ranges[stage]), reversed(halves), strict=True):
                # What torch recomputes it has not kept.
                between[stage] -= 0 if self._bytes[n].again else half.tail
                if half.moments:
                    break
        kept[-1] += of_loss
        weights = [4 * sum(self._count[n] for n in ranges.get(stage, ())) for stage in range(len(kept))]
        held = HeldBytes(
            kept=kept,
            between=between,
            output=[*messages, 0],
            gradient=[0, *messages],
            weights=weights if self._sharding.engine != "fsdp" else (),
        )
        beside = bytes_beside(schedule, pipeline, held)
        return [
            StageMemory(
                layers=ranges[stage],
                splits=stage not in whole,
                beside={
                    # The input lies where it was received.
                    (kind, later): int(size) - (received[stage] if kind != "W" or stage in whole else 0)
                    for (other, kind, later), size in beside.items()
                    if other == stage and not (kind == "W" and between[stage] == 0 and stage in whole)
                },
                between=int(between[stage]),
                output=outputs[stage],
                of_loss=of_loss if stage + 1 == len(kept) else 0,
            )
            for stage in mine
        ]

    def _kept_by_stage(
        self, staging: Staging, again: set[str], mine: Sequence[int]
    ) -> tuple[list[float], dict[int, int]]:
        """Returns what a micro-batch keeps at each stage of the rank, without the part of it that lies in the receive
        buffers, and that part. Each micro-batch has its own masks and copies of weights.
        """
        job, layers = self._job, self._model.of_a_rank
        kept, received = [0.0] * len(staging.stages), dict.fromkeys(mine, 0)
        for stage in mine:
            for n in staging.stages[stage]:
                layer = layers[n]
                if not has_backward(job, layer):
                    kept[stage] += copy_bytes(job, layer)
                elif layer.name in again:
                    kept[stage] += self._samples * saved_bytes(job, layer, True) + self._state_of_noise(True)
                else:
                    kept[stage] += self._samples * saved_bytes(job, layer, False)
                    kept[stage] += mask_bytes(job, layer) + copy_bytes(job, layer)
            if stage:
                entry = layers[staging.stages[stage][0]]
                received[stage] = int(self._samples * saved_input_bytes(job, entry, entry.name in again))
                kept[stage] -= received[stage]
        return kept, received

    def _halves(self, layer: int) -> Halves:
        return halves_bytes(self._job, self._layers[layer], self._samples)

    def _boundary_bytes(self, layer: int) -> int:
        """Returns the bytes of a micro-batch that a stage ending with this layer sends."""
        return int(self._samples * sent_bytes(self._job, self._model, layer))

    # ---------------------------------------------------------------------------------------------------- the state

    def _state(self) -> MemoryNode:
        layout, sharding = self._layout, self._sharding
        own = [q for layer in self._layers for q in layer.parameters if q.tied_to is None]
        train = [q for q in own if q.name in self._trained]
        shards = sharding.shards if sharding.engine == "fsdp" else 1
        parameters = 4 * sum(_share(q, shards) for q in own)
        rank, self._updated = 0, [(q, _share(q, shards)) for q in own if q.name in self._used]
        if sharding.engine == "zero1":
            dealt = self._dealt()
            held = [
                (self._optimizer_state_bytes(each), sum(numbers for _, numbers in each), len(each)) for each in dealt
            ]
            rank = max(range(len(dealt)), key=held.__getitem__)
            self._updated = dealt[rank]
        optimizer = self._optimizer_state_bytes(self._updated)
        average = 4 * sum(_share(q, shards) for q in train) if self._averages else 0
        if "parameters" in self._moved:  # and with them what is kept of each
            parameters = optimizer = average = 0
        workspace = workspace_bytes(layout.device, layout.hardware)
        return MemoryNode(
            parameters=parameters,
            gradients=4 * sum(_share(q, 1) for q in train) if sharding.engine in ("ddp", "zero1") else 0,
            optimizer=average + (0 if "optimizer" in self._moved else optimizer),
            activations=self._step_bytes(),
            buffers=sum(buffer_bytes(layer) for layer in self._layers),
            communication=self._received + self._kept_of_exchange(),
            framework=framework_bytes(layout.device, layout.world_size) + workspace,
            rank=rank,
            workspace=workspace,
        )

    def _kept_of_exchange(self) -> int:
        """Returns the bytes that an exchange keeps from step to step."""
        exchange = self._sharding.exchange
        return kept_bytes(exchange, self._exchanged) if exchange is not None else 0

    @property
    def _exchanged(self) -> list[ParameterNode]:
        return [q for layer in self._layers for q in layer.parameters if q.tied_to is None and q.name in self._used]

    def _step_bytes(self) -> int:
        """Returns the bytes of a step's samples, which go to a GPU at once; tokens are their own targets."""
        if self._layout.device == "cpu":
            return 0
        each = self._model.input
        return self._samples_of_a_step * each.bytes * (2 if each.dtype == "int64" else 1)

    def _mask_of_documents(self) -> int:
        """Returns the bytes of the mask that keeps attention within documents, which all layers of a pass share: a
        number for each pair of positions.
        """
        if self._job.data.documents is None:
            return 0
        length = self._model.input.shape[0]
        return int(self._samples) * length * length * (2 if low_precision(self._job) else 4)

    @property
    def _averages(self) -> bool:
        """True if the evaluated weights are not the weights that train."""
        return bool(self._job.train.ema) or self._optimizer.has_modes

    def _optimizer_state_bytes(self, updated: Updated) -> int:
        """Returns the bytes of the optimizer's state for what a rank updates."""
        return self._optimizer.state(updated, counts=self._layout.device == "cpu")

    def _dealt(self) -> list[list[tuple[ParameterNode, int]]]:
        """Returns for each data rank under ZeRO-1 the parameters whose state it keeps, with their numbers."""
        groups = optimizer_groups(self._job, self._model, self._trained)
        sizes = [[q.count for q in group] for group in groups]
        dealt: list[list[tuple[ParameterNode, int]]] = [[] for _ in range(self._sharding.shards)]
        for group, owners in zip(groups, zero1_partition(sizes, self._sharding.shards), strict=True):
            for parameter, owner in zip(group, owners, strict=True):
                if parameter.name in self._used:
                    dealt[owner].append((parameter, parameter.count))
        return dealt

    def _numbers(self, parameters: Iterable[ParameterNode], shards: int, names: frozenset[str]) -> int:
        """Returns a rank's numbers of the parameters `names`."""
        return sum(_share(q, shards) for q in parameters if q.tied_to is None and q.name in names)

    @cached_property
    def _count(self) -> list[int]:
        """Returns the numbers with a gradient, by layer; in DistributedDataParallel's buckets, all that train."""
        names = self._trained if self._sharding.engine in ("ddp", "zero1") else self._used
        return [self._numbers(layer.parameters, 1, names) for layer in self._layers]

    @cached_property
    def _gathered(self) -> tuple[list[int], list[int], list[int]]:
        """Returns the unit of each layer; the size of each unit, whole; and a rank's part of the numbers that train."""
        there = {q.name: q for layer in self._layers for q in layer.parameters if q.tied_to is None}
        here = {layer.name for layer in self._layers}
        made = [u for u in self._units if not u.name or u.name in here]
        place = {q.name: n for n, unit in enumerate(made) for q in unit.parameters}
        unit_of = [
            next((place[q.name] for q in layer.parameters if q.name in place), len(made) - 1) for layer in self._layers
        ]
        own = [tuple(there[q.name] for q in unit.parameters if q.name in there) for unit in made]
        shards = self._sharding.shards
        whole = [shards * sum(_share(q, shards) for q in unit) for unit in own]
        return unit_of, whole, [self._numbers(unit, shards, self._used) for unit in own]

    def _engine(self, microbatch: int) -> UnshardedMemory | ShardedMemory:
        job, sharding, shards = self._job, self._sharding, self._sharding.shards
        later = microbatch > 0
        if sharding.engine != "fsdp":
            held = microbatch + 1 < self._layout.microbatches
            buckets = sharding.engine in ("ddp", "zero1")
            return UnshardedMemory(trains=self._count, buckets=buckets, earlier=later, held=held)
        unit_of, whole, shard = self._gathered
        return ShardedMemory(
            unit_of=unit_of,
            trains=self._count,
            whole=whole,
            shard=shard,
            parts=shards,
            element=2 if low_copy(job) else 4,
            reshard=sharding.reshard,
            accumulate=sharding.accumulate,
            stays=later,
            held=microbatch + 1 < self._layout.microbatches,
            copies=shards > 1 and self._layout.device == "cpu",
            rounded=sharding.exchange is not None,
            moved="parameters" in self._moved,
            staged=self._layout.sizes["pipeline"] > 1,
        )

    # ----------------------------------------------------------------------------------------------------- the walk

    def highest(self) -> MemoryNode:
        self._rest = state = self._state()
        self._always = state.peak - state.gradients
        # Saved by the layers before each, and by all; likewise copies of weights, which are freed if they are made
        # again.
        self._before, self._copies = [0], [0]
        for layer in self._bytes:
            self._before.append(self._before[-1] + (0 if "activations" in self._moved else layer.kept))
            self._copies.append(self._copies[-1] + (0 if layer.again else layer.copies))
        self._stop("between two steps", None, state.gradients, 0, 0, phase="rest")
        last = self._layout.microbatches - 1
        if self._whole is not None and last:
            self._forward_all_microbatches(self._whole)
        before = [last - 1] if self._sharding.engine not in ("none", "local") and last else []
        kinds = {kind for stage in self._stages for kind, _ in stage.beside or ()}
        for microbatch in sorted({0, last, *before}):
            for split in (False, True) if "I" in kinds and "B" in kinds else ("I" in kinds,):
                self._walk(self._engine(microbatch), microbatch > 0, split)
        self._others = self._first = 0
        self._stop("optimizer step", None, self._engine(last).update(), 0, self._update_bytes(), phase="point")
        exchange = self._sharding.exchange
        if exchange is not None and self._sharding.engine != "fsdp":
            if self._steps is None or exchange.first_step <= self._steps:
                gradients = self._engine(last).update() if exchange.agrees is not Payload.WEIGHTS else 0
                passing = passing_bytes(exchange, self._exchanged)
                self._stop("exchange", None, gradients, passing, 0, phase="point")
            if summed := summed_bytes(exchange, self._exchanged):
                gradients = self._engine(last).update()
                self._stop("exact sum of gradients", None, gradients, summed, 0, phase="point")
        return self._peak_node()

    def _enter(self, stage: StageMemory, kind: str, later: bool) -> None:
        """Enters an action of a stage. `later`: it has gradients of weights."""
        self._first = stage.layers.start
        self._others = stage.beside.get((kind, later), NEVER) if stage.beside is not None else 0
        self._others += self._mask_of_documents() + (self._whole.gradients if self._whole is not None else 0)
        if kind in ("B", "I") and stage.of_loss:
            self._others += stage.output

    def _walk(self, engine: UnshardedMemory | ShardedMemory, later: bool, split: bool) -> None:
        """Walks one micro-batch, forward and backward, the latter in two halves if `split`."""
        for stage in self._stages:
            self._enter(stage, "F", later)
            for n in stage.layers:
                layer = self._bytes[n]
                gradients = engine.forward(n)
                held = self._activations_before(n) + layer.copies + layer.forward
                self._stop(f"forward pass of {self._name(n)}", n, gradients, engine.communication, held)
        gradients = engine.turn()
        for stage in reversed(self._stages):
            ends = self._ends and stage is self._stages[-1]
            if ends:
                self._enter(stage, "F", later)
                self._loss(gradients, engine.communication, self._activations_before(stage.layers.stop))
            self._enter(stage, stage.backward if split else "B", later)
            if ends:
                self._backward_of_loss(gradients, engine.communication, self._activations_before(stage.layers.stop))
            if split and stage.splits:
                self._walk_first_half(stage, engine, gradients)
                self._enter(stage, "W", later)
                gradients = self._walk_second_half(stage, engine)
            else:
                gradients = self._walk_backward(stage, engine, gradients)

    def _activations_before(self, layer: int) -> int:
        """Returns what the layers of the stage before this one keep."""
        first = self._first
        return self._before[layer] - self._before[first] + self._copies[layer] - self._copies[first]

    def _walk_backward(self, stage: StageMemory, engine: UnshardedMemory | ShardedMemory, gradients: int) -> int:
        """Walks the backward pass of a stage; returns the gradients of weights after it."""
        for n in reversed(stage.layers):
            layer = self._bytes[n]
            held = self._activations_before(n) + layer.copies
            if not layer.backward:  # only what waits for the end of the backward pass happens here
                gradients = self._leave(engine, n, held, gradients)
                continue
            gradients, passing = engine.backward(n, WorkingSet(0, 0, 0, 0)), engine.passing
            if passing:
                when = f"all-gather before the backward pass of {self._name(n)}"
                self._stop(when, n, gradients, engine.communication + passing, held + layer.kept + layer.output)
            for moment in layer.backward:
                when = f"backward pass of {self._name(n)}"
                made = engine.backward(n, moment)
                self._stop(when, n, made, engine.communication, held + moment.bytes + engine.beside)
            if layer.again:
                when = f"forward pass of {self._name(n)}, again"
                self._stop(when, n, gradients, engine.communication, held + layer.again)
            held = self._before[n] - self._before[self._first] + (layer.input if n else 0)
            gradients = self._leave(engine, n, held, gradients)
        return gradients

    def _leave(self, engine: UnshardedMemory | ShardedMemory, n: int, held: int, gradients: int) -> int:
        """Leaves a layer in the backward pass; returns the gradients of weights after it."""
        for gradients in engine.leave(n):
            when = f"reduce-scatter after the backward pass of {self._name(n)}"
            self._stop(when, n, gradients, engine.communication + engine.passing, held)
        return gradients

    def _walk_first_half(self, stage: StageMemory, engine: UnshardedMemory | ShardedMemory, gradients: int) -> None:
        """Walks the half that makes gradients of inputs: it frees nothing, and keeps the gradients that weights will
        need.
        """
        kept = self._activations_before(stage.layers.stop) + stage.of_loss
        if not stage.of_loss:
            kept -= stage.output  # its gradient lies where this stage receives
        for n in reversed(stage.layers):
            layer, half = self._bytes[n], self._halves(n)
            if not layer.backward:
                continue
            most = half.first
            if layer.again:
                most = max(moment.bytes for moment in layer.backward) - layer.kept
                when = f"forward pass of {self._name(n)}, again"
                self._stop(when, n, gradients, engine.communication, kept + layer.again)
            self._stop(f"backward pass of {self._name(n)}", n, gradients, engine.communication, kept + most)
            kept += half.gradients

    def _walk_second_half(self, stage: StageMemory, engine: UnshardedMemory | ShardedMemory) -> int:
        """Walks the half that makes gradients of weights, in forward order; returns them."""
        kept, gradients = stage.between, 0
        sharded = isinstance(engine, ShardedMemory)  # gradients are scattered in the order of the engine
        for n in reversed(stage.layers) if sharded else stage.layers:
            layer, half = self._bytes[n], self._halves(n)
            gradients = engine.backward(n, WorkingSet(0, 0, 0, 0))
            for moment in half.moments if layer.backward else ():
                gradients = engine.backward(n, moment)
                held = kept - (0 if layer.again or sharded else moment.bytes) + engine.beside
                self._stop(SECOND_HALF, None, gradients, engine.communication, held, phase="point")
            if layer.backward and layer.again:
                held = kept + half.most
                self._stop(SECOND_HALF, None, gradients, engine.communication, held, phase="point")
                kept += half.left
            elif layer.backward and not sharded:
                kept -= half.freed
            gradients = self._leave(engine, n, kept, gradients)
        return gradients

    def _forward_all_microbatches(self, found: LossBytes) -> None:
        """Makes the outputs of all micro-batches, keeps nothing else of their passes, and makes their loss."""
        engine = self._engine(0)
        for n, layer in enumerate(self._bytes):
            gradients = engine.forward(n)
            passing = layer.copies + layer.input + layer.output + found.outputs // 2
            when = f"forward pass of {self._name(n)}, ahead"
            self._stop(when, None, gradients, engine.communication, passing, by_layer=False)
        gradients, communication = engine.turn(), engine.communication
        held = found.outputs + max(found.forward, found.backward)
        self._stop("loss of all micro-batches", None, gradients, communication, held, phase="point")

    def _loss(self, gradients: int, communication: int, kept: int) -> None:
        forward = int(self._samples * loss_bytes(self._job, self._model)[0])
        if self._whole is not None and self._layout.microbatches == 1:
            forward = self._whole.forward
        self._stop("loss", None, gradients, communication, kept + forward, phase="point", by_layer=True)

    def _backward_of_loss(self, gradients: int, communication: int, kept: int) -> None:
        most = int(self._samples * max(loss_bytes(self._job, self._model)[1:]))
        if self._whole is not None and self._layout.microbatches == 1:
            most = self._whole.backward
        self._stop("backward pass of the loss", None, gradients, communication, kept + most)

    def _update_bytes(self) -> int:
        """Returns the optimizer's temporary bytes: without a fused kernel, some numbers for each that it updates."""
        if self._moved & {"optimizer", "parameters"}:  # it works in the host's memory
            return 0
        scratch = self._optimizer.scratch(self._updated)
        if scratch and self._layout.device not in fused_on(self._job, self._layout, self._sharding, self._model):
            return scratch
        if self._sharding.engine not in ("none", "local"):
            return 0
        # The gradient of a convolution has other strides than its weight, and is copied to those.
        kernels = (q.count for layer in self._layers for q in layer.parameters if len(q.shape) == 4)
        return 4 * max(kernels, default=0)

    def _name(self, layer: int) -> str:
        node = self._layers[layer]
        return node.name if node.name and not node.name[0].isdigit() else f"{node.name} {node.kind}".strip()

    def _stop(
        self,
        when: str,
        layer: int | None,
        gradients: int,
        communication: int,
        activations: int,
        *,
        phase: Phase = "pass",
        by_layer: bool | None = None,
    ) -> None:
        """Notes a moment of the step. `by_layer`: the layers before `layer`, or all, keep their activations then."""
        held = activations + self._others
        total = self._always + gradients + communication + held
        if total <= self._most:
            return
        self._most = total
        by_layer = phase == "pass" if by_layer is None else by_layer
        there = (len(self._bytes) if layer is None else layer) if by_layer else None
        self._peak = (when, phase, self._first, there, gradients, communication, activations, self._others)

    def _peak_node(self) -> MemoryNode:
        state = self._rest
        when, phase, first, there, gradients, communication, activations, others = self._peak
        shares = [(self._name(n), self._before[n + 1] - self._before[n]) for n in range(first, there or 0)]
        if there is not None:
            at = "loss" if there == len(self._bytes) else self._name(there)
            shares.append((at, activations - self._before[there] + self._before[first]))
        most = sorted(shares, key=lambda share: -share[1])[:MOST_LAYERS]
        return replace(
            state,
            gradients=gradients,
            communication=state.communication + communication,
            activations=state.activations + activations + others,
            when=when,
            phase=phase,
            layers=tuple(LayerShare(name=name, bytes=size) for name, size in most if size > 0),
            rest=state.peak,
        )


def _share(parameter: ParameterNode, shards: int) -> int:
    """Returns the numbers of the first rank's share, which is the largest."""
    whole = prod(parameter.shape)
    if shards == 1:
        return whole
    rows = parameter.shape[0] if parameter.shape else 1
    return largest(rows, shards) * (whole // max(1, rows)) if rows else whole
