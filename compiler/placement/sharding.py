"""Lays the model over the data axis: chooses torch's engine, and the units that are gathered and scattered together.

Model: ZeRO-1 under O1 is `ZeroRedundancyOptimizer` beside DistributedDataParallel. `fully_shard` implements six cases:
ZeRO-2 and -3; full copies within the data axis; every O2, whose low-precision copy needs `MixedPrecisionPolicy`;
parameters in the host's memory, which need `CPUOffloadPolicy`; every expert axis, whose experts are sharded over fewer
ranks; and every data axis beside another axis, where torch's DistributedDataParallel is unreliable. A unit of
`fully_shard` is a module: one all-gather gathers its parameters, and one reduce-scatter reduces its gradients. Ranks
that exchange weights or momenta (exchange.py) are independent within a step (`local`). Units are the model's blocks and
every other layer of 1 MiB or more; the root is a unit of the rest, and of tied weights, which two units cannot share.

Contract: the account, the predicted collectives and the program all use these functions, so that they cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Literal

from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.nodes import LayerNode, ModelGraph, ParameterNode
from dslc.compiler.placement.exchange import ExchangePolicy, exchange_of
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.schedules import SPLITS_BACKWARD
from dslc.dsl.language.blocks import RecomputeBudget
from dslc.dsl.language.calls import BCE, L1, MSE, CrossEntropy, EveryNthBlock, Fp16, Fp32
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.optimizers import Device, Muon
from dslc.dsl.record import Record, record

_EMBEDDING = r"embed|position|(^|\.)w[tp]e\."  # in names of matrices that are looked up by rows
UNIT_NUMBERS = 2**18  # a layer of at least so many parameters (1 MiB in float32) is gathered by itself

BUCKET_BYTES = 25 * 2**20  # bucket size of DistributedDataParallel, torch's default

Engine = Literal["none", "ddp", "zero1", "fsdp", "local"]
LowDType = Literal["float32", "bfloat16", "float16"]

DTYPES: dict[str, LowDType] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}


@record
class Sharding(Record):
    """`replicas` full copies of `shards` parts each; their product is the data axis times the context axis.

    `reshard`: parameters are freed after the forward pass. `accumulate`: gradients stay whole, on each rank, until the
    last micro-batch. `exchange`: how ranks agree, where that is not an exact sum of gradients. `experts` neighbours on
    the data axis share the experts of each layer: these are copied and sharded over every `experts`-th rank alone.
    """

    engine: Engine
    replicas: int
    shards: int
    reshard: bool
    accumulate: bool
    exchange: ExchangePolicy | None = None
    experts: int = 1

    def shards_of(self, parameter: ParameterNode) -> int:
        """Returns the number of parts in which the ranks hold what a rank of the expert axis has of a parameter."""
        return self.expert_shards if parameter.experts else self.shards

    def parts_of(self, parameter: ParameterNode) -> int:
        """Returns the number of parts in which the ranks hold a parameter."""
        return self.shards_of(parameter) * (self.experts if parameter.experts else 1)

    @property
    def expert_shards(self) -> int:
        """The parts in which the ranks hold the experts of one rank of the expert axis."""
        return max(1, self.shards // self.experts)

    @property
    def expert_replicas(self) -> int:
        """The copies of such a part."""
        return self.shards * self.replicas // (self.experts * self.expert_shards)

    @property
    def reduces(self) -> bool:
        """True if `fully_shard` sums gradients over ranks."""
        return self.engine == "fsdp" and self.shards * self.replicas > 1


@record
class Unit(Record):
    """The parameters of modules that are gathered together. `name` is the module's; the root's is empty."""

    name: str
    parameters: tuple[ParameterNode, ...]  # in the model's order, each tied weight once


def sharding_of(job: JobSpec, layout: Layout) -> Sharding:
    """Returns the engine for `job`, and its settings."""
    data, zero, experts = layout.sizes["data"], job.parallelism.zero, job.parallelism.expert
    is_offloaded = "parameters" in offloaded(job, layout)
    updates_full = not low_copy(job) and not is_offloaded
    has_data_only = layout.world_size == data and experts == 1
    exchange = exchange_of(job, layout)
    if updates_full and (data == layout.sizes["context"] == 1 or (zero == 0 and has_data_only)):
        keeps_copies = exchange is not None and exchange.agrees is not Payload.GRADIENTS
        engine: Engine = "none" if data == 1 else "local" if keeps_copies else "ddp"
        return Sharding(engine=engine, replicas=data, shards=1, reshard=False, accumulate=True, exchange=exchange)
    if zero == 1 and updates_full and has_data_only and job.parallelism.replicas == 1:
        return Sharding(engine="zero1", replicas=1, shards=data, reshard=False, accumulate=True, exchange=exchange)
    # Ranks that share a sequence hold the same parameters, and sum their gradients like those with other samples.
    ranks = data * layout.sizes["context"]
    replicas = ranks if zero == 0 else job.parallelism.replicas
    return Sharding(
        engine="fsdp",
        replicas=replicas,
        shards=max(1, ranks // replicas),  # of more replicas than ranks, which E0403 reports
        # Parameters freed after a forward pass cannot be gathered between the halves of a split backward pass.
        reshard=(is_offloaded and not splits_backward(job)) or (zero == 3 and ranks > 1),
        accumulate=zero <= 1 or layout.sizes["pipeline"] > 1,  # torch's stages reduce theirs at the last one
        exchange=exchange,
        experts=experts,
    )


def splits_backward(job: JobSpec) -> bool:
    """True if gradients of inputs and of weights are computed apart."""
    return job.parallelism.pipeline > 1 and job.parallelism.schedule in SPLITS_BACKWARD


def offloaded(job: JobSpec, layout: Layout) -> frozenset[str]:
    """Returns the kinds kept in the host's memory; none on a CPU."""
    return frozenset(job.memory.offload if layout.device == "cuda" else ())


def units(model: ModelGraph) -> tuple[Unit, ...]:
    """Returns the units in the order of the model, the root, which may be empty, last."""
    shared = {name for pair in model.ties for name in pair}
    separate: list[Unit] = []
    remaining: list[ParameterNode] = []
    for layer in model.layers:
        own_parameters = tuple(q for q in layer.parameters if q.tied_to is None)
        # The ranks gather a unit together, and where numbers decide what runs, one of them may pass a layer over.
        if _is_unit(layer, shared) and not model.varies:
            separate.append(Unit(name=layer.name, parameters=own_parameters))
        else:
            remaining.extend(own_parameters)
    return (*separate, Unit(name="", parameters=tuple(remaining)))


def searches(model: ModelGraph, sharding: Sharding) -> bool:
    """True if each step must find out which parameters it has used. DistributedDataParallel must do so also for
    parameters that no step uses, which other engines pass over by themselves.
    """
    return model.root is None and (model.varies or (bool(model.unused) and sharding.engine not in ("fsdp", "local")))


def _is_unit(layer: LayerNode, shared: set[str]) -> bool:
    if not layer.name or not layer.parameters or any(q.name in shared for q in layer.parameters):
        return False
    return layer.recomputable or sum(q.count for q in layer.parameters) >= UNIT_NUMBERS


def recomputed(job: JobSpec, model: ModelGraph) -> tuple[str, ...]:
    """Returns the blocks whose forward pass runs again, whole or in part, in the backward pass."""
    blocks = [layer.name for layer in model.layers if layer.recomputable]
    recompute = job.memory.recompute
    if recompute == "none":
        return ()
    if isinstance(recompute, RecomputeBudget) and recompute.blocks is not None:
        return recompute.blocks
    return tuple(blocks[:: recompute.n]) if isinstance(recompute, EveryNthBlock) else tuple(blocks)


def fused_on(job: JobSpec, model: ModelGraph | None) -> tuple[Device, ...]:
    """Returns the devices on which the optimizer takes torch's fused kernel in this job."""
    some = job.train.step is not None or (model is not None and model.varies)  # an update may pass over a parameter
    return job.train.optimizer.fused_on(skipping=some or leaves_out_steps(job))


def leaves_out_steps(job: JobSpec) -> bool:
    """True if an update is skipped when a gradient is not finite, so that the ranks reduce that flag in each step."""
    return isinstance(job.train.precision, Fp16) or job.train.on_nonfinite == "skip"


def low_precision(job: JobSpec) -> bool:
    return not isinstance(job.train.precision, Fp32)


def compiles_loss(job: JobSpec, *, cut: bool) -> bool:
    """True if torch.compile compiles the loss: one of the language, whose scores the tensor axis does not `cut`."""
    return bool(job.train.compile) and not cut and isinstance(job.model.loss, CrossEntropy | MSE | L1 | BCE)


def low_dtype(job: JobSpec) -> LowDType:
    """Returns the dtype of computations in 16 bits; float32 if there are none."""
    return DTYPES[job.train.precision.word]


def low_copy(job: JobSpec) -> bool:
    """True under O2: forward and backward in 16 bits throughout, with a copy of the parameters."""
    return getattr(job.train.precision, "level", "O1") == "O2"


def autocasts(job: JobSpec) -> bool:
    """True under O1: `torch.autocast` picks the precision of each operation, and copies weights for it."""
    return low_precision(job) and not low_copy(job)


def with_copies(layers: list[LayerNode]) -> list[LayerNode]:
    """Returns a rank's layers, where a copy of a tied weight from another rank counts as the layer's own."""
    names = {q.name for layer in layers for q in layer.parameters}

    def with_own_copy(q: ParameterNode) -> ParameterNode:
        return q if q.tied_to is None or q.tied_to in names else replace(q, name=q.tied_to, tied_to=None)

    def copied(layer: LayerNode) -> LayerNode:
        tied = any(q.tied_to is not None for q in layer.parameters)
        return replace(layer, parameters=tuple(map(with_own_copy, layer.parameters))) if tied else layer

    return list(map(copied, layers))


def trained(job: JobSpec, model: ModelGraph) -> frozenset[str]:
    """Returns the parameters that train. A pattern of `model.freeze` freezes a tied weight by any of its names."""
    parameters = [q for layer in model.layers for q in layer.parameters]
    frozen = model.names.matching(job.model.freeze)
    return frozenset(q.name for q in parameters if q.trains and q.tied_to is None and q.name not in frozen)


def adamw_matrices(job: JobSpec, model: ModelGraph | None) -> dict[str, str] | None:
    """Returns the matrices that train and that Muon leaves to AdamW, each with the reason: those that match `adamw`,
    else embeddings and the head, which is the last matrix where tracing finds none. A tied weight counts by all of its
    names, and is returned by the first. None if they are unknown,
    because the network is not traced.
    """
    optimizer = job.train.optimizer
    if not isinstance(optimizer, Muon):
        return {}
    if model is None:
        return None
    matrices = [(layer.kind, q) for layer in model.layers for q in layer.parameters if len(q.shape) == 2]
    if optimizer.adamw is not None:
        reasons = dict.fromkeys(model.names.matching(optimizer.adamw), "as `adamw` asks")
    else:
        head = model.traced.head if model.traced is not None else ""
        weight = f"{head}.weight" if head else matrices[-1][1].name if matrices else ""
        reasons = {model.names.first_name(weight): "the head"}
        reasons |= dict.fromkeys(model.traced.embeddings if model.traced is not None else (), "an embedding")
        for kind, q in matrices:
            if kind.endswith("embedding") or re.search(_EMBEDDING, q.name):
                reasons[q.first_name] = "an embedding"
    names = trained(job, model)
    return {q.name: reasons[q.name] for _, q in matrices if q.name in names and q.name in reasons}


def optimizer_groups(job: JobSpec, model: ModelGraph, names: frozenset[str]) -> tuple[tuple[ParameterNode, ...], ...]:
    """Returns the parameters `names` in the optimizer's groups: first the parameters outside of the job's groups, with
    decay and without, then each of the job's groups; in each what belongs to the optimizer before what it leaves to
    another. A tied weight counts by any of its names.
    """
    groups = job.train.groups
    patterns = [group.parameters for group in groups]
    others, split = adamw_matrices(job, model) or {}, job.train.optimizer.fallback is not None
    by_group: dict[tuple[int, bool, bool], list[ParameterNode]] = {}
    for q in (q for layer in model.layers for q in layer.parameters if q.name in names):
        number = model.names.group(patterns, q.name)
        decays = number > 0 and groups[number - 1].weight_decay is not None
        is_undecayed = not decays and model.names.match(job.train.no_decay, q.name)
        is_other = split and (len(q.shape) != 2 or q.name in others)
        by_group.setdefault((number, is_undecayed, is_other), []).append(q)
    keys = product(range(len(groups) + 1), (False, True), (False, True))
    return tuple(tuple(by_group.get(key, ())) for key in keys)


def zero1_partition(groups: Sequence[Sequence[int]], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the rank that owns each parameter of each of the optimizer's groups, given their sizes.

    This is ZeroRedundancyOptimizer's own order: group by group, the largest first, each to the first of the ranks with
    the least so far.
    """
    totals = [0] * ranks
    owners = []
    for sizes in groups:
        chosen = [0] * len(sizes)
        for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
            rank = totals.index(min(totals))
            chosen[n] = rank
            totals[rank] += sizes[n]
        owners.append(tuple(chosen))
    return tuple(owners)


def channels_last(layout: Layout, sharding: Sharding, model: ModelGraph) -> bool:
    """True if the library's network keeps its images with their channels last."""
    if model.root is None or len(model.input.shape) != 3:
        return False
    image = any(layer.kind in ("conv2d", "residual") for layer in model.layers)
    # `fully_shard` cuts rows of contiguous tensors, ZeRO-1 puts whole ones into a bucket, and stages send contiguous
    # ones.
    has_data_only = layout.world_size == layout.sizes["data"]
    return image and has_data_only and sharding.engine in ("none", "ddp") and not _overruns(layout, model)


def _overruns(layout: Layout, model: ModelGraph) -> bool:
    """True if torch, on a CPU and with channels last, would write past the memory of one of the model's convolutions.

    oneDNN does so (torch 2.13, with AVX2) if two conditions hold. A kernel of one pixel has a stride, and an image has
    fewer channels than a vector register holds numbers: 8, or 16 with AVX-512.
    """
    assert model.root is not None
    return layout.device == "cpu" and any(
        module.kind == "Conv2d"
        and module.arguments["kernel_size"] == 1
        and module.arguments["stride"] > 1
        and module.arguments["in_channels"] < 16
        for module in model.root.walk()
    )
