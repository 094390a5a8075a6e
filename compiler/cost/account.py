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
    framework       the CUDA context, NCCL's buffers, cuBLAS's workspaces, and symmetric memory; on a CPU the segments
                    of `devices.backend = shared_memory` that the rank makes

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

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise

from dslc.compiler.cost.layer_bytes import (
    buffer_bytes,
    loss_bytes,
    symmetric_bytes,
)
from dslc.compiler.cost.loss_bytes import LossBytes, whole_loss_bytes
from dslc.compiler.cost.optimizer_bytes import OptimizerBytes, Updated
from dslc.compiler.cost.rank_stages import ActionMemory, LayerSizes, RankStages, StageMemory, share
from dslc.compiler.cost.unsharded_memory import IDLE, ShardedMemory, UnshardedMemory
from dslc.compiler.facts.hardware import framework_bytes, segment_bytes, workspace_bytes
from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.memory import LayerShare, MemoryNode, Phase
from dslc.compiler.ir.nodes import ParameterNode
from dslc.compiler.operations.exchange_rules import kept_bytes, passing_bytes, summed_bytes
from dslc.compiler.placement.axes import AXES
from dslc.compiler.placement.losses import has_forward_ahead
from dslc.compiler.placement.sharding import (
    fused_on,
    low_copy,
    optimizer_groups,
    zero1_partition,
)
from dslc.compiler.placement.staging import Staging, process_groups, ranks_that_share
from dslc.dsl.language import calls as c
from dslc.dsl.language.optimizers import PythonOptimizer
from dslc.dsl.language.preferences import PreferenceLoss
from dslc.dsl.record import Record, record

NEVER = -(1 << 62)  # bytes beside an action that the rank does not have
SECOND_HALF = "gradients of weights"
MOST_LAYERS = 3  # layers named at the peak, at most


def account(staging: Staging, pipeline: int, sizes: LayerSizes) -> MemoryNode:
    """Returns the peak memory of the ranks at one pipeline coordinate."""
    return MemoryAccount(staging, pipeline, sizes).highest()


def shared_segment_bytes(staging: Staging, pipeline: int) -> int:
    """Returns the bytes of the segments of the rank at a pipeline coordinate that makes most: one segment for each of
    its groups with several ranks on its host. Its peers map it too, and it counts on the rank that makes it alone.
    """
    layout = staging.layout
    if layout.backend != "shared_memory":
        return 0
    stride, processes, most = layout.stride("pipeline"), layout.processes, 0
    first = pipeline * stride
    # Where axes fill nodes, or nodes axes, all ranks of a stage are alike.
    widths = [layout.stride(axis) * layout.sizes[axis] for axis in AXES] + [stride]
    is_aligned = all(width % processes == 0 or processes % width == 0 for width in widths)
    for rank in range(first, first + (1 if is_aligned else stride)):
        groups = process_groups(staging, rank)
        most = max(most, sum(segment_bytes(ranks_that_share(group, processes)) for group in groups))
    return most


@record
class LayerPeaks(Record):
    """The highest stops of the layers of a rank, in bytes, for a search over what layers keep.

    A peak is without what earlier layers of the stage keep, and without what the rank holds beside the action.
    """

    fixed: int  # the highest of the stops that do not depend on what layers keep
    peaks: Mapping[tuple[int, int, bool], int]  # by action, layer, and whether copies of earlier layers are freed
    stages: tuple[range, ...]  # the layers of each stage, and the end of the last
    names: tuple[str, ...]
    kept: tuple[int, ...]
    copies: tuple[int, ...]  # what stays of autocast's copies of weights until the backward pass


def layer_peaks(staging: Staging, pipeline: int, sizes: LayerSizes) -> LayerPeaks:
    return _PeakRecorder(staging, pipeline, sizes).layer_peaks()


class MemoryAccount:
    """Walks a step of the ranks at one pipeline coordinate, and notes its highest stop."""

    def __init__(self, staging: Staging, pipeline: int, sizes: LayerSizes) -> None:
        self._job, self._layout, self._model = staging.job, staging.layout, staging.model
        self._sharding, self._trained, self._used = staging.sharding, staging.trained, staging.with_gradients
        self._samples_of_a_step, self._steps = staging.workload.share, staging.workload.steps
        self._rank = RankStages(staging, pipeline, sizes)
        self._shared = shared_segment_bytes(staging, pipeline)
        self._layers, self._bytes, self._stages = self._rank.layers, self._rank.bytes, self._rank.stages
        self._samples, self._moved = self._rank.samples, self._rank.moved
        self._shared += symmetric_bytes(staging, self._layers, self._samples)
        self._others = self._first = 0  # bytes of other micro-batches and stages; the first layer of the stage
        self._optimizer = OptimizerBytes(self._job, staging.optimizer, staging.model)
        self._updated: list[tuple[ParameterNode, int]] = []  # parameters, and the numbers that the rank updates
        self._chunked = staging.chunked_head
        self._whole = whole_loss_bytes(staging)  # of a loss that compares samples
        self._most = -1

    # ---------------------------------------------------------------------------------------------------- the state

    def _state(self) -> MemoryNode:
        layout, sharding = self._layout, self._sharding
        parameters_here = [q for layer in self._layers for q in layer.parameters if q.tied_to is None]
        train = [q for q in parameters_here if q.name in self._trained]
        cuts_rows = sharding.engine == "fsdp"
        own = {q.name: share(q, sharding.shards_of(q) if cuts_rows else 1) for q in parameters_here}
        parameters = sum(q.element * own[q.name] for q in parameters_here)
        rank, self._updated = 0, [(q, own[q.name]) for q in parameters_here if q.name in self._used]
        if sharding.engine == "zero1":
            dealt = self._dealt()
            state_sizes = [
                (self._optimizer_state_bytes(updated), sum(numbers for _, numbers in updated), len(updated))
                for updated in dealt
            ]
            rank = max(range(len(dealt)), key=state_sizes.__getitem__)
            self._updated = dealt[rank]
        optimizer = self._optimizer_state_bytes(self._updated)
        average = 4 * sum(own[q.name] for q in train) if self._averages else 0
        if "parameters" in self._moved:  # and with them what is kept of each
            parameters = optimizer = average = 0
        workspace = workspace_bytes(layout.device, layout.hardware) if self._multiplies else 0
        return MemoryNode(
            parameters=parameters,
            gradients=4 * sum(share(q, 1) for q in train) if sharding.engine in ("ddp", "zero1") else 0,
            optimizer=average + (0 if "optimizer" in self._moved else optimizer),
            activations=self._step_bytes(),
            buffers=sum(buffer_bytes(layer) for layer in self._layers),
            communication=self._rank.received + self._kept_of_exchange(),
            framework=framework_bytes(layout.device, layout.world_size) + workspace + self._shared,
            rank=rank,
            workspace=workspace,
        )

    @property
    def _multiplies(self) -> bool:
        """True if the rank computes products by cuBLAS, or runs a loss, step, optimizer or exchange that may."""
        job, exchange = self._job, self._sharding.exchange
        plain = isinstance(job.model.loss, c.CrossEntropy | c.MSE | c.L1 | c.BCE | PreferenceLoss)
        return (
            any(layer.multiplies for layer in self._layers)
            or (self._rank.has_loss and not plain)
            or isinstance(job.train.optimizer, PythonOptimizer)
            or job.train.step is not None
            or (exchange is not None and exchange.kind == "powersgd")
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
        sample = self._model.input
        return self._samples_of_a_step * sample.bytes * (2 if sample.dtype == "int64" else 1)

    @property
    def _averages(self) -> bool:
        """True if the evaluated weights are not the weights that train."""
        return bool(self._job.train.ema) or self._optimizer.has_modes

    def _optimizer_state_bytes(self, updated: Updated) -> int:
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

    def _engine(self, microbatch: int) -> UnshardedMemory | ShardedMemory:
        job, sharding, shards = self._job, self._sharding, self._sharding.shards
        later, staged = microbatch > 0, self._layout.sizes["pipeline"] > 1
        if sharding.engine != "fsdp":
            waits = microbatch + 1 < self._layout.microbatches
            buckets = sharding.engine in ("ddp", "zero1")
            return UnshardedMemory(trains=self._rank.trains, buckets=buckets, earlier=later, held=waits, staged=staged)
        return ShardedMemory(
            unit_of=self._rank.units[0],
            trains=self._rank.trains,
            shard=self._rank.unit_shards,
            summed=self._rank.summed_numbers,
            parts=shards,
            element=2 if low_copy(job) else 4,
            accumulate=sharding.accumulate,
            stays=later,
            held=microbatch + 1 < self._layout.microbatches,
            copies=shards > 1 and self._layout.device == "cpu",
            staged=staged,
            rounded=sharding.exchange is not None,
            moved="parameters" in self._moved,
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
        last_microbatch = self._layout.microbatches - 1
        if has_forward_ahead(self._job, self._layout):
            self._forward_all_microbatches(self._whole)
        second_last = (
            [last_microbatch - 1] if self._sharding.engine not in ("none", "local") and last_microbatch else []
        )
        kinds = {kind for stage in self._stages for kind in stage.kinds}
        for microbatch in sorted({0, last_microbatch, *second_last}):
            for split in (False, True) if "I" in kinds and "B" in kinds else ("I" in kinds,):
                self._walk(microbatch, split)
        self._others = self._first = 0
        self._stop(
            "optimizer step", None, self._engine(last_microbatch).update(), 0, self._update_bytes(), phase="point"
        )
        exchange = self._sharding.exchange
        if exchange is not None and self._sharding.engine != "fsdp":
            if self._steps is None or exchange.first_step <= self._steps:
                gradients = self._engine(last_microbatch).update() if exchange.agrees is not Payload.WEIGHTS else 0
                passing = passing_bytes(exchange, self._exchanged)
                self._stop("exchange", None, gradients, passing, 0, phase="point")
            if summed := summed_bytes(exchange, self._exchanged):
                gradients = self._engine(last_microbatch).update()
                self._stop("exact sum of gradients", None, gradients, summed, 0, phase="point")
        return self._peak_node()

    def _enter(self, stage: StageMemory, kind: str, action: ActionMemory) -> None:
        self._first = stage.layers.start
        self._others = (
            action.beside + self._rank.mask_of_documents + (self._whole.gradients if self._whole is not None else 0)
        )
        if kind in ("B", "I") and stage.of_loss:
            self._others += stage.output

    def _actions(self, stage: StageMemory, kind: str, later: bool, is_final: bool = False) -> Sequence[ActionMemory]:
        """Returns the actions of a kind; where the stage has none, one that no peak is in."""
        if not stage.actions:
            return (ActionMemory(0),)
        if stage_actions := stage.actions.get((kind, later, is_final and self._sharding.engine == "fsdp")):
            return stage_actions
        alternatives = [
            actions[0] for (other_kind, _, _), actions in stage.actions.items() if (other_kind == "F") == (kind == "F")
        ]
        return (alternatives[0]._replace(beside=NEVER),)

    def _walk(self, microbatch: int, split: bool) -> None:
        """Walks one micro-batch, forward and backward, the latter in two halves if `split`."""
        engine, later, is_final = self._engine(microbatch), microbatch > 0, microbatch + 1 == self._layout.microbatches
        for stage in self._stages:
            for action in self._actions(stage, "F", later):
                self._enter(stage, "F", action)
                gradients = self._walk_forward(stage, engine, action)
                if self._is_end(stage):
                    self._loss(gradients, engine.communication, self._activations_before(stage.layers.stop))
        for stage in reversed(self._stages):
            kind, halves = stage.backward if split else "B", split and stage.splits
            engine_before = engine
            for action in self._actions(stage, kind, later, is_final and not halves):
                engine = copy(engine_before)
                self._enter(stage, kind, action)
                gradients = engine.begin(action.gathered, stage.layers, action.gradients)
                if self._is_end(stage):
                    activations = self._activations_before(stage.layers.stop)
                    self._backward_of_loss(gradients, engine.communication, activations)
                if halves:
                    self._walk_first_half(stage, engine, gradients)
                else:
                    self._walk_backward(stage, engine, gradients)
            for action in self._actions(stage, "W", later, is_final) if halves else ():
                engine = copy(engine_before)
                self._enter(stage, "W", action)
                engine.begin(action.gathered, stage.layers, action.gradients)
                self._walk_second_half(stage, engine)

    def _is_end(self, stage: StageMemory) -> bool:
        """True if the loss follows the stage."""
        return self._rank.has_loss and stage is self._stages[-1]

    def _walk_forward(self, stage: StageMemory, engine: UnshardedMemory | ShardedMemory, action: ActionMemory) -> int:
        """Walks the forward pass of a stage; returns the gradients of weights beside it."""
        gradients = engine.begin(action.gathered, stage.layers, action.gradients)
        held_bytes = self._held_by_callers(stage)
        for n in stage.layers:
            layer = self._bytes[n]
            gradients, earlier_bytes = engine.forward(n), self._activations_before(n) + held_bytes[n]
            if engine.passing:
                label = f"all-gather before the forward pass of {self._name(n)}"
                activations = earlier_bytes + (layer.input if n else 0)
                self._stop(label, n, gradients, engine.communication + engine.passing, activations)
            activations = earlier_bytes + layer.copies + layer.forward
            self._stop(f"forward pass of {self._name(n)}", n, gradients, engine.communication, activations)
        engine.end()
        return gradients

    def _held_by_callers(self, stage: StageMemory) -> Mapping[int, int]:
        """Returns for each layer the bytes that variables of its callers hold: the inputs of the modules around it,
        where no layer keeps them. The input of the stage lies elsewhere.
        """
        if self._model.traced is not None:  # whose callers are not known
            return dict.fromkeys(stage.layers, 0)
        held: dict[int, int] = {}
        first_in: dict[str, int] = {}  # of each module around layers, its first layer
        for n in stage.layers:
            parts = self._layers[n].name.split(".")
            around = {first_in.setdefault(".".join(parts[:end]), n) for end in range(1, len(parts))}
            held[n] = sum(self._bytes[first].unkept for first in around if stage.layers.start < first < n)
        return held

    def _activations_before(self, layer: int) -> int:
        """Returns what the layers of the stage before this one keep."""
        first_layer = self._first
        return self._before[layer] - self._before[first_layer] + self._copies[layer] - self._copies[first_layer]

    def _walk_backward(self, stage: StageMemory, engine: UnshardedMemory | ShardedMemory, gradients: int) -> None:
        for n in reversed(stage.layers):
            layer = self._bytes[n]
            activations = self._activations_before(n) + layer.copies
            if not layer.backward:  # only what waits for the end of the backward pass happens here
                gradients = self._leave(engine, n, activations, gradients, is_final=n == self._first)
                continue
            gradients, passing = engine.backward(n, IDLE), engine.passing
            if passing:
                label = f"all-gather before the backward pass of {self._name(n)}"
                self._stop(label, n, gradients, engine.communication + passing, activations + layer.kept + layer.output)
            for moment in layer.backward:
                label = f"backward pass of {self._name(n)}"
                new_gradients = engine.backward(n, moment)
                working = moment.bytes + moment.dequantized + engine.beside
                self._stop(label, n, new_gradients, engine.communication, activations + working)
            if layer.again:
                label = f"forward pass of {self._name(n)}, again"
                self._stop(label, n, gradients, engine.communication, activations + layer.again)
            activations = self._before[n] - self._before[self._first] + (layer.input if n else 0)
            gradients = self._leave(engine, n, activations, gradients, is_final=n == self._first)

    def _leave(
        self, engine: UnshardedMemory | ShardedMemory, n: int, activations: int, gradients: int, *, is_final: bool
    ) -> int:
        """Leaves a layer in the backward pass; returns the gradients of weights. `is_final`: the action ends."""
        for gradients in engine.leave(n, is_final):
            label = f"reduce-scatter after the backward pass of {self._name(n)}"
            self._stop(label, n, gradients, engine.communication + engine.passing, activations)
        return gradients

    def _walk_first_half(self, stage: StageMemory, engine: UnshardedMemory | ShardedMemory, gradients: int) -> None:
        """Walks the half for gradients of inputs, which frees nothing and keeps what the weights' half needs."""
        # The output is counted beside the action, or its gradient lies where this stage receives.
        activations = self._activations_before(stage.layers.stop) + stage.of_loss - stage.output
        for n in reversed(stage.layers):
            layer, half = self._bytes[n], self._rank.halves(n)
            if not layer.backward:
                continue
            most = half.first
            if layer.again:
                most = max(moment.bytes for moment in layer.backward) - layer.kept
                label = f"forward pass of {self._name(n)}, again"
                self._stop(label, n, gradients, engine.communication, activations + layer.again)
            self._stop(f"backward pass of {self._name(n)}", n, gradients, engine.communication, activations + most)
            activations += half.gradients

    def _walk_second_half(self, stage: StageMemory, engine: UnshardedMemory | ShardedMemory) -> None:
        """Walks the half that makes gradients of weights, in forward order."""
        activations, gradients = stage.between, 0
        for n in stage.layers:
            layer, half = self._bytes[n], self._rank.halves(n)
            gradients = engine.backward(n, IDLE)
            for moment in half.moments if layer.backward else ():
                gradients = engine.backward(n, moment)
                held_bytes = activations - (0 if layer.again else moment.bytes) + engine.beside
                self._stop(SECOND_HALF, None, gradients, engine.communication, held_bytes, phase="point")
            if layer.backward and layer.again:
                held_bytes = activations + half.most
                self._stop(SECOND_HALF, None, gradients, engine.communication, held_bytes, phase="point")
                activations += half.left
            elif layer.backward:
                activations -= half.freed
            gradients = self._leave(engine, n, activations, gradients, is_final=n + 1 == stage.layers.stop)

    def _forward_all_microbatches(self, loss: LossBytes | None) -> None:
        """Makes the outputs of all micro-batches, keeps nothing else of their passes, and makes their loss. Without a
        loss that compares samples, no output is kept.
        """
        engine = self._engine(0)
        (stage,) = self._stages
        gradients = engine.begin(self._actions(stage, "F", False)[0].gathered, stage.layers, 0)
        for n, layer in enumerate(self._bytes):
            gradients = engine.forward(n)
            passing = layer.copies + layer.input + layer.output + (loss.outputs // 2 if loss is not None else 0)
            label = f"forward pass of {self._name(n)}, ahead"
            self._stop(label, None, gradients, engine.communication, passing, by_layer=False)
        engine.end()
        communication = engine.communication
        if loss is not None:
            held_bytes = loss.outputs + max(loss.forward, loss.backward)
            self._stop("loss of all micro-batches", None, gradients, communication, held_bytes, phase="point")

    def _loss(self, gradients: int, communication: int, activations: int) -> None:
        forward = int(self._samples * loss_bytes(self._job, self._model)[0])
        if self._chunked is not None:
            forward = 4 * self._chunked.tokens  # the losses of the tokens
        if self._whole is not None and self._layout.microbatches == 1:
            forward = self._whole.forward
        self._stop("loss", None, gradients, communication, activations + forward, phase="point", by_layer=True)

    def _backward_of_loss(self, gradients: int, communication: int, activations: int) -> None:
        most = int(self._samples * max(loss_bytes(self._job, self._model)[1:]))
        if self._chunked is not None:
            most = 8 * self._chunked.tokens
        if self._whole is not None and self._layout.microbatches == 1:
            most = self._whole.backward
        self._stop("backward pass of the loss", None, gradients, communication, activations + most)

    def _update_bytes(self) -> int:
        """Returns the optimizer's temporary bytes: without a fused kernel, some numbers for each that it updates."""
        if self._moved & {"optimizer", "parameters"}:  # it works in the host's memory
            return 0
        scratch = self._optimizer.scratch(self._updated)
        if scratch and self._layout.device not in fused_on(self._job, self._model):
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
        label: str,
        layer: int | None,
        gradients: int,
        communication: int,
        activations: int,
        *,
        phase: Phase = "pass",
        by_layer: bool | None = None,
    ) -> None:
        """Notes a moment of the step. `by_layer`: the layers before `layer`, or all, keep their activations then."""
        total = self._always + gradients + communication + activations + self._others
        by_layer = phase == "pass" if by_layer is None else by_layer
        self._note_total(total, layer, by_layer)
        if total <= self._most:
            return
        self._most = total
        layers_before = (len(self._bytes) if layer is None else layer) if by_layer else None
        self._peak = (label, phase, self._first, layers_before, gradients, communication, activations, self._others)

    def _note_total(self, total: int, layer: int | None, by_layer: bool) -> None:
        """Follows what the rank holds in a moment of the step."""

    def _peak_node(self) -> MemoryNode:
        state = self._rest
        label, phase, first_layer, layers_before, gradients, communication, activations, other_stages = self._peak
        shares = [
            (self._name(n), self._before[n + 1] - self._before[n]) for n in range(first_layer, layers_before or 0)
        ]
        if layers_before is not None:
            loss_or_layer = "loss" if layers_before == len(self._bytes) else self._name(layers_before)
            shares.append((loss_or_layer, activations - self._before[layers_before] + self._before[first_layer]))
        most = sorted(shares, key=lambda share: -share[1])[:MOST_LAYERS]
        return replace(
            state,
            gradients=gradients,
            communication=state.communication + communication,
            activations=state.activations + activations + other_stages,
            when=label,
            phase=phase,
            layers=tuple(LayerShare(name=name, bytes=size) for name, size in most if size > 0),
            rest=state.peak,
        )


class _PeakRecorder(MemoryAccount):
    """Walks a step, and records the highest stop of each layer in each action."""

    def layer_peaks(self) -> LayerPeaks:
        self._fixed = self._action = self._beside = 0
        self._copies_are_freed = False
        self._peaks: dict[tuple[int, int, bool], int] = {}
        self.highest()
        return LayerPeaks(
            fixed=self._fixed,
            peaks=self._peaks,
            stages=tuple(stage.layers for stage in self._stages),
            names=tuple(layer.name for layer in self._layers),
            kept=tuple(after - before for before, after in pairwise(self._before)),
            copies=tuple(after - before for before, after in pairwise(self._copies)),
        )

    def _enter(self, stage: StageMemory, kind: str, action: ActionMemory) -> None:
        super()._enter(stage, kind, action)
        self._action, self._beside = self._action + 1, action.beside

    def _leave(
        self, engine: UnshardedMemory | ShardedMemory, n: int, activations: int, gradients: int, *, is_final: bool
    ) -> int:
        self._copies_are_freed = True
        gradients = super()._leave(engine, n, activations, gradients, is_final=is_final)
        self._copies_are_freed = False
        return gradients

    def _note_total(self, total: int, layer: int | None, by_layer: bool) -> None:
        if not by_layer:
            self._fixed = max(self._fixed, total)
        elif self._beside != NEVER:
            n, first = len(self._bytes) if layer is None else layer, self._first
            earlier = self._before[n] - self._before[first]
            if not self._copies_are_freed:
                earlier = self._activations_before(n)
            key = self._action, n, self._copies_are_freed
            self._peaks[key] = max(self._peaks.get(key, 0), total - self._beside - earlier)
