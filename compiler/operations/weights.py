"""The parameters of a rank in groups: a group's parameters are gathered together, and their gradients summed together.

Model: a group is a unit of `fully_shard`, a bucket of DistributedDataParallel or of an exchange, or all parameters of a
stage. The last holds if no other rank has a copy or a share of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod

from dslc.compiler.ir.nodes import ParameterNode
from dslc.compiler.ir.records import SharedWeight, Weights
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.compiler.operations.buckets import buckets, in_buckets
from dslc.compiler.operations.coordinate import Coordinate
from dslc.compiler.operations.exchange_rules import RULES, factors_of
from dslc.compiler.operations.fsdp import is_of_experts, units_by_stage
from dslc.compiler.placement.buckets import in_buckets as in_order
from dslc.compiler.placement.buckets import names_in_backward_order
from dslc.compiler.placement.sharding import low_copy, low_dtype, with_copies
from dslc.compiler.placement.staging import Staging


def weight_groups(place: Coordinate) -> dict[str, Weights]:
    """Returns the groups of a rank at a pipeline coordinate, by stage, in the order of the model, by their names."""
    count: Counter[int] = Counter()
    groups: dict[str, Weights] = {}
    for each in _groups(place):
        groups[f"weights {each.stage}.{count[each.stage]}"] = each
        count[each.stage] += 1
    return groups


def shared_name(parameter: str) -> str:
    """Returns the name of a weight that several stages have."""
    return f"shared {parameter}"


def _groups(place: Coordinate) -> Iterator[Weights]:
    if place.sharding.engine == "fsdp":
        yield from _units(place)
    elif place.sharding.engine == "none":
        for stage, layers in zip(place.mine, place.held, strict=True):
            pieces = any(_partial(place, q.name) for layer in layers for q in layer.parameters)
            quantized = quantized_bytes(place, (q for layer in layers for q in layer.parameters))
            yield Weights(stage=stage, numbers=numbers(place, stage), shards=1, pieces=pieces, quantized=quantized)
    else:
        held = _exchanged(place) if place.sharding.engine == "local" else _by_bucket(place)
        rest = numbers(place, 0)
        for bucket in held:
            size, factors = sum(q.count for q in bucket), factors_of(bucket, place.sharding.exchange)
            rest -= size
            yield Weights(stage=0, numbers=size, shards=1, trained=size, factors=factors)
        if rest:
            quantized = quantized_bytes(place, (q for layer in place.layers for q in layer.parameters))
            yield Weights(stage=0, numbers=rest, shards=1, trained=0, quantized=quantized)


def _by_bucket(place: Coordinate) -> list[list[ParameterNode]]:
    """Returns the parameters of each bucket of gradients: DistributedDataParallel's, or an exchange's own buckets."""
    order = in_buckets(place)
    if place.sharding.exchange is not None and RULES[place.sharding.exchange.kind].fixed_buckets:
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


def _exchanged(place: Coordinate) -> list[list[ParameterNode]]:
    """Returns the parameters whose momenta or weights are exchanged, by name, in buckets."""
    own = {q.name: q for layer in place.layers for q in layer.parameters if q.name in place.whole.with_gradients}
    order = [own[name] for name in sorted(own)]
    return [order[bucket.start : bucket.stop] for bucket in in_order(q.count for q in order)]


def numbers(place: Coordinate, stage: int) -> int:
    layers = with_copies(list(place.held[place.mine.index(stage)]))
    own = [q for layer in layers for q in layer.parameters if q.tied_to is None]
    return sum(place.padded(q) if place.sharding.engine == "fsdp" else prod(place.shape(q)) for q in own)


def quantized_bytes(place: Coordinate, parameters: Iterable[ParameterNode]) -> int:
    """Returns the bytes of the frozen weights in 4 or 8 bits, padded to equal shares."""
    padded = place.sharding.engine == "fsdp"
    return sum(place.padded(q) if padded else q.count for q in parameters if q.quantized)


def _units(place: Coordinate) -> Iterator[Weights]:
    sharding, names = place.sharding, place.whole.with_gradients
    for stage, units in units_by_stage(place):
        for unit in units:
            experts = sharding.experts if is_of_experts(place, unit) else 1
            shards = sharding.expert_shards if experts > 1 else sharding.shards
            holders = sharding.shards * sharding.replicas // experts
            apart = shards > 1
            whole = sum(place.padded(q) for q in unit.parameters)
            if not whole:
                continue
            trained = sum(place.padded(q) for q in unit.parameters if q.name in names)
            quantized = quantized_bytes(place, unit.parameters)
            float8 = [place.padded(q) for q in unit.parameters if apart and q.name in place.float8_weights]
            dtype: str = low_dtype(place.job) if low_copy(place.job) else "float32"
            if quantized:  # `fully_shard` gathers tensors of several dtypes as bytes
                dtype = "int8" if quantized == whole else "uint8"
            if float8:
                dtype = "uint8"
            yield Weights(
                stage=stage,
                numbers=whole,
                shards=shards,
                dtype=dtype if apart else None,
                freed=apart and sharding.reshard and bool(unit.name),
                trained=trained if holders > 1 else None,
                experts=experts,
                pieces=any(_partial(place, q.name) for q in unit.parameters),
                quantized=quantized,
                float8=sum(float8),
                scales=len(float8),
            )


def _partial(place: Coordinate, name: str) -> bool:
    """True of a parameter whose gradient is a partial sum on each rank of the tensor axis."""
    styles = place.cuts.by_module.get(name.rpartition(".")[0], ())
    return TensorStyle.SEQUENCE in styles and name in place.whole.with_gradients


def shared_weights(places: list[Coordinate], staging: Staging) -> Iterator[tuple[str, SharedWeight]]:
    """Yields the tied weights that several stages have, by name."""
    stages_of: dict[str, list[int]] = {}
    for stage, layers in enumerate(staging.stages):
        names = {q.first_name for n in layers for q in staging.model.layers[n].parameters}
        for name in names:
            stages_of.setdefault(name, []).append(stage)
    own = {q.name: (q, place) for place in places for layer in place.layers for q in layer.parameters}
    for name, stages in sorted(stages_of.items()):
        if len(stages) > 1:
            parameter, place = own[name]
            share = place.padded(parameter) // place.sharding.shards
            several = len({staging.placement[stage] for stage in stages}) > 1
            summed = several and name in staging.with_gradients
            yield shared_name(name), SharedWeight(numbers=share, stages=tuple(stages), summed=summed)
