"""Step time, its parts, and the fraction of the devices' peak that it uses.

Model: the critical path through a step, at the times that `dslc calibrate` measured (measured_times.py), at those of
published runs, or else at the speeds of the catalogue.

- A transformer in 16 bits on GPUs, if it was not measured, takes the times of a fit to published runs
  (published_times.py).
- Other arithmetic takes its FLOPs over the peak rate of the device times its `efficiency`, the share of the peak that
  products reach. That is 1 unless a catalogue says otherwise, so that the result is a bound: no device reaches its
  peak.
- Transfers within a layer (tensor and context axes) are in line: nothing can be done meanwhile.
- Stages: the schedule is played through with each stage's own times, and messages take their time on the way
  (`schedule_cost.timeline`). The ranks' idle time is the bubble. Where processes take turns on a core, a waiting rank
  leaves it to others: these are faster then, until the cores have all the work that they can do.
- Gradients and parameters over the data axis overlap with arithmetic: with the whole step's if they go with each
  micro-batch, else with one micro-batch's. The step waits for the excess. So does an exchange of weights that begins
  before the passes; any other of weights or momenta is waited for. One that takes place every few steps costs each its
  share, and one by the clock none. Measured, arithmetic hides only the share `overlap` of what goes on beside it.
- A pass of a stage takes no less than the host needs to start its kernels, if that is known.
- Without measured times, constants that were fitted to trainings on the machine (fitted_times.py).
- The update, the making of samples and what else a step took, if they are known.

A collective that was not measured, of S bytes over n ranks, moves in rings (Thakur et al. 2005) S (n - 1) / n of them
over each rank's link, and twice that for an all-reduce; all-to-all sends as many. If its ranks are on several nodes,
the ranks of one node share the traffic from others: with k of them on a node, k network ports carry it. Over gloo, a
ring of all ranks, they share what one of them sends on. The slower of
both ways counts.

Limits: links do not contend. At the catalogue's speeds the result is a lower bound: it leaves out the memory's
bandwidth (norms, activations, the optimizer's update), latencies and kernel launches. None if the catalogue lacks a
figure, as it does for CPUs without the user's own catalogue (`missing_figures`).
"""

from __future__ import annotations

from dataclasses import replace
from math import fsum
from typing import Protocol

from dslc.compiler.cost.cost import RankCost
from dslc.compiler.cost.fitted_times import FittedTimes, uncovered
from dslc.compiler.cost.measured_times import CUTTING, MeasuredTimes
from dslc.compiler.cost.published_times import PublishedTimes, is_covered
from dslc.compiler.cost.schedule_cost import timeline
from dslc.compiler.facts.calibration import RunFit
from dslc.compiler.facts.hardware import PublishedFit, nearest_fit
from dslc.compiler.ir.actions import ROUTED, Payload, TrafficNode
from dslc.compiler.ir.nodes import LayerNode
from dslc.compiler.ir.records import StageTime, StepEnd, TimeSource
from dslc.compiler.model.float8 import float8_flops
from dslc.compiler.operations.exchange_rules import RULES
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.losses import has_forward_ahead
from dslc.compiler.placement.sharding import recomputed
from dslc.compiler.placement.staging import Staging
from dslc.dsl.language.calls import Fp8
from dslc.dsl.language.job import JobSpec
from dslc.dsl.record import Record, record
from dslc.dsl.sums import float_sum


@record
class StepEstimate(Record):
    """Seconds of the slowest rank; `mfu` is the model's FLOPs over what all devices could do at their peak.

    `step_time` is the sum of its parts: `arithmetic`; `transfers` within layers; `waiting` for other ranks; `exposed`,
    the traffic of gradients and parameters that nothing hides; the `update`; the making of `samples`; and the `rest`.
    `launches` comes in addition where the host takes longer to start kernels than these.
    `lacks` says what was not measured, where a calibration does not serve; `fit` is the kind of GPU of the published
    runs. `bubble`, `stages`, `message` and `ends` are as in the plan's record.
    """

    step_time: float | None
    mfu: float | None
    source: TimeSource = "bound"
    arithmetic: float = 0.0
    transfers: float = 0.0
    waiting: float = 0.0
    exposed: float = 0.0
    update: float = 0.0
    samples: float = 0.0
    rest: float = 0.0
    launches: float = 0.0
    links: tuple[tuple[str, int], ...] = ()  # bytes of a rank by link (`link`, `network`), the busiest rank's
    lacks: str = ""
    bubble: float = 0.0
    stages: tuple[StageTime, ...] = ()
    message: float = 0.0
    ends: tuple[StepEnd, ...] = ()
    fit: str = ""


class _Times(Protocol):
    """Seconds of the parts of a step."""

    @property
    def overlap(self) -> float:
        """The share of what goes on beside arithmetic that it hides."""

    def layer(self, layer: LayerNode, samples: float) -> tuple[float, float]:
        """Returns the seconds of a layer's passes over `samples`, forward and backward."""

    def loss(self, samples: float) -> tuple[float, float]: ...

    def launches(self, layer: LayerNode) -> tuple[float, float]:
        """Returns the seconds in which the host starts a layer's kernels, forward and backward; 0: unknown."""

    def collective(self, traffic: TrafficNode) -> float:
        """Returns the seconds of a step, in the mean over later steps."""

    def update(self, pipeline: int) -> float: ...

    def data(self, samples: float) -> float: ...

    @property
    def crowd(self) -> float:
        """The processes that take turns on a core, while each was measured."""

    @property
    def rest(self) -> float:
        """The seconds of a step that none of its parts accounts for."""


def estimate(staging: Staging, costs: tuple[RankCost, ...]) -> StepEstimate:
    """Returns the estimate of a step; `costs` are by pipeline coordinate."""
    layout, precision = staging.layout, staging.job.train.precision.word
    lack = ""
    if layout.hardware.calibration is not None:
        times = MeasuredTimes(staging, layout.hardware.calibration)
        lack = times.lacks(costs)
        if not lack:
            return _estimate(staging, costs, times, "measured")
    if layout.hardware.fit is not None:
        gap = uncovered(staging)
        if not gap:
            return _estimate(staging, costs, FittedTimes(staging, layout.hardware.fit), "fitted", lack)
        lack = lack or f"times of {gap}"
    if missing_figures(layout, precision):
        return StepEstimate(step_time=None, mfu=None, lacks=lack)
    if layout.hardware.efficiency != 1:
        return _estimate(staging, costs, _CatalogueTimes(staging), "estimated", lack)
    fit = nearest_fit(layout.hardware)
    if fit is not None and is_covered(staging, fit):
        return replace(published_estimate(staging, costs, fit), lacks=lack)
    return _estimate(staging, costs, _CatalogueTimes(staging), "bound", lack)


def published_estimate(staging: Staging, costs: tuple[RankCost, ...], fit: PublishedFit) -> StepEstimate:
    """Returns the estimate of a step by a fit that covers it."""
    times = PublishedTimes(staging, fit, _Links(staging))
    return replace(_estimate(staging, costs, times, "published"), fit=fit.kind)


def _estimate(
    staging: Staging, costs: tuple[RankCost, ...], times: _Times, source: TimeSource, lack: str = ""
) -> StepEstimate:
    job, layout, schedule, placement = staging.job, staging.layout, staging.schedule, staging.placement
    inside = [
        float_sum(times.collective(of_busiest_rank(t, job)) for t in cost.traffic if t.axis in CUTTING)
        for cost in costs
    ]
    forward, backward = _stage_times(staging, times)
    microbatches = layout.microbatches
    arithmetic = [0.0] * len(costs)
    for stage, rank in enumerate(placement):
        arithmetic[rank] += (forward[stage] + backward[stage]) * microbatches
    # Transfers within layers are divided over the stages of a rank, and forward and backward, by their arithmetic.
    slower = [1 + inside[rank] / arithmetic[rank] if arithmetic[rank] else 1.0 for rank in placement]
    forward = [seconds * factor for seconds, factor in zip(forward, slower, strict=True)]
    backward = [seconds * factor for seconds, factor in zip(backward, slower, strict=True)]
    forward, backward, launches = _with_launches(staging, times, forward, backward)
    message = max(_message(times, cost) for cost in costs)
    if schedule:
        played = timeline(schedule, forward, backward, send=message)
        if times.crowd > 1 and played.total:
            # A rank that waits leaves its core to others, which are then faster than they were measured.
            faster = max(1 / times.crowd, fsum(arithmetic) / len(arithmetic) / played.total)
            forward, backward, arithmetic = (
                [faster * seconds for seconds in part] for part in (forward, backward, arithmetic)
            )
            played = timeline(schedule, forward, backward, send=message)
        passes, bubble = played.total, played.bubble
    else:
        passes, bubble = microbatches * (float_sum(forward) + float_sum(backward)), 0.0
    ends = [
        StepEnd(exposed=_exposed(staging, times, cost, arithmetic[p]), update=times.update(p))
        for p, cost in enumerate(costs)
    ]
    last_rank = max(range(len(costs)), key=lambda p: (ends[p].exposed + ends[p].update, arithmetic[p] + inside[p]))
    samples = times.data(staging.workload.expected_share)
    step_time = passes + ends[last_rank].exposed + ends[last_rank].update + samples + times.rest
    busiest = max(range(len(costs)), key=lambda p: arithmetic[p] + inside[p])
    flops = staging.workload.batch * sum(layer.forward_flops + layer.backward_flops for layer in staging.model.layers)
    peak = layout.hardware.flops(peak_precision(job))
    return StepEstimate(
        step_time=step_time,
        mfu=flops / (step_time * peak * layout.world_size) if step_time and peak is not None else None,
        source=source,
        arithmetic=arithmetic[busiest],
        transfers=inside[busiest],
        waiting=passes - arithmetic[busiest] - inside[busiest] - launches[busiest],
        exposed=ends[last_rank].exposed,
        update=ends[last_rank].update,
        samples=samples,
        rest=times.rest,
        launches=launches[busiest],
        links=_Links(staging).bytes_by_link(costs),
        lacks=lack,
        bubble=bubble,
        stages=tuple(StageTime(forward=f, backward=b) for f, b in zip(forward, backward, strict=True)),
        message=message,
        ends=tuple(ends),
    )


def of_busiest_rank(traffic: TrafficNode, job: JobSpec) -> TrafficNode:
    """Returns exchanges with the bytes that arrive at or leave the busiest rank of an expert axis, at a stated skew."""
    skew = job.parallelism.expert_skew
    return replace(traffic, bytes=round(skew * traffic.bytes)) if skew and traffic.what in ROUTED else traffic


def fitted_step(staging: Staging, costs: tuple[RankCost, ...], fit: RunFit) -> float:
    """Returns the seconds of a step by a fit that covers it."""
    seconds = _estimate(staging, costs, FittedTimes(staging, fit), "fitted").step_time
    assert seconds is not None
    return seconds


def peak_precision(job: JobSpec) -> str:
    """Returns the precision of the fastest products of a job: emulated ones are in float32."""
    precision = job.train.precision
    return "fp32" if isinstance(precision, Fp8) and precision.emulate else precision.word


def low_word(job: JobSpec) -> str:
    """Returns the precision of all products but those in 8 bits."""
    return "bf16" if isinstance(job.train.precision, Fp8) else job.train.precision.word


def missing_figures(layout: Layout, precision: str) -> tuple[str, ...]:
    """Names the catalogue's missing figures for an estimate."""
    hardware = layout.hardware
    needed = {
        "fp32": hardware.flops(precision) is None,
        "link": hardware.link is None and layout.processes > 1,
        "network": hardware.network is None and layout.nodes > 1,
    }
    return tuple(figure for figure, lacks in needed.items() if lacks)


def _stage_times(staging: Staging, times: _Times) -> tuple[list[float], list[float]]:
    """Returns seconds of each stage on one micro-batch, forward, and backward with recomputation."""
    job, layout, model = staging.job, staging.layout, staging.model
    blocks = set(recomputed(job, model)) if job.memory.recompute != "selective" else set()
    if staging.chunked_head is not None:
        blocks.add(staging.chunked_head.module)
    samples = staging.workload.expected_share / layout.microbatches
    often = 2 if has_forward_ahead(job, layout) else 1
    forward, backward = [], []
    for stage in staging.stages:
        layers = [model.of_a_rank[n] for n in stage]
        passes = [times.layer(layer, samples) for layer in layers]
        recomputation = float_sum(
            forward_time for layer, (forward_time, _) in zip(layers, passes, strict=True) if layer.name in blocks
        )
        forward.append(often * float_sum(forward_time for forward_time, _ in passes))
        backward.append(float_sum(back for _, back in passes) + recomputation)
    loss_forward, back = times.loss(samples)
    return [*forward[:-1], forward[-1] + loss_forward], [*backward[:-1], backward[-1] + back]


def _with_launches(
    staging: Staging, times: _Times, forward: list[float], backward: list[float]
) -> tuple[list[float], list[float], list[float]]:
    """Returns seconds of each stage on one micro-batch with the host's work, and the seconds of a step that this adds
    to each rank.
    """
    layers = staging.model.of_a_rank
    blocks = set(recomputed(staging.job, staging.model))
    if staging.chunked_head is not None:
        blocks.add(staging.chunked_head.module)
    added = [0.0] * staging.layout.sizes["pipeline"]
    passes: tuple[list[float], list[float]] = [], []
    for stage, rank, forward_time, back in zip(staging.stages, staging.placement, forward, backward, strict=True):
        starts = [times.launches(layers[n]) for n in stage]
        recomputation = float_sum(
            start for n, (start, _) in zip(stage, starts, strict=True) if layers[n].name in blocks
        )
        both = (
            slower_of(forward_time, float_sum(f for f, _ in starts)),
            slower_of(back, float_sum(b for _, b in starts) + recomputation),
        )
        passes[0].append(both[0])
        passes[1].append(both[1])
        added[rank] += ((both[0] - forward_time) + (both[1] - back)) * staging.layout.microbatches
    return *passes, added


def slower_of(device: float, host: float) -> float:
    """Returns the seconds of a pass from the device's and the host's, which work beside each other.

    It is the slower of both, and up to a fifth more where they are alike: then each waits for the other at times.
    """
    return (device**4 + host**4) ** 0.25 if host else device


def _message(times: _Times, cost: RankCost) -> float:
    """Returns the seconds of one message between stages."""
    messages = [times.collective(t) / t.count for t in cost.traffic if t.operation == "send" and t.axis == "pipeline"]
    return max(messages, default=0.0)


def _exposed(staging: Staging, times: _Times, cost: RankCost, arithmetic: float) -> float:
    """Returns the seconds of the data axis that no arithmetic hides."""
    microbatches, exchange = staging.layout.microbatches, staging.sharding.exchange
    beside_all = once = unhidden = 0.0
    is_early = exchange is not None and exchange.ahead
    for traffic in (t for t in cost.traffic if t.axis in ("data", "all") or t.what == Payload.SHARED_GRADIENTS):
        seconds = times.collective(traffic)
        gathered = traffic.operation == "all_gather" and staging.sharding.reshard
        scattered = traffic.operation == "reduce_scatter" and not staging.sharding.accumulate
        if traffic.what is Payload.WEIGHTS and is_early:
            beside_all += seconds
        elif traffic.what not in (Payload.GRADIENTS, Payload.PARAMETERS) or traffic.operation == "broadcast":
            unhidden += seconds
        elif gathered or scattered:
            beside_all += seconds
        else:
            once += seconds
    once += _uncovered(beside_all, arithmetic * (microbatches - 1) / microbatches, times.overlap)
    return unhidden + _uncovered(once, arithmetic / microbatches, times.overlap)


def _uncovered(traffic: float, arithmetic: float, overlap: float) -> float:
    """Returns the seconds of traffic that arithmetic beside it does not hide."""
    return traffic - overlap * min(traffic, arithmetic)


class _CatalogueTimes:
    """Times at the catalogue's speeds: a bound, unless it says which share of the peak products reach."""

    overlap = 1.0
    crowd = 1.0
    rest = 0.0

    def __init__(self, staging: Staging) -> None:
        hardware = staging.layout.hardware
        peak, low = hardware.flops(peak_precision(staging.job)), hardware.flops(low_word(staging.job))
        assert peak is not None and low is not None, "missing_figures says so"
        self._rate, self._float8_rate = low * hardware.efficiency, peak * hardware.efficiency
        self._float8 = float8_flops(staging.job, staging.model)
        self._pieces = staging.layout.sizes["context"]
        self._links = _Links(staging)

    def layer(self, layer: LayerNode, samples: float) -> tuple[float, float]:
        share, forward, backward = samples / self._pieces, layer.forward_flops, layer.backward_flops
        float8 = self._float8.get(layer.name, 0)
        # Of each layer, the same part of both passes is in 8 bits.
        seconds = (forward - float8) / self._rate + float8 / self._float8_rate
        return share * seconds, share * seconds * backward / forward if forward else share * backward / self._rate

    def loss(self, samples: float) -> tuple[float, float]:
        return 0.0, 0.0

    def launches(self, layer: LayerNode) -> tuple[float, float]:
        return 0.0, 0.0

    def collective(self, traffic: TrafficNode) -> float:
        return self._links.seconds(traffic)

    def update(self, pipeline: int) -> float:
        return 0.0

    def data(self, samples: float) -> float:
        return 0.0


class _Links:
    """Transfer times, by the links used."""

    def __init__(self, staging: Staging) -> None:
        self.layout, self.sharding = staging.layout, staging.sharding
        layout = staging.layout
        self.link, self.network = layout.hardware.link or 1.0, layout.hardware.network or 1.0

    def _ranks(self, traffic: TrafficNode) -> tuple[int, int]:
        """Returns the number of ranks in a collective, and the number of them on one node."""
        return traffic.ranks, max(1, min(traffic.ranks, self.layout.processes // max(1, traffic.stride)))

    def moved(self, traffic: TrafficNode) -> tuple[float, float]:
        """Returns the bytes over the link of a rank, and over its network port."""
        if traffic.operation == "receive":
            return 0.0, 0.0  # incoming traffic takes the same links the other way
        if traffic.operation == "send" and traffic.axis == "data":
            return self._sent_to_peers(traffic)
        if traffic.operation == "send":
            return (0.0, traffic.bytes) if self.layout.crosses_nodes(traffic.axis) else (traffic.bytes, 0.0)
        ranks, ranks_of_node = self._ranks(traffic)
        if ranks < 2:
            return 0.0, 0.0
        total = traffic.bytes * (ranks if traffic.operation == "all_gather" else 1)
        ways = 2 if traffic.operation == "all_reduce" else 1
        ways_of_gloo = 2 if traffic.operation in ("all_reduce", "reduce_scatter") else 1
        is_gloos = self.layout.device == "cpu" and not self.layout.is_hierarchical(ranks, traffic.stride)
        if traffic.among == "nodes":  # each rank of a node has a piece of its own, and all of them share the port
            node_bytes = total * self.layout.processes * (ranks - 1) / ranks
            return 0.0, node_bytes * (ways_of_gloo if is_gloos else ways)
        nodes = -(-ranks // ranks_of_node)
        over_link = ways * total * (ranks - 1) / ranks * (ranks_of_node > 1)
        if is_gloos and nodes > 1:  # in a ring of all ranks, one of a node sends all of it on
            return over_link, ways_of_gloo * total * (ranks - 1) / ranks / ranks_of_node
        return over_link, ways * total * (nodes - 1) / nodes / ranks_of_node

    def _sent_to_peers(self, traffic: TrafficNode) -> tuple[float, float]:
        """Returns the bytes that a rank sends its peers, over the same two. In a ring of all ranks two of a node have a
        neighbour elsewhere, each one; pairs are of ranks far apart.
        """
        layout, exchange = self.layout, self.sharding.exchange
        if not layout.crosses_nodes("data"):
            return traffic.bytes, 0.0
        in_ring = exchange is not None and RULES[exchange.kind].neighbours > 1
        if in_ring and not traffic.among:
            return traffic.bytes * (layout.processes > 1), traffic.bytes
        return 0.0, traffic.bytes * layout.processes

    def seconds(self, traffic: TrafficNode) -> float:
        """Returns the seconds of a step, in the mean over later steps."""
        over_link, over_network = self.moved(traffic)
        return traffic.when.share * max(over_link / self.link, over_network / self.network)

    def bytes_by_link(self, costs: tuple[RankCost, ...]) -> tuple[tuple[str, int], ...]:
        traffic = [[of_busiest_rank(t, cost.staging.job) for t in cost.traffic] for cost in costs]
        moved = [[(t.when.share, *self.moved(t)) for t in of_rank] for of_rank in traffic]
        link_bytes = max(float_sum(share * bytes for share, bytes, _ in rank_traffic) for rank_traffic in moved)
        network_bytes = max(float_sum(share * bytes for share, _, bytes in rank_traffic) for rank_traffic in moved)
        return (("link", round(link_bytes)), ("network", round(network_bytes)))
