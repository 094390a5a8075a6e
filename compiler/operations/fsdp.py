"""The operations of `fully_shard`, which gathers a unit before it runs and scatters its gradients after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.records import Weights
from dslc.compiler.ir.tensors import DTYPE_BYTES
from dslc.compiler.operations import moments as m
from dslc.compiler.operations.buckets import buffer_buckets
from dslc.compiler.operations.coordinate import Coordinate
from dslc.compiler.operations.exchange_rules import RULES
from dslc.compiler.operations.moments import Moment, RankGroup, StepOperation, operation
from dslc.compiler.placement.losses import has_forward_ahead
from dslc.compiler.placement.lowering import Issue, row_of, row_without_pipeline
from dslc.compiler.placement.sharding import Sharding, Unit, searches, with_copies


def fsdp(place: Coordinate, weights: Mapping[str, Weights]) -> Iterator[StepOperation]:
    """Yields the gathers, the sums of gradients over shards and replicas, and what a step searches and moves."""
    sharding, data = place.sharding, place.along("data")
    experts = {name: each for name, each in weights.items() if each.experts > 1}
    others = {name: each for name, each in weights.items() if name not in experts}
    yield from _of_copies(place, others, place.shards, place.replicas)
    if experts:
        yield from _of_copies(place, experts, place.expert_shards, place.expert_replicas)
    if place.model.moves_buffers and data.ranks > 1:
        for kind, sizes in buffer_buckets(place.layers, limit=1).items():
            yield operation("broadcast", Payload.BUFFERS, place.owners, m.BEFORE_PASSES, sizes, dtype=kind)
    if searches(place.model, sharding) and data.ranks > 1:
        used = [4 * len(place.whole.trained)]
        yield operation("all_reduce", Payload.USED_PARAMETERS, data, m.BEFORE_UPDATE, used, dtype="int32")


def _of_copies(
    place: Coordinate, weights: Mapping[str, Weights], shards: RankGroup, replicas: RankGroup
) -> Iterator[StepOperation]:
    """Yields the gathers of these weights, and the sums of their gradients."""
    if shards.ranks > 1:
        yield from _scales(place, weights, shards)
        yield from _gathers(place, weights, shards)
        times = 1 if place.sharding.accumulate else place.layout.microbatches
        yield from _sums(place, weights, "reduce_scatter", Payload.SCALE, shards, place.complete, times)
    if replicas.ranks > 1:
        moment = m.REDUCE_GRADIENTS if place.schedule else m.LAST_WEIGHT_GRADIENTS
        parts = shards.ranks
        yield from _sums(place, weights, "all_reduce", Payload.SCALE_OF_SUMS, replicas, moment, 1, parts)


def _sums(
    place: Coordinate,
    weights: Mapping[str, Weights],
    kind: str,
    scale: Payload,
    group: RankGroup,
    moment: Moment,
    times: int,
    parts: int = 1,
) -> Iterator[StepOperation]:
    """Yields each stage's sums of gradients, of which a rank has one of `parts`, after those of their scale in fp16."""
    dtype = summed_in(place.sharding)
    trained = {
        stage: {name: w.trained for name, w in weights.items() if w.stage == stage and w.trained}
        for stage in place.mine
    }
    if dtype == "float16":
        for stage, own in trained.items():
            yield operation("all_reduce", scale, group, moment, [4] * len(own), times=times, stage=stage, weights=own)
    for stage, own in trained.items():
        sizes = [DTYPE_BYTES[dtype] * numbers // parts for numbers in own.values()]
        yield operation(
            kind, Payload.GRADIENTS, group, moment, sizes, dtype=dtype, times=times, stage=stage, weights=own
        )


def summed_in(sharding: Sharding) -> str:
    """Returns the dtype in which `fully_shard` sums gradients."""
    return (sharding.exchange is not None and RULES[sharding.exchange.kind].sums_in) or "float32"


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
        yield (
            stage,
            [part for unit in (*apart, Unit(name="", parameters=tuple(rest))) for part in _by_mesh(place, unit)],
        )


def _by_mesh(place: Coordinate, unit: Unit) -> list[Unit]:
    """Returns the parts of a unit that are gathered one by one: over an expert axis its experts, and the rest."""
    experts = tuple(q for q in unit.parameters if q.experts and place.sharding.experts > 1)
    if not experts:
        return [unit]
    others = tuple(q for q in unit.parameters if q not in experts)
    return [Unit(name=unit.name, parameters=others), Unit(name=unit.name, parameters=experts)]


def is_of_experts(place: Coordinate, unit: Unit) -> bool:
    """True of the experts of a unit, which an expert axis shares."""
    return place.sharding.experts > 1 and bool(unit.parameters) and all(q.experts for q in unit.parameters)


def _scales(place: Coordinate, weights: Mapping[str, Weights], shards: RankGroup) -> Iterator[StepOperation]:
    """Yields the all-reduce of the largest numbers of the weights of each stage that are gathered in 8 bits."""
    for stage in place.mine:
        own = {name: entry.scales for name, entry in weights.items() if entry.stage == stage and entry.scales}
        if own:
            size = 4 * sum(own.values())
            yield operation(
                "all_reduce", Payload.WEIGHT_SCALES, shards, m.BEFORE_GATHERS, [size], stage=stage, weights=own
            )


def _gathers(place: Coordinate, weights: Mapping[str, Weights], shards: RankGroup) -> Iterator[StepOperation]:
    """Yields a gather of these weights wherever a stage is unsharded, or a pass uses parameters that are not there."""
    if place.schedule is not None:
        row: Sequence[Issue] = [part for entry in row_of(place.schedule, place.pipeline) for part in entry.parts]
    else:
        ahead = has_forward_ahead(place.job, place.layout)
        row = list(row_without_pipeline(place.layout.microbatches, place.sharding.reshard, outputs_early=ahead))
    for stage, units in units_by_stage(place):
        stage_weights = {name: entry for name, entry in weights.items() if entry.stage == stage}
        if not stage_weights:  # a stage without experts
            continue
        repeated = _gathered_again(place, stage, units) if place.sharding.reshard else set()
        has_experts = all(entry.experts > 1 for entry in stage_weights.values())
        own = [unit for unit in units if unit.parameters and is_of_experts(place, unit) == has_experts]
        apart = [unit.name in repeated for unit in own]
        regathered_names = frozenset(
            name for name, is_repeated in zip(stage_weights, apart, strict=True) if is_repeated
        )
        for (moment, missing), occurrences in _gathers_by_row(row, stage, stage_weights, regathered_names).items():
            names = [name for name in stage_weights if name in missing]
            for dtype in dict.fromkeys(stage_weights[name].dtype for name in names):
                same_dtype_names = [name for name in names if stage_weights[name].dtype == dtype]
                yield operation(
                    "all_gather",
                    Payload.PARAMETERS,
                    shards,
                    moment,
                    [stage_weights[name].sent_bytes for name in same_dtype_names],
                    dtype=dtype or "",
                    times=len(occurrences),
                    stage=stage,
                    occurrences=tuple(occurrences),
                    weights=same_dtype_names,
                )


def _gathers_by_row(
    row: Sequence[Issue], stage: int, weights: Mapping[str, Weights], regathered_names: frozenset[str]
) -> dict[tuple[Moment, frozenset[str]], list[int]]:
    """Returns the weights that are gathered together, each with the actions of the stage that gather them.

    All are gathered ahead of the first action of the stage. A forward pass frees some, which the backward pass gathers
    again; a backward pass frees none.
    """
    everything = frozenset(weights)
    freed = frozenset(name for name, entry in weights.items() if entry.freed)
    present = frozenset[str]()
    seen: Counter[Moment] = Counter()
    gathers: dict[tuple[Moment, frozenset[str]], list[int]] = {}
    for issue in row:
        if issue.stage != stage or issue.kind == "REDUCE_GRAD":
            continue
        if issue.kind == "RESHARD":
            present = frozenset()
            continue
        moment = m.UNSHARD if issue.kind == "UNSHARD" else m.BEFORE_USE
        wanted = everything if issue.kind in ("UNSHARD", "E", "F") else regathered_names
        if missing := wanted - present:
            gathers.setdefault((moment, missing), []).append(seen[moment])
        seen[moment] += 1
        present |= wanted
        if issue.kind in ("E", "F"):
            present -= freed
    return gathers


def _gathered_again(place: Coordinate, stage: int, units_: Sequence[Unit]) -> set[str]:
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
