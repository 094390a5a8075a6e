"""Readings of a `Plan` that its text and its pictures share: a rank's place and shares, and the names of layers.

Nothing is decided here: every number is in the plan, or follows from it by the numbering of ranks
(compiler/placement/layout.py) and the split of samples (`program.DataStep`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dslc.compiler.ir.actions import Payload, TrafficNode, handed_in
from dslc.compiler.ir.memory import MemoryNode
from dslc.compiler.ir.number_text import byte_text, count_text, percent_text, time_text
from dslc.compiler.ir.parameter_names import base_name
from dslc.compiler.ir.plan import AxisNode, PlanView, RankNode, StageNode
from dslc.compiler.ir.records import Layer, ShareNode, source_text
from dslc.compiler.ir.steps import StreamStep
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.placement.axes import crosses_nodes
from dslc.compiler.placement.schedules import ScheduledAction, ScheduleTable
from dslc.dsl.record import Record, record
from dslc.dsl.words import plural

UNKNOWN = "unknown"
AXIS_REASONS = {  # for the order of the axes
    "tensor": "within every layer, which waits for it",
    "context": "within every attention, which waits for it",
    "expert": "rows of tokens within layers with experts, which wait for them",
    "data": "gradients and parameters, beside the arithmetic",
    "pipeline": "between neighbouring stages, at their ends alone",
}
MOST_SHARES = 8  # shares of a batch in a line
SAME_EXPERTS = "same experts"
ORDER = "ranks are numbered tensor first, then context, data, pipeline: what waits most lies nearest"


def span_text(first: int, last: int) -> str:
    """Formats a range: `0–7`, or `3` for one."""
    return str(first) if first == last else f"{first}–{last}"


# ----------------------------------------------------------------------------------------------------------- ranks


def axis_of(plan: PlanView, name: str) -> AxisNode:
    """Returns the axis of that name; one of size 1 if the plan has none."""
    return next((a for a in plan.axes if a.name == name), AxisNode(name=name, size=1, stride=1, between_nodes=False))


def devices_text(plan: PlanView) -> str:
    """Formats the devices: `2 CPUs`, or with the name of their kind `1,024 h100`."""
    kind = plan.topology.kind
    return plural(plan.world_size, kind.upper()) if kind in ("cpu", "gpu") else f"{plan.world_size:,} {kind}"


def coordinates(plan: PlanView, rank: int) -> dict[str, int]:
    """Returns the rank's place on each axis, outermost first."""
    return {axis.name: rank // axis.stride % axis.size for axis in plan.axes}


def coordinates_text(plan: PlanView, rank: int) -> str:
    """Formats a rank's place: `pipeline 1, data 2, replica 1`: the axes that have more than one rank, and the copy of
    the parameters.
    """
    place = coordinates(plan, rank)
    copy = [f"replica {replica(plan, rank)}"] if replicas(plan) > 1 else []
    return ", ".join([*(f"{axis.name} {place[axis.name]}" for axis in plan.axes if axis.size > 1), *copy])


def group(plan: PlanView, rank: int, axis: str) -> list[int]:
    """Returns the ranks that differ from `rank` on one axis alone, itself included: the members of its collectives
    there.
    """
    node = axis_of(plan, axis)
    start = rank - coordinates(plan, rank).get(axis, 0) * node.stride
    return [start + n * node.stride for n in range(node.size)]


_PASS = re.compile(r"(\d+)([FBIW])(\d+)")


def schedule_table(plan: PlanView) -> ScheduleTable:
    """Returns the table that the ranks of a pipeline run, read from its rows."""
    schedule = plan.schedule
    assert schedule is not None
    return ScheduleTable(
        name=schedule.name,
        ranks=len(schedule.rows),
        virtual_stages=schedule.virtual_stages,
        microbatches=plan.data.microbatches,
        rows=tuple(tuple(map(_scheduled_action, row.split())) for row in schedule.rows),
        placement=tuple(stage.pipeline for stage in plan.stages),
    )


def _scheduled_action(text: str) -> ScheduledAction | None:
    parts = [ScheduledAction(kind, int(stage), int(m)) for stage, kind, m in _PASS.findall(text)]
    if len(parts) < 2:
        return parts[0] if parts else None
    return ScheduledAction("FB", parts[0].stage, parts[0].microbatch, tuple(parts))


def class_of(plan: PlanView, rank: int) -> RankNode | None:
    """Returns the node of the ranks like this one; None if the network is unknown."""
    return next((node for node in plan.ranks if node.first <= rank <= node.last), None)


def memory_of(plan: PlanView, node: RankNode, rank: int) -> MemoryNode:
    """Returns the memory of a rank of `node`, by the samples that it takes of a batch."""
    of_share = {each.samples: each.memory for each in node.share_memory}
    data_rank = coordinates(plan, rank).get("data", 0)
    samples = (part.samples for part in plan.data.shares if 0 <= data_rank - part.first_rank < part.ranks)
    return of_share.get(next(samples, 0), node.memory)


def memory_groups(plan: PlanView) -> list[tuple[str, MemoryNode]]:
    """Returns the ranks that hold the same, as `0–3` or `0, 2`, and their memory."""
    groups: list[tuple[str, MemoryNode]] = []
    for node in plan.ranks:
        if not node.share_memory:
            groups.append((span_text(node.first, node.last), node.memory))
            continue
        ranks: dict[MemoryNode, list[int]] = {}
        for rank in range(node.first, node.last + 1):
            ranks.setdefault(memory_of(plan, node, rank), []).append(rank)
        groups += [(_spans_text(members), memory) for memory, members in ranks.items()]
    return groups


def _spans_text(ranks: Sequence[int]) -> str:
    """Formats ranks in order: `0–3, 8–11`; of many spans the first."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [span_text(*span) for span in spans]
    return ", ".join(texts if len(texts) <= MOST_SHARES else [*texts[:MOST_SHARES], "…"])


def exchanging_axes(plan: PlanView) -> list[AxisNode]:
    """Returns the axes with several ranks, outermost first: the mesh's, and the expert axis inside `data`."""
    axes = []
    for axis in plan.axes:
        axes += [axis] if axis.size > 1 else []
        if axis.name == "data" and plan.experts is not None:
            size, topology = plan.experts.size, plan.topology
            between_nodes = crosses_nodes(size, axis.stride, topology.nodes, topology.processes)
            axes.append(AxisNode(name="expert", size=size, stride=axis.stride, between_nodes=between_nodes))
    return axes


def mesh_text(plan: PlanView, omitted_axis: str = "") -> str:
    """Formats the mesh: `pipeline 2 x data 4 (2 replicas of 2 ranks) x tensor 2`, without `omitted_axis`."""
    parts = [f"{replicas(plan)} replicas of {plural(plan.shards, 'rank')}"] if replicas(plan) > 1 else []
    parts += [f"each {plan.experts.size} share experts"] if plan.experts else []
    copies = f" ({', '.join(parts)})" if parts else ""
    axes = [axis for axis in plan.axes if axis.size > 1 and axis.name != omitted_axis]
    axis_texts = [f"{axis.name} {axis.size}" + (copies if axis.name == "data" else "") for axis in axes]
    return " x ".join(axis_texts) or ("" if omitted_axis else "one rank")


def link_text(plan: PlanView, axis: AxisNode) -> str:
    """Names the links of an axis; if it uses both kinds, also the number of its ranks on a node."""
    if not axis.between_nodes:
        return "within a node"
    per_node, remainder = divmod(plan.topology.processes, axis.stride)
    even = per_node > 1 and not remainder and axis.size % per_node == 0
    if not even:
        return "between nodes"
    shares = "shared memory of " * (plan.topology.backend == "shared_memory")
    return f"between nodes, {shares}{plural(per_node, 'rank')} on each"


def exchanged(node: RankNode | None, axis: str) -> list[TrafficNode]:
    """Returns a rank's input to the exchanges over an axis; receives are another rank's input."""
    return [t for t in node.traffic if t.axis == axis and t.count and t.operation != "receive"] if node else []


# Axis, `within` or `across` the replicas or of the same experts, operation, content, and when and among whom, in words.
Shown = tuple[str, str, str, Payload, str]


def of_all_dtypes(plan: PlanView, node: RankNode) -> dict[Shown, tuple[int, int]]:
    """Returns a rank's exchanges in a step that has them: the count of operations and the bytes of each kind."""
    sums: dict[Shown, tuple[int, int]] = {}
    for t in (t for t in node.traffic if t.count):
        key = t.axis, reach(plan, t), t.operation, t.what, exchange_time(t)
        count, size = sums.get(key, (0, 0))
        sums[key] = count + t.count, size + t.bytes
    return sums


def exchange_time(traffic: TrafficNode) -> str:
    """Formats when an exchange takes place, and among whom: `between nodes, every 8 steps, after step 100`; "" if in
    each step among all.
    """
    cadence, reach_text = traffic.when, {"node": "within a node", "nodes": "between nodes"}.get(traffic.among, "")
    if cadence.until is not None:
        until_text = f"first {cadence.until:,} steps" if cadence.until > 1 else "first step"
        return ", ".join(filter(None, (reach_text, until_text)))
    period_text = {0: "by the clock", 1: ""}.get(cadence.every, f"every {cadence.every:,} steps")
    start_text = f"after step {cadence.after:,}" if cadence.after else ""
    return ", ".join(filter(None, (reach_text, period_text, start_text)))


def axis_bytes(plan: PlanView, axis: str) -> int | None:
    """Returns the most bytes of input of a rank over an axis in a step, in the mean over later steps; None if the
    network is unknown.
    """
    return max((handed_in(exchanged(node, axis)) for node in plan.ranks), default=None)


def axis_text(plan: PlanView, name: str) -> str:
    """Formats an axis: `tensor x2`. The ranks of data and context together reduce gradients and parameters."""
    sizes = {axis.name: axis.size for axis in exchanging_axes(plan)}
    size, context = sizes.get(name, 1), sizes.get("context", 1)
    if name == "data" and context > 1:
        return f"data+context x{size * context}"
    return f"{name} x{size}" if size > 1 else name


def limit_of(plan: PlanView) -> int | None:
    """Returns the most bytes that a device may hold: the job's limit, else the device's own memory."""
    return plan.topology.limit or plan.topology.memory


# -------------------------------------------------------------------------------------------------------- replicas


def replicas(plan: PlanView) -> int:
    """Returns the copies of the parameters that are each cut over several ranks; 1 if there is one, or none is cut."""
    ranks = axis_of(plan, "data").size * axis_of(plan, "context").size
    return ranks // plan.shards if plan.shards > 1 else 1


def experts_of(plan: PlanView, rank: int) -> list[tuple[str, str]]:
    """Returns for each layer with experts the experts that a rank holds: `0–3 of 8, with ranks 0–1`."""
    if plan.experts is None:
        return []
    size, place = plan.experts.size, group(plan, rank, "data").index(rank)
    first = place - place % size
    peers = ranks_text(group(plan, rank, "data")[first : first + size])
    rows = []
    for name, count in plan.experts.layers:
        held = count // size
        start = place % size * held
        rows.append((base_name(name), f"{span_text(start, start + held - 1)} of {count}, with ranks {peers}"))
    return rows


def replica(plan: PlanView, rank: int) -> int:
    return sharers(plan, rank).index(rank) // plan.shards


def sharers(plan: PlanView, rank: int) -> list[int]:
    """Returns the ranks of the data and context axes that include `rank`, in the order of the shards."""
    return [peer for data_peer in group(plan, rank, "data") for peer in group(plan, data_peer, "context")]


def reach(plan: PlanView, traffic: TrafficNode) -> str:
    """Returns `within` for an exchange among the ranks of a replica, `across` for one among replicas, `same experts`
    for one among ranks that hold these, "" for others.
    """
    if traffic.axis != "data":
        return ""
    stride, count = axis_of(plan, "context").stride, replicas(plan)
    groups = {(plan.shards, stride): "within", (count, stride * plan.shards): "across"} if count > 1 else {}
    has_few_ranks = plan.experts is not None and traffic.ranks < axis_of(plan, "data").size * _pieces(plan)
    of_experts = has_few_ranks and traffic.what in (Payload.GRADIENTS, Payload.PARAMETERS)
    return groups.get((traffic.ranks, traffic.stride), SAME_EXPERTS if of_experts else "")


def members(plan: PlanView, scope: str) -> int:
    """Returns the number of ranks in an exchange `within` a replica, `across` them, or of the same experts."""
    if scope == SAME_EXPERTS:
        assert plan.experts is not None
        ranks = plan.shards if plan.shards > plan.experts.size else axis_of(plan, "data").size * _pieces(plan)
        return ranks // plan.experts.size
    return plan.shards if scope == "within" else replicas(plan)


def _pieces(plan: PlanView) -> int:
    return axis_of(plan, "context").size


def exchange_groups(plan: PlanView, rank: int, scope: str) -> list[list[int]]:
    """Returns the ranks at a rank's coordinates on the other axes, grouped by exchange."""
    ranks, shards = sharers(plan, rank), plan.shards
    if scope == SAME_EXPERTS:
        assert plan.experts is not None
        experts, size, pieces = plan.experts.size, members(plan, scope), _pieces(plan)
        holders = [[peer for n, peer in enumerate(ranks) if n // pieces % experts == k] for k in range(experts)]
        return sorted(each[n : n + size] for each in holders for n in range(0, len(each), size))
    if scope == "within":
        return [ranks[n : n + shards] for n in range(0, len(ranks), shards)]
    return [ranks[n::shards] for n in range(shards)]


def groups_text(plan: PlanView, rank: int, scope: str, limit: int = 4) -> str:
    """Formats groups: `within groups of 2 ranks (0–1; 2–3)`, `across 2 replicas (0, 2; 1, 3)`, `with the same experts
    (0, 2; 1, 3)`; of more than `limit` groups the first.
    """
    groups = exchange_groups(plan, rank, scope)
    texts = [ranks_text(ranks) for ranks in (groups if len(groups) <= limit else groups[:1])]
    groups_list = "; ".join([*texts, *(["…"] if len(texts) < len(groups) else [])])
    if scope == SAME_EXPERTS:
        return f"with the {scope} ({groups_list})"
    kind_text = f"groups of {plural(plan.shards, 'rank')}" if scope == "within" else f"{replicas(plan)} replicas"
    return f"{scope} {kind_text} ({groups_list})"


def ranks_text(ranks: list[int]) -> str:
    """Formats ranks: `0–7`, or `0, 8, …, 24`."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return span_text(ranks[0], ranks[-1])
    words = [str(rank) for rank in ranks]
    return ", ".join(words if len(words) <= 4 else [*words[:2], "…", words[-1]])


# --------------------------------------------------------------------------------------------------------- samples


@record
class SampleRange(Record):
    """Data ranks `first` to `last`, each with `samples` of a batch; the first of them from entry `start` on."""

    first: int
    last: int
    start: int
    samples: int

    @property
    def ranks(self) -> int:
        return self.last - self.first + 1

    def entries(self, data_rank: int) -> tuple[int, int]:
        """Returns the first and last entry of the batch that a data rank gets."""
        start = self.start + (data_rank - self.first) * self.samples
        return start, start + self.samples - 1


def parts(shares: Sequence[ShareNode]) -> list[SampleRange]:
    """Returns the shares of a batch in order, each with its first entry."""
    ranges, start = [], 0
    for share in sorted(shares, key=lambda s: s.first_rank):
        ranges.append(
            SampleRange(
                first=share.first_rank,
                last=share.first_rank + share.ranks - 1,
                start=start,
                samples=share.samples,
            )
        )
        start += share.ranks * share.samples
    return ranges


def share_rows(plan: PlanView, ranks: int) -> list[tuple[str, str]]:
    """Describes the shares of a batch over data ranks, and the micro-batches of the largest share."""
    data = plan.data
    shares_text = f"{plural(ranks, 'data rank')} x {max((s.samples for s in data.shares), default=0)}"
    if len(data.shares) > 1:
        sizes = [f"{s.ranks} x {s.samples}" if s.ranks > 1 else str(s.samples) for s in data.shares[:MOST_SHARES]]
        sizes += ["…"] if len(data.shares) > MOST_SHARES else []
        shares_text = f"{' + '.join(sizes)}; work, time and traffic of passes are of the largest"
    if data.most_share:
        shares_text = f"measured when the run begins, up to {plural(data.most_share, 'sample')} of a rank"
    passes = f"{data.microbatches * data.microbatch} = {data.microbatches} x {data.microbatch}"
    if data.microbatches > 1:
        passes += ": the pipeline's micro-batches" if plan.schedule else ": gradients are accumulated"
    return [("share", f"{data.batch:,} = {shares_text}"), ("micro-batch", passes)]


def entries_of(shares: Sequence[ShareNode], data_rank: int) -> tuple[int, int] | None:
    """Returns the first and last entry of a batch that a data rank gets; None if it gets none."""
    for part in parts(shares):
        if part.first <= data_rank <= part.last:
            return part.entries(data_rank)
    return None


# ---------------------------------------------------------------------------------------------------------- layers


def layer_name(layer: Layer) -> str:
    """Formats a layer's name: `blocks.3`; `0 conv2d` if the name is a number; the kind alone if there is no name."""
    if not layer.name:
        return layer.kind
    return layer.name if not layer.name[0].isdigit() else f"{layer.name} {layer.kind}"


@record
class LayerRun(Record):
    """Layers `first` to `last`, which are alike in all but their names."""

    first: int
    last: int
    layer: Layer
    end: Layer

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    @property
    def name(self) -> str:
        return layer_name(self.layer) if self.count == 1 else f"{layer_name(self.layer)} … {layer_name(self.end)}"


def layer_runs(layers: Sequence[Layer]) -> list[LayerRun]:
    """Folds equal layers that follow one another."""
    runs: list[LayerRun] = []
    for n, layer in enumerate(layers):
        if runs and _likeness(runs[-1].layer) == _likeness(layer):
            runs[-1] = LayerRun(first=runs[-1].first, last=n, layer=runs[-1].layer, end=layer)
        else:
            runs.append(LayerRun(first=n, last=n, layer=layer, end=layer))
    return runs


def _likeness(layer: Layer) -> tuple[object, ...]:
    return layer.kind, layer.input, layer.output, layer.parameters, layer.flops, layer.kept


def stage_layers(plan: PlanView, stage: StageNode) -> str:
    """Names a stage's layers: `embedding … blocks.15`."""
    first_layer, last_layer = plan.layers[stage.first], plan.layers[stage.last]
    return (
        layer_name(first_layer)
        if first_layer is last_layer
        else f"{layer_name(first_layer)} … {layer_name(last_layer)}"
    )


def stages_of(plan: PlanView, node: RankNode) -> list[StageNode]:
    return [stage for stage in plan.stages if stage.index in node.stages]


def fact_text(fact: TensorFact) -> str:
    """Formats a tensor: `16 x 28 x 28`; `scalar` for no dims. Float32 is left out."""
    shape = " x ".join(map(str, fact.shape)) or "scalar"
    return shape if fact.dtype == "float32" else f"{shape} {fact.dtype}"


# --------------------------------------------------------------------------------------------------------- numbers


def number_text(value: float | None, text: str = "") -> str:
    """Formats a number with thousands separators, and `text` after it; `unknown` for None."""
    if value is None:
        return UNKNOWN
    return f"{value:,}{' ' + text if text else ''}"


def known_text(value: float | None, text: Callable[[float], str]) -> str:
    """Formats a number by `text`; `unknown` for None."""
    return UNKNOWN if value is None else text(value)


def bound_text(plan: PlanView) -> str:
    """Returns the source of the predicted time. ` at best` assumes the peak of the device's data sheet: a lower
    bound.
    """
    return source_text(plan.step.source, plan.step.fit, plan.topology.kind) if plan.step is not None else " at best"


def time_source(plan: PlanView) -> str:
    """Returns where the predicted time of a step comes from."""
    if plan.step is not None and plan.step.source == "fitted":
        return " by a fit to trainings on this machine"
    if plan.step is not None and plan.step.lacks:
        source = "" if plan.step_time is None else bound_text(plan)
        return f"{source}: the calibration lacks {plan.step.lacks}"
    if plan.step_time is None:
        return ""
    if plan.step is None or plan.step.source == "bound":
        return " at best: at the peak of the data sheet"
    if plan.step.source == "measured":
        return " by the times that `dslc calibrate` measured"
    if plan.step.source == "published":
        fit = plan.step.fit
        nearest = "" if fit == plan.topology.kind else ", the most similar kind with any"
        compiled = "; what compiling saves is not known" if plan.training.compiled else ""
        return f" by the published times of {fit}{nearest}{compiled}"
    return f" where products reach {percent_text(plan.step.efficiency)} of the peak"


def rate_text(plan: PlanView) -> str:
    """Formats the rate of all ranks together in the predicted time: `134 k tokens/s`, or samples; "" if it is
    unknown.
    """
    if not plan.step_time:
        return ""
    fact = plan.layers[0].input if plan.layers else None
    tokens = fact is not None and fact.dtype == "int64" and len(fact.shape) == 1
    tokens_per_sample = fact.shape[0] if fact is not None and tokens else 1
    rows = 2 if plan.data.source == "preferences" else 1
    numbers = plan.data.batch * rows * tokens_per_sample
    return f"{count_text(numbers / plan.step_time)} {'tokens' if tokens else 'samples'}/s"


def stream_text(stream: StreamStep) -> str:
    """Describes the order of a stream."""
    length = f"{plural(stream.length, 'sample')} a pass, " if stream.length else ""
    readers_text = f", {stream.lanes} at a time" if stream.shards > 1 else ""
    order_text = f", {plural(stream.window, 'sample')} shuffled at a time" if stream.window else ", in order"
    return f"{length}{plural(stream.shards, 'shard')} of a stream{readers_text}{order_text}"


def reference_text(plan: PlanView) -> str:
    """Describes the pass that computes the reference's log-probabilities: its pairs, its time, and what it leaves."""
    data = plan.data
    known = [count for count in (data.train, data.validation, data.test) if count]
    pairs = sum(known) if data.train is not None else None
    time = ""
    if plan.step is not None and plan.step.step_time is not None and pairs is not None:
        forward = data.microbatches * sum(stage.forward for stage in plan.step.stages)
        time = f", {time_text(forward * pairs / data.batch)} by the forward passes of a step"
    kept = f", {byte_text(8 * pairs)} in the run directory" if pairs is not None else ""
    return f"{data.reference}: a forward pass over {number_text(pairs, 'pairs')} before step 1{time}{kept}"
