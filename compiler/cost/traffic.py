"""The collectives of a rank in a step: kind, count, and bytes of input.

Model: the rules of torch's engines. DistributedDataParallel reduces gradients in buckets, filled in the order in which
gradients are ready; ZeroRedundancyOptimizer sends each rank's updated parameters in one broadcast a rank; `fully_shard`
gathers a unit before it runs and scatters its gradients after. dslc's own collectives (batch statistics, counts of kept
targets, the norm of a sharded gradient) follow its own code.

A message between stages is counted at both of its ends, as `send` and as `receive`. tensor_traffic.py counts the tensor
axis.

Contract: kind, count and bytes are those that a step really has, on any axes, which tests/training/test_collectives.py
compares; `dslc run --profile` shows both. The bytes are those of the input: of an all-gather a rank's own part, of a
reduce-scatter the whole. Logging, evaluation and checkpoints belong to no step. A collective of all ranks belongs to
their axis, or to `all` if they have several.

Limits: the first steps exchange more, as engines lay out buckets. In a user's own module, gradients are assumed to be
ready in the reverse order of its layers' calls.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby, pairwise
from math import prod

from dslc.compiler.common.buckets import in_buckets as in_order
from dslc.compiler.common.buckets import names_in_backward_order
from dslc.compiler.common.shares import largest
from dslc.compiler.cost.exchange_traffic import OWN_BUCKETS, gradients_of, weights_of
from dslc.compiler.cost.tensor_traffic import Exchanged, TensorTraffic
from dslc.compiler.cost.whole_loss import over_outputs
from dslc.compiler.ir.nodes import LayerNode, ParameterNode
from dslc.compiler.ir.tensors import DTYPE_BYTES, TensorFact
from dslc.compiler.ir.traffic import ALWAYS, Payload, TrafficNode, When
from dslc.compiler.model.pieces import gathers_by_layer
from dslc.compiler.placement.lowering import Issue, row_of
from dslc.compiler.placement.seams import boundary_tensors
from dslc.compiler.placement.sharding import (
    BUCKET_BYTES,
    Sharding,
    Unit,
    leaves_out_steps,
    low_copy,
    low_dtype,
    low_precision,
    optimizer_groups,
    recomputed,
    searches,
    with_copies,
    zero1_partition,
)
from dslc.compiler.placement.staging import Staging
from dslc.compiler.placement.tensor_plan import shape_on_a_rank
from dslc.compiler.placement.whole_losses import makes_outputs_ahead
from dslc.dsl.record import record

FIRST_BUCKET_BYTES = 2**20  # DistributedDataParallel's first bucket is small, so that it is sent early
BUFFER_BUCKET_BYTES = 250 * 2**20

ROUNDED = {"fp16": "float16", "bf16": "bfloat16"}


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


def place_of(staging: Staging, pipeline: int) -> Coordinate:
    """Returns the part of a pipeline coordinate."""
    mine, model = staging.stages_of(pipeline), staging.model
    layers = iter(with_copies([model.layers[n] for stage in mine for n in staging.stages[stage]]))
    return Coordinate(
        **{each.name: getattr(staging, each.name) for each in fields(Staging)},
        pipeline=pipeline,
        mine=mine,
        held=tuple(tuple(next(layers) for _ in staging.stages[stage]) for stage in mine),
        whole=staging,
        shape=shape_on_a_rank(staging.cuts, staging.layout.sizes["tensor"]),
    )


def traffic(place: Coordinate) -> Iterator[TrafficNode]:
    """Yields the exchanges of a rank in a step; no entry has a count of 0."""
    sizes = place.layout.sizes
    found = [*_over_data(place)]
    if sizes["pipeline"] > 1:
        found += [*_between_stages(place), *_shared(place)]
    if sizes["tensor"] > 1:
        found += _over_tensor(place)
    if sizes["context"] > 1:
        found += _over_context(place)
    found += _over_all(place)
    return (node for node in found if node.count)


def _data(operation: str, what: Payload, sizes: Iterable[int], dtype: str = "float32", times: int = 1) -> TrafficNode:
    """Returns operations of these sizes, each so many `times`; a Counter gives the times of each."""
    of_each = sizes if isinstance(sizes, Counter) else Counter(sizes)
    count, bytes = of_each.total(), sum(size * often for size, often in of_each.items())
    return TrafficNode(
        operation=operation, axis="data", what=what, dtype=dtype, count=times * count, bytes=times * bytes
    )


# ------------------------------------------------------------------------------------------------- the data axis


def _over_data(place: Coordinate) -> Iterator[TrafficNode]:
    layout, sharding = place.layout, place.sharding
    if layout.sizes["data"] * layout.sizes["context"] == 1:
        return
    alone = sharding.exchange is not None and sharding.exchange.differ  # its statistics are its own, too
    if sharding.engine == "fsdp":
        yield from _fsdp(place)
    elif sharding.engine == "local" and sharding.exchange is not None:
        yield from weights_of(sharding.exchange, [sum(q.count for q in each) for each in exchanged(place)])
    else:
        yield from _ddp(place)
    if not place.model.unsynced_batch_norm and not alone:
        yield _data("all_reduce", Payload.BATCH_STATISTICS, _statistics(place), "float64", layout.microbatches)
    when, exchange = ALWAYS, sharding.exchange
    if exchange is not None and not exchange.every:  # later no step waits for another rank
        when = When(until=exchange.alone)
    summed = layout.sizes["data"] > 1 and when.until != 0
    if place.workload.counts == "kept" and summed:
        yield replace(_data("all_reduce", Payload.KEPT_COUNT, [8], "int64"), when=when)
    if place.workload.counts == "own" and summed and layout.sizes["pipeline"] * layout.sizes["context"] == 1:
        yield replace(_data("all_reduce", Payload.LOSS_COUNT, [8], "float64"), when=when)
    yield from over_outputs(place)


def _over_all(place: Coordinate) -> Iterator[TrafficNode]:
    """Yields the exchanges between all ranks that together hold the gradients: those of a data axis that shards them,
    or all.
    """
    wide = [axis for axis, size in place.layout.sizes.items() if size > 1]
    shared_out = place.sharding.engine == "fsdp" and place.sharding.shards > 1
    apart = place.sharding.engine == "local"
    if not wide or (wide == ["data"] and not (shared_out or apart)):
        return
    axis = wide[0] if len(wide) == 1 else "all"
    if place.workload.counts == "own" and {"pipeline", "context"} & {*wide}:  # each rank knows a part of it
        yield TrafficNode(operation="all_reduce", axis=axis, what=Payload.LOSS_COUNT, dtype="float64", count=1, bytes=8)
    for asked, what in (
        (place.job.train.clip_norm is not None and not apart, Payload.GRADIENT_NORM),
        (leaves_out_steps(place.job), Payload.NONFINITE),
    ):
        if asked:
            yield TrafficNode(operation="all_reduce", axis=axis, what=what, dtype="float32", count=1, bytes=4)


def _ddp(place: Coordinate) -> Iterator[TrafficNode]:
    model, layers = place.model, place.layers
    order = in_buckets(place)
    if not order:
        return
    sizes = buckets(4 * q.count for q in order)
    if place.sharding.exchange is None:
        yield _data("all_reduce", Payload.GRADIENTS, sizes)
    else:
        yield from gradients_of(place.sharding.exchange, by_bucket(place))
    if searches(model, place.sharding):
        yield _data("all_reduce", Payload.USED_PARAMETERS, [4 * len(order)], "int32")
    if not model.batch_norm or model.moves_buffers:  # else the buffers are equal, or each rank's own
        for dtype, sizes in _buffers(layers).items():
            yield _data("broadcast", Payload.BUFFERS, sizes, dtype)
    if place.sharding.engine == "zero1":
        yield _data("broadcast", Payload.PARAMETERS, [4 * numbers or 4 for numbers in updated(place)])


def in_buckets(place: Coordinate) -> list[ParameterNode]:
    """Returns the parameters in DistributedDataParallel's buckets, in order; they have room for every gradient."""
    names, layers = place.whole.trained, place.layers
    if searches(place.model, place.sharding) and not place.model.varies:
        return [q for layer in layers for q in layer.parameters if q.name in names]
    # Laid out again after the first steps, in the order in which gradients came.
    return [q for q in ready(layers, autocast=low_precision(place.job)) if q.name in names]


def by_bucket(place: Coordinate) -> list[list[ParameterNode]]:
    """Returns the parameters of each bucket of gradients: DistributedDataParallel's, or those of an exchange which has
    its own.
    """
    order = in_buckets(place)
    if place.sharding.exchange is not None and place.sharding.exchange.kind in OWN_BUCKETS:
        named = {q.name: q for q in order}
        own = [named[name] for name in names_in_backward_order(named)]
        return [own[bucket.start : bucket.stop] for bucket in in_order(q.count for q in own)]
    found, parameters = list[list[ParameterNode]](), iter(order)
    for size in buckets(4 * q.count for q in order):
        found.append([])
        while size > 0:
            found[-1].append(next(parameters))
            size -= 4 * found[-1][-1].count
    return found


def exchanged(place: Coordinate) -> list[list[ParameterNode]]:
    """Returns the parameters whose momenta or weights are exchanged, by name, in buckets."""
    own = {q.name: q for layer in place.layers for q in layer.parameters if q.name in place.whole.with_gradients}
    order = [own[name] for name in sorted(own)]
    return [order[bucket.start : bucket.stop] for bucket in in_order(q.count for q in order)]


def buckets(sizes: Iterable[int], first: int = FIRST_BUCKET_BYTES, most: int = BUCKET_BYTES) -> list[int]:
    """Returns the bytes of each of DistributedDataParallel's buckets: one is full as soon as it holds its limit or
    more.
    """
    found, held, limit = [], 0, first
    for size in sizes:
        held += size
        if held >= limit:
            found.append(held)
            held, limit = 0, most
    return [*found, held] if held else found


def ready(layers: Sequence[LayerNode], *, autocast: bool) -> Iterator[ParameterNode]:
    """Yields parameters in the order in which the backward pass finishes their gradients.

    Modules come in reverse, and the parameters of one in order, with two exceptions: autograd reaches the bias of a
    linear map before its weight, which is a transposed view (but not through autocast's copies); and a module with
    parts uses its own parameters after them.
    """
    for layer in reversed(layers):
        grouped = groupby((q for q in layer.parameters if q.tied_to is None), key=_place)
        modules = [(path, list(group)) for (path, _), group in grouped]
        for n, (path, _) in enumerate(modules):
            if n + 1 < len(modules) and path and modules[n + 1][0].startswith(f"{path}."):
                modules[n], modules[n + 1] = modules[n + 1], modules[n]
        for _, group in reversed(modules):
            linear = len(group) == 2 and [len(q.shape) for q in group] == [2, 1]
            yield from reversed(group) if linear and not autocast else group


def _place(parameter: ParameterNode) -> tuple[str, str]:
    """Returns the path of a parameter's module, and its layer's number within an LSTM."""
    path, _, name = parameter.name.rpartition(".")
    layer = re.search(r"_l\d+(_reverse)?$", name)
    return path, layer[0] if layer else ""


def _buffers(layers: Iterable[LayerNode], limit: int = BUFFER_BUCKET_BYTES) -> dict[str, list[int]]:
    """Returns the bytes of each broadcast of buffers, by dtype; a broadcast is full at the limit."""
    by_dtype: dict[str, list[int]] = {}
    for buffer in (b for layer in layers for b in layer.buffers):
        by_dtype.setdefault(buffer.dtype, []).append(prod(buffer.shape) * DTYPE_BYTES[buffer.dtype])
    return {dtype: buckets(sizes, limit, limit) for dtype, sizes in by_dtype.items()}


def updated(place: Coordinate) -> list[int]:
    """Returns the numbers that each rank updates under ZeRO-1; torch sends one number for a rank that has none."""
    parameters = optimizer_groups(place.job, place.model, place.whole.trained)
    groups = [[q.count for q in group] for group in parameters]
    held = [0] * place.sharding.shards
    for sizes, owners in zip(groups, zero1_partition(groups, len(held)), strict=True):
        for size, owner in zip(sizes, owners, strict=True):
            held[owner] += size
    return held


def _statistics(place: Coordinate) -> list[int]:
    """Returns the bytes of each all-reduce of synchronised batch normalisations (runtime/technique/batch_norm.py) in a
    micro-batch.

    Forward: two float64 for each channel and one; again in recomputation. Backward: two for each channel, unless
    nothing before it in the model trains, so that there is no backward pass.
    """
    found: list[int] = []
    again, ahead = set(recomputed(place.job, place.model)), makes_outputs_ahead(place.job, place.layout)
    still = place.model.traced.still if place.model.traced is not None else ()
    for stage, layers in zip(place.mine, place.held, strict=True):
        flows = stage > 0  # input from another stage has a gradient
        for layer in layers:
            for norm in (b for b in layer.buffers if b.name.endswith("running_mean")):
                path, channels = norm.name.removesuffix("running_mean"), norm.shape[0]
                if path.removesuffix(".") in still:
                    continue
                own = [q.name for q in layer.parameters]
                last = max((n for n, name in enumerate(own) if name.startswith(path)), default=-1)
                backward = flows or any(name in place.whole.with_gradients for name in own[: last + 1])
                found += [8 * (2 * channels + 1)] * (1 + (backward and layer.name in again) + ahead)
                found += [16 * channels] * backward
            flows = flows or any(q.name in place.whole.with_gradients for q in layer.parameters)
    return found


def _fsdp(place: Coordinate) -> Iterator[TrafficNode]:
    sharding, names, microbatches = place.sharding, place.whole.with_gradients, place.layout.microbatches
    shards, summed = sharding.shards, summed_in(sharding)
    kept = 2 if low_copy(place.job) else 4
    gathered: Counter[int] = Counter()  # count by bytes
    scattered: list[int] = []
    row = [part for entry in row_of(place.schedule, place.pipeline) for part in entry.parts] if place.schedule else []
    for stage, units_ in units_by_stage(place):
        sizes = [kept * sum(padded(q, place) for q in unit.parameters) // shards for unit in units_]
        again = gathered_again(place, stage, units_) if sharding.reshard else set()
        if place.schedule is not None:
            gathered += _gathered_by_row(place, row, stage, sizes, [unit.name in again for unit in units_])
        else:
            often = microbatches if sharding.reshard else 1
            ahead = sharding.reshard and makes_outputs_ahead(place.job, place.layout)
            for unit, size in zip(units_, sizes, strict=True):  # the root stays gathered where outputs are made ahead
                gathered[size] += often * (1 + (unit.name in again) + (ahead and bool(unit.name)))
        width = DTYPE_BYTES[summed]
        trains = [width * sum(padded(q, place) for q in unit.parameters if q.name in names) for unit in units_]
        scattered += [size for size in trains if size]
    if shards > 1:
        dtype = low_dtype(place.job) if low_copy(place.job) else "float32"
        del gathered[0]
        yield _data("all_gather", Payload.PARAMETERS, gathered, dtype)
        times = 1 if sharding.accumulate else microbatches
        if summed == "float16":
            yield _data("all_reduce", Payload.SCALE, [4] * len(scattered), times=times)
        yield _data("reduce_scatter", Payload.GRADIENTS, scattered, summed, times)
    if sharding.replicas > 1:
        if summed == "float16":
            yield _data("all_reduce", Payload.SCALE_OF_SUMS, [4] * len(scattered))
        yield _data("all_reduce", Payload.GRADIENTS, [size // shards for size in scattered], summed)
    if place.model.moves_buffers and place.layout.sizes["data"] > 1:
        for kind, each in _buffers(place.layers, limit=1).items():
            yield _data("broadcast", Payload.BUFFERS, each, kind)
    if searches(place.model, sharding) and place.layout.sizes["data"] > 1:
        yield _data("all_reduce", Payload.USED_PARAMETERS, [4 * len(place.whole.trained)], "int32")


def summed_in(sharding: Sharding) -> str:
    """Returns the dtype in which `fully_shard` sums gradients."""
    return ROUNDED.get(sharding.exchange.kind, "float32") if sharding.exchange is not None else "float32"


def units_by_stage(place: Coordinate) -> Iterator[tuple[int, list[Unit]]]:
    """Yields the units of each stage; its root, with the rest, last."""
    everywhere = place.whole.units
    for stage, held in zip(place.mine, place.held, strict=True):
        # A weight of another stage is this one's too, even if both are on one rank.
        layers = with_copies(list(held))
        here = {layer.name for layer in layers}
        apart = [unit for unit in everywhere if unit.name and unit.name in here]
        taken = {q.name for unit in apart for q in unit.parameters}
        rest = [q for layer in layers for q in layer.parameters if q.tied_to is None and q.name not in taken]
        yield stage, [*apart, Unit(name="", parameters=tuple(rest))]


def _gathered_by_row(
    place: Coordinate, row: Sequence[Issue], stage: int, sizes: list[int], again: list[bool]
) -> Counter[int]:
    """Returns the bytes of the all-gathers of a stage's units, from the row of a schedule: all of them ahead of its
    first action, and again one that its forward pass has freed. A backward pass frees none.
    """
    everything, repeated = frozenset(range(len(sizes))), frozenset(n for n, is_so in enumerate(again) if is_so)
    root = frozenset({len(sizes) - 1})
    there = frozenset[int]()
    times: Counter[frozenset[int]] = Counter()  # count by set of units
    for issue in row:
        if issue.stage != stage:
            continue
        if issue.kind in ("RESHARD", "REDUCE_GRAD"):
            there = frozenset()
            continue
        wanted = everything if issue.kind in ("UNSHARD", "F") else repeated
        if not wanted <= there:
            times[wanted - there] += 1
            there |= wanted
        if issue.kind == "F" and place.sharding.reshard:
            there &= root
    found: Counter[int] = Counter()
    for units_, often in times.items():
        for n in units_:
            found[sizes[n]] += often
    return found


def gathered_again(place: Coordinate, stage: int, units_: Sequence[Unit]) -> set[str]:
    """Returns the units that are gathered for the backward pass too.

    Not the root, which stays gathered. Not those before all that train, which have no backward pass; but torch
    prefetches one unit, so the last of these comes as well.
    """
    apart = [unit.name for unit in units_ if unit.name]
    idle: list[str] = []
    for layer in place.held[place.mine.index(stage)]:
        if stage > 0 or any(q.name in place.whole.with_gradients for q in layer.parameters):
            break
        idle += [layer.name] if layer.name in apart else []
    return set(apart) - set(idle[:-1])


def padded(parameter: ParameterNode, place: Coordinate) -> int:
    """Returns the numbers of a parameter, as the tensor axis leaves it, padded to equal rows on all shards."""
    shape, shards = place.shape(parameter), place.sharding.shards
    return largest(shape[0], shards) * shards * prod(shape[1:]) if shape else 0


# ------------------------------------------------------------------------------------------------ the other axes


def over_tensor(place: Coordinate) -> TensorTraffic:
    names = place.whole.with_gradients
    return TensorTraffic(place.job, place.layout, place.sharding, place.model, place.cuts, names)


def _over_tensor(place: Coordinate) -> list[TrafficNode]:
    layout, sharding = place.layout, place.sharding
    axis = over_tensor(place)
    found: list[Exchanged] = []
    for stage, layers in zip(place.mine, place.held, strict=True):
        begins, ends = stage == 0, stage == len(place.stages) - 1
        found += axis.passes(layers, place.workload.share, begins=begins, ends=ends)
    if makes_outputs_ahead(place.job, layout):
        found += [each for each in found if each.what == Payload.ACTIVATIONS]
    sums: dict[tuple[str, Payload, str], tuple[int, int]] = {}
    for each in found:
        _add(sums, each, layout.microbatches)
    often = 1 if sharding.accumulate else layout.microbatches
    for each in axis.complete(place.layers):
        _add(sums, each._replace(bytes=often * each.bytes), often)
    return [
        TrafficNode(operation=operation, axis="tensor", what=what, dtype=dtype, count=count, bytes=size)
        for (operation, what, dtype), (count, size) in sums.items()
    ]


def _add(sums: dict[tuple[str, Payload, str], tuple[int, int]], each: Exchanged, count: int) -> None:
    key = each.operation, each.what, each.dtype
    before = sums.get(key, (0, 0))
    sums[key] = before[0] + count, before[1] + each.bytes


def _over_context(place: Coordinate) -> Iterator[TrafficNode]:
    """Yields the gathers of keys and values of all positions, and the return of their gradients, for a rank's heads."""
    layout = place.layout
    again = set(recomputed(place.job, place.model))  # layers whose forward pass gathers again
    low = low_dtype(place.job)
    size = 2 * DTYPE_BYTES[low] * place.workload.microbatch
    scattered, gathered = list[int](), list[int]()
    own = gathers_by_layer(place.model)
    for layer in place.layers:
        for numbers, _ in own.get(layer.name, ()):
            scattered.append(size // 2 * numbers)
            gathered += [scattered[-1] // layout.sizes["context"]] * (1 + (layer.name in again))
        for part in layer.parts:
            if part.kind == "attention":
                # Separate projections of keys and values may be narrower than the input.
                keys = next((p.gives for p in layer.parts if p.name == f"{part.name}.k_proj"), part.takes)
                scattered.append(size * prod(keys) // layout.sizes["tensor"])
                gathered += [scattered[-1] // layout.sizes["context"]] * (1 + (layer.name in again))
    for operation, what, sizes in (
        ("all_gather", Payload.KEYS_AND_VALUES, gathered),
        ("reduce_scatter", Payload.KEY_VALUE_GRADIENTS, scattered),
    ):
        count = len(sizes) * layout.microbatches
        bytes = sum(sizes) * layout.microbatches
        yield TrafficNode(operation=operation, axis="context", what=what, dtype=low, count=count, bytes=bytes)


def _between_stages(place: Coordinate) -> Iterator[TrafficNode]:
    """Yields the outputs to the next stage and gradients of inputs to the one before, if that is on another rank; and
    those received.
    """
    stages, mine = place.stages, place.mine
    between = messages(place)
    forward = [i for i in mine if i + 1 < len(stages) and i + 1 not in mine]  # by the stage that sends forward
    backward = [i - 1 for i in mine if i > 0 and i - 1 not in mine]
    for operation, what, ends in (
        ("send", Payload.ACTIVATIONS, forward),
        ("receive", Payload.ACTIVATIONS, backward),
        ("send", Payload.ACTIVATION_GRADIENTS, backward),
        ("receive", Payload.ACTIVATION_GRADIENTS, forward),
    ):
        sizes: dict[str, list[int]] = {}
        for fact in (fact for i in ends for fact in between[i]):
            sizes.setdefault(fact.dtype, []).append(message_bytes(fact))
        for dtype, found in sizes.items():
            count, bytes = len(found) * place.layout.microbatches, sum(found) * place.layout.microbatches
            yield TrafficNode(operation=operation, axis="pipeline", what=what, dtype=dtype, count=count, bytes=bytes)


def _shared(place: Coordinate) -> Iterator[TrafficNode]:
    """Yields the exchanges of gradients of weights that another coordinate has too: each receives those of the
    others.
    """
    assert place.schedule is not None
    who = place.whole.holders
    sizes = [
        4 * padded(q, place) // place.sharding.shards
        for layer in place.layers
        for q in layer.parameters
        if q.tied_to is None and q.name in place.whole.with_gradients
        for _ in range(len(who[q.name]) - 1)
    ]
    for operation in ("send", "receive"):
        yield TrafficNode(
            operation=operation,
            axis="pipeline",
            what=Payload.SHARED_GRADIENTS,
            dtype="float32",
            count=len(sizes),
            bytes=sum(sizes),
        )


def messages(staging: Staging) -> tuple[tuple[TensorFact, ...], ...]:
    """Returns the tensors of a micro-batch that a rank of each stage but the last sends on, and receives as gradients:
    its own part, if the context or the tensor axis divides it.
    """
    found = []
    for stage, following in pairwise(staging.stages):
        facts = []
        for fact in boundary_tensors(staging.job, staging.model, stage[-1]):
            shape = staging.cuts.local_input_shape(
                staging.model.layers[following[0]].name, fact.shape, staging.layout.sizes
            )
            facts.append(TensorFact(shape=(staging.workload.microbatch, *shape), dtype=fact.dtype))
        found.append(tuple(facts))
    return tuple(found)


def message_bytes(fact: TensorFact) -> int:
    return prod(fact.shape) * DTYPE_BYTES[fact.dtype]
