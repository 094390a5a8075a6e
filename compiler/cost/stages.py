"""Cuts the model into the stages of a pipeline.

`balanced` finds the cut whose slowest stage is as fast as can be, by dynamic programming over all cuts (exact; time by
FLOPs, forward and backward). Stages are runs of consecutive layers, none empty. Torch cannot run a stage that sends
tokens, or in which nothing trains. Such a stage, or one that does not fit the device, is chosen only if no cut avoids
it.

The account (account.py) decides if a cut fits. If it does not, the search continues among cuts whose stages need less.
A stage needs its state, the activations of the micro-batches that the schedule has in flight there, and other memory.
The account of earlier cuts tells the other memory. If a rank has several stages each may take its share of the device:
the search leaves out cuts in which one stage makes up for another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from dslc.compiler.cost.cost import rank_costs
from dslc.compiler.cost.layer_bytes import kept_bytes
from dslc.compiler.cost.optimizer_bytes import OptimizerBytes
from dslc.compiler.cost.schedule_cost import microbatches_in_flight
from dslc.compiler.model.model import LayerNode, ModelGraph
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.schedules import ScheduleTable
from dslc.compiler.placement.sharding import trained
from dslc.compiler.placement.shares import pieces
from dslc.compiler.placement.staging import Staging, unsendable
from dslc.dsl.bounds import TRIED
from dslc.dsl.diagnostics import Diagnostic, Findings, Note
from dslc.dsl.language.job import JobSpec
from dslc.dsl.remedy import remedy, set_field
from dslc.dsl.words import plural

if TYPE_CHECKING:
    from dslc.compiler.cost.reuse import Reuse

Cut = tuple[range, ...]
Begins = Callable[[int], Sequence[range]]  # maps the layer after a stage's last to the layers it may begin with
Needs = Callable[[int, int, int], float]  # (stage, its first layer, the layer after its last)
SHOWN = 12  # layers that a message names, at most
TRIES = 8  # cuts compared with the account; fewer for a large job


def cut(job: JobSpec, layout: Layout, model: ModelGraph, uncut: Staging | None, reuse: Reuse) -> Findings[Cut | None]:
    """Returns the layers of each stage, in order; None if it yields an error.

    `uncut` is the job with its schedule and no stages yet: without it nothing bounds a stage's memory. The work of the
    search is added to the work of all analyses of the job.
    """
    stages = layout.sizes["pipeline"] * layout.virtual_stages
    layers = len(model.layers)
    requested = job.parallelism.stages
    if stages > layers:
        yield Diagnostic(
            "E0410",
            f"{plural(layers, 'layer')} cannot fill {plural(stages, 'stage')}",
            job.parallelism.value_span("pipeline"),
            label=f"{layout.sizes['pipeline']} ranks x {layout.virtual_stages} stages"
            if layout.virtual_stages > 1
            else "",
            help="fewer stages, or a deeper network",
        )
        return None
    if not isinstance(requested, tuple):
        return (range(layers),) if stages == 1 else _balanced(job, layout, model, stages, uncut, reuse)
    if len(requested) != stages or sum(requested) != layers:
        likely = _balanced(job, layout, model, stages, uncut, reuse)
        yield Diagnostic(
            "E0411",
            f"`parallelism.stages` names {plural(len(requested), 'stage')} with {plural(sum(requested), 'layer')} in "
            f"all, and the job has {plural(stages, 'stage')} and {plural(layers, 'layer')}",
            job.parallelism.value_span("stages"),
            notes=(Note(_layer_list(model), job.model.value_span("network")),),
            help=remedy(
                "one count for each stage, as in ",
                set_field("parallelism.stages", [len(stage) for stage in likely]),
                ", or ",
                set_field("parallelism.stages", "balanced", "`balanced`"),
            ),
        )
        return None
    starts = [sum(requested[:i]) for i in range(stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, requested, strict=True))


def _layer_list(model: ModelGraph) -> str:
    """Names the layers; of many the first ones and the last."""
    names = [f"`{layer.name}`" if layer.name else "what belongs to no layer" for layer in model.layers]
    if len(names) > SHOWN:
        names = [*names[: SHOWN - 2], "…", names[-1]]
    return f"the layers are {', '.join(names)}"


def equal_counts(layers: int, stages: int) -> Cut:
    """Returns a cut with equal counts of layers, or one more in the first stages: the baseline for a balanced cut."""
    return tuple(range(start, end) for start, end in pieces(layers, stages))


def work(layer: LayerNode) -> int:
    """Returns a layer's FLOPs, the measure of its time."""
    return layer.forward_flops + layer.backward_flops


# -------------------------------------------------------------------------------------------------------- balanced


def _balanced(job: JobSpec, layout: Layout, model: ModelGraph, stages: int, uncut: Staging | None, reuse: Reuse) -> Cut:
    costs = tuple(work(layer) for layer in model.layers)
    ranges = _runs(job, model)
    fastest = _fastest(costs, stages, ranges)
    limit = job.memory.limit or layout.hardware.memory
    if limit is None or uncut is None or uncut.schedule is None:
        return fastest
    needs, schedule = _needs(uncut, uncut.schedule), uncut.schedule
    candidate: Cut | None = fastest
    excess: list[float] | None = None  # memory of each stage in the account besides its needs
    work_of_a_try = layout.work(len(costs))
    for _ in range(max(1, min(TRIES, TRIED.most // 4 // work_of_a_try))):
        if candidate is None:
            break
        reuse.spent += work_of_a_try // 4
        staging = replace(uncut, stages=candidate)
        costs_of_cut = rank_costs(staging)
        reuse.keep_costs(staging, costs_of_cut)
        peaks = [cost.memory.peak for cost in costs_of_cut]
        if max(peaks) <= limit:
            return candidate
        predicted = [0.0] * schedule.ranks
        for stage, rank in enumerate(schedule.placement):
            predicted[rank] += needs(stage, candidate[stage].start, candidate[stage].stop)
        more = [(peaks[rank] - predicted[rank]) / schedule.virtual_stages for rank in schedule.placement]
        excess = more if excess is None else [*map(max, more, excess)]
        candidate = balance(costs, stages, _within(limit / schedule.virtual_stages, ranges, needs, excess))
    return fastest


@lru_cache(maxsize=256)
def _fastest(costs: tuple[int, ...], stages: int, ranges: tuple[range, ...]) -> Cut:
    """Returns the cut whose slowest stage is the fastest, whatever its memory."""
    fastest = balance(costs, stages, lambda stage: ranges) or balance(costs, stages)
    assert fastest is not None, "there are as many layers as stages"
    return fastest


def _within(limit: float, runs: Sequence[range], needs: Needs, excess: Sequence[float]) -> Begins:
    """Restricts runs to those whose needs, and the memory besides, are within the limit."""

    def begins(stage: int) -> list[range]:
        ranges, start = [], 0
        for end, these in enumerate(runs):
            while start < end and needs(stage, start, end) + excess[stage] > limit:
                start += 1  # a later end has no earlier beginning
            ranges.append(range(max(start, these.start), these.stop))
        return ranges

    return begins


def _runs(job: JobSpec, model: ModelGraph) -> tuple[range, ...]:
    """Returns the runs that have something to train, and end with a tensor that can be sent: for each layer after a
    run, where the run may begin.
    """
    names = trained(job, model)
    ranges, count = [range(0)], len(model.layers)
    latest = -1  # the last layer so far that trains
    for n, layer in enumerate(model.layers):
        if any(q.first_name in names for q in layer.parameters):
            latest = n
        ranges.append(range(0 if n + 1 < count and unsendable(model, n) else latest + 1))
    return tuple(ranges)


def _needs(staging: Staging, schedule: ScheduleTable) -> Needs:
    """Returns a stage's memory that grows with its layers: its state, and the activations of its micro-batches in
    flight.
    """
    job, model, shards = staging.job, staging.model, staging.sharding.shards
    state = OptimizerBytes(job, staging.optimizer, model).of_a_number() / shards + 8  # with parameter and gradient
    samples = staging.workload.microbatch / staging.layout.sizes["context"]
    parameters = [sum(q.count for q in layer.parameters) for layer in model.of_a_rank]
    sizes = [samples * size for size in kept_bytes(job, model, model.of_a_rank)]
    states = [0.0, *itertools.accumulate(state * count for count in parameters)]
    keeps = [0.0, *itertools.accumulate(sizes)]
    flight = microbatches_in_flight(schedule)
    return lambda stage, a, b: states[b] - states[a] + flight[stage] * (keeps[b] - keeps[a])


def balance(costs: Sequence[float], stages: int, begins: Begins | None = None) -> Cut | None:
    """Cuts `costs` into `stages` runs, none empty and each beginning at an allowed layer, so that the largest sum is
    least; ties go to the earlier cut. Returns None if there is no such cut.

    The slowest of k stages is the last of them if that begins early, and one before it if it begins late. The search
    for its beginning goes to both sides from the place where the two meet, until nothing better can follow.
    """
    total = [0.0, *itertools.accumulate(float(cost) for cost in costs)]
    count, never = len(costs), float("inf")
    best = [0.0] + [never] * count  # best[i]: the least largest sum of the first i layers in k stages
    cuts: list[list[int]] = []
    for k in range(1, stages + 1):
        may = begins(k - 1) if begins else [range(count)] * (count + 1)
        bound = [*itertools.accumulate(reversed(best), min)][::-1]  # minimum over that layer and all after it
        first_begin = next((i for i, least in enumerate(best) if least < never), count)
        row, begin_of = [never] * (count + 1), [0] * (count + 1)
        meet = first_begin
        for i in range(max(k, first_begin + 1), count - (stages - k) + 1):
            while meet < i - 1 and bound[meet] < total[i] - total[meet]:
                meet += 1
            low, high = max(first_begin, may[i].start), min(i, may[i].stop)
            best_begin = (never, False, 0)
            for side in (range(max(low, meet), high), range(min(high, meet) - 1, low - 1, -1)):
                for j in side:
                    last_cost = total[i] - total[j]
                    if (max(bound[j], last_cost), False, j) > best_begin:
                        break
                    slowest = max(best[j], last_cost)
                    if slowest < never:
                        best_begin = min(best_begin, (slowest, last_cost == slowest, j if last_cost < slowest else -j))
            if best_begin[0] < never:
                row[i], begin_of[i] = best_begin[0], abs(best_begin[2])
        best = row
        cuts.append(begin_of)
    if best[count] == never:
        return None
    ends = [count]
    for begin_of in reversed(cuts):
        ends.append(begin_of[ends[-1]])
    return tuple(range(a, b) for a, b in itertools.pairwise(reversed(ends)))
