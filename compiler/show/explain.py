"""The plan as plain text in aligned columns, with a section for each decision.

`dslc plan JOB` prints `explain`, and `dslc plan JOB --rank N` prints `explain_rank`. Both read the plan alone. Unknown
figures are shown as `unknown`. Bytes are in powers of 1024, of one rank unless noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from dslc.compiler.cost.stages import equal_counts
from dslc.compiler.ir.actions import ROUTED, Payload
from dslc.compiler.ir.memory import KINDS, MemoryNode
from dslc.compiler.ir.number_text import byte_text, count_text, flop_text, percent_text, time_text
from dslc.compiler.ir.plan import PlanView, RankNode, TopologyNode
from dslc.compiler.ir.records import Schedule, TrainingNode
from dslc.compiler.show.describe import (
    AXIS_REASONS,
    ORDER,
    UNKNOWN,
    axis_bytes,
    axis_of,
    bound_text,
    class_of,
    coordinates,
    devices_text,
    entries_of,
    exchanging_axes,
    experts_of,
    fact_text,
    group,
    groups_text,
    known_text,
    layer_runs,
    limit_of,
    link_text,
    members,
    memory_groups,
    memory_of,
    mesh_text,
    number_text,
    of_all_dtypes,
    parts,
    rate_text,
    reference_text,
    replica,
    replicas,
    share_rows,
    span_text,
    stage_layers,
    stages_of,
    stream_text,
    time_source,
)
from dslc.compiler.show.text_table import Row, sectioned_text, shorten_lines, table, wrap_words
from dslc.dsl.words import either, plural

MOST_LAYERS = 40  # lines of the layer table
MOST_CLASSES = 16  # lines of tables by pipeline coordinate
TRAFFIC = ("  operation", "axis", "what", "count", "bytes")


def explain(plan: PlanView, width: int | None = None) -> str:
    """Returns the whole plan. Lines longer than `width`, if one is given, are cut with `…`."""
    sections = (
        ("Topology", _topology(plan)),
        ("Mesh", _mesh(plan)),
        ("Placement", _placement(plan)),
        ("Data", _data(plan)),
        ("Samples of a batch", _samples(plan)),
        ("Layers", _layers(plan)),
        ("Training", _training(plan)),
        ("Memory of a rank, at its peak", _memory(plan)),
        ("Traffic of a rank, each step", _traffic(plan)),
        ("Schedule", _schedule(plan)),
        ("Estimate", _estimate(plan)),
    )
    return sectioned_text(f"{plan.job}  plan {plan.hash}", sections, width)


def explain_rank(plan: PlanView, rank: int, width: int | None = None) -> str:
    """Returns the plan of one rank. Raises AssertionError if there is no such rank."""
    assert 0 <= rank < plan.world_size, f"ranks are 0 to {plan.world_size - 1}"
    sections = (
        ("Place", _place(plan, rank)),
        ("Layers", _rank_layers(plan, rank)),
        ("Samples", _rank_samples(plan, rank)),
        ("Memory, at its peak", _rank_memory(plan, rank)),
        ("Traffic, each step", _rank_traffic(plan, rank)),
        ("Schedule", _rank_schedule(plan, rank)),
    )
    return sectioned_text(f"{plan.job}  rank {rank} of {plan.world_size}  plan {plan.hash}", sections, width)


# ---------------------------------------------------------------------------------------------------- the whole plan


def _topology(plan: PlanView) -> list[str]:
    top = plan.topology
    counts = top.node_counts
    rows = [
        ("nodes", f"{top.nodes:,}{_elastic(counts)}"),
        ("devices", f"{devices_text(plan)}, {top.processes} on each node"),
        ("backend", f"{top.backend} on {top.device}{_between_nodes(top)}"),
        *([("threads", f"{top.threads} of each process")] if top.threads else []),
        ("memory", known_text(top.memory, byte_text) + (" a device" if top.memory else "") + _limit(plan)),
    ]
    return table(rows)


def _between_nodes(top: TopologyNode) -> str:
    return ", gloo between nodes" if top.backend == "shared_memory" and top.nodes > 1 else ""


def _elastic(counts: Sequence[int]) -> str:
    """Formats the node counts of an elastic job, whose plan shows one of them."""
    if len(counts) == 1:
        return ""
    return f", of an elastic job on {either(counts)}; `--set devices.nodes=…` shows another"


def _limit(plan: PlanView) -> str:
    return f", of which {byte_text(plan.topology.limit)} may be used" if plan.topology.limit else ""


def _mesh(plan: PlanView) -> list[str]:
    rows = [
        (
            axis.name,
            str(axis.size),
            str(axis.stride),
            link_text(plan, axis),
            known_text(axis_bytes(plan, axis.name), byte_text),
            AXIS_REASONS[axis.name],
        )
        for axis in exchanging_axes(plan)
    ]
    if not rows:
        return ["one rank"]
    lines = table(rows, right_columns=(1, 2, 4), head=("axis", "ranks", "stride", "links", "a step", ""))
    return [*lines, *_between_layers(plan), *([ORDER] if len(rows) > 1 else [])]


def _between_layers(plan: PlanView) -> list[str]:
    """Returns what a rank of the tensor axis has of a sequence between the layers that are cut."""
    if axis_of(plan, "tensor").size == 1:
        return []
    part = "a piece of each sequence" if plan.sequence else "whole sequences"
    return [f"tensor: between its layers a rank has {part} (`parallelism.sequence`)"]


def _placement(plan: PlanView) -> list[str]:
    if not plan.ranks:
        return [f"{plural(plan.world_size, 'rank')}, all alike; the layers are {UNKNOWN}"]
    rows = []
    for node in plan.ranks:
        processes = plan.topology.processes
        for n, stage in enumerate(stages_of(plan, node)):
            rank_cells = (span_text(node.first, node.last), f"x{node.last - node.first + 1}", str(node.pipeline)) + (
                span_text(node.first // processes, node.last // processes),
            )
            rows.append(
                (
                    *(rank_cells if n == 0 else ("", "", "", "")),
                    str(stage.index),
                    span_text(stage.first, stage.last),
                    count_text(stage.parameters),
                    stage_layers(plan, stage),
                )
            )
    head = ("ranks", "", "pipeline", "nodes", "stage", "layers", "parameters", "")
    return table(rows, right_columns=(2, 4, 6), head=head, limit=2 * MOST_CLASSES)


def _data(plan: PlanView) -> list[str]:
    data = plan.data
    ranks = axis_of(plan, "data").size
    split_texts = {
        "random": "held out at random by the seed",
        "tail": "the end of the stream",
        "given": "of its own",
        "each": "of each source",
    }
    rows = [
        ("source", data.source),
        *(
            (f"  {part.source}", f"{number_text(part.visited)} of {number_text(part.train)} in an epoch")
            for part in data.parts
        ),
        (
            "training",
            stream_text(data.stream) if data.stream else f"{number_text(data.train, 'samples')}, {data.order}",
        ),
    ]
    if data.pictures:
        rows.append(("pictures", ", ".join(data.pictures)))
    if data.split != "none" and data.validation != 0:
        rows.append(
            ("validation", number_text(data.validation, "samples") + f", {split_texts.get(data.split, data.split)}")
        )
    rows += [(f"  {name}", number_text(samples, "samples")) for name, samples in data.validation_sets]
    if data.split != "none" and data.test != 0:
        rows.append(("test", number_text(data.test, "samples") + ", evaluated once, after the training"))
    if data.reference:
        rows.append(("reference", reference_text(plan)))
    if data.documents is not None:
        rows.append(("documents", f"each ends with token {data.documents}; attention, positions, targets stay within"))
    rows += [
        ("batch", f"{plural(data.batch, 'sample')} a step"),
        *share_rows(plan, ranks),
    ]
    if data.last is None:
        rows.append(("last batch", UNKNOWN))
    elif data.last:
        unseen = "" if data.last_shares else ", but the training ends before it"
        rows.append(("last batch", f"{plural(data.last, 'sample')}, kept{unseen}"))
    elif data.visited is not None and data.visited % data.batch and not data.stream:
        rows.append(("last batch", f"{plural(data.visited % data.batch, 'sample')} of each epoch dropped"))
    epoch = "" if data.stream and not data.stream.length else f"{number_text(data.steps_per_epoch)} an epoch, "
    rows.append(("steps", f"{epoch}{number_text(data.steps)} in all"))
    return table(rows)


def _samples(plan: PlanView) -> list[str]:
    rows = []
    for name, shares in (("full", plan.data.shares), ("last", plan.data.last_shares)):
        for part in parts(shares):
            first_entries, last_entries = part.entries(part.first), part.entries(part.last)
            entries_text = span_text(*first_entries)
            if part.ranks > 1:
                entries_text += ", " if part.ranks == 2 else ", …, "
                entries_text += span_text(*last_entries)
            rows.append((name, span_text(part.first, part.last), f"x{part.ranks}", str(part.samples), entries_text))
    return table(rows, right_columns=(3,), head=("batch", "data ranks", "", "samples each", "entries of the batch"))


def _why(plan: PlanView, otherwise: str = "the network was not traced") -> str:
    """Returns why figures of a step are unknown."""
    return "the step is the user's own" if plan.training.own_step else otherwise


def _layers(plan: PlanView) -> list[str]:
    if not plan.layers:
        reason = "the network is the user's own; `--trace` looks at it"
        return [f"{UNKNOWN}: {_why(plan, reason)}"]
    rows = [
        (
            run.name,
            f"x{run.count}" if run.count > 1 else "",
            ", ".join(filter(None, (run.layer.kind, run.layer.quantized))),
            fact_text(run.layer.output),
            _in_full(run.layer.parameters * run.count),
            flop_text(run.layer.flops * run.count),
            byte_text(run.layer.kept * run.count),
        )
        for run in layer_runs(plan.layers)
    ]
    head = ("layer", "", "kind", "output", "parameters", "work", "kept")
    lines = table(rows, right_columns=(4, 5, 6), head=head, limit=MOST_LAYERS)
    flops, kept_bytes = sum(layer.flops for layer in plan.layers), sum(layer.kept for layer in plan.layers)
    return [
        *lines,
        f"{known_text(plan.parameters, count_text)} parameter{'s' * (plan.parameters != 1)} "
        f"({number_text(plan.parameters)})"
        + (f", of which {_in_full(plan.trained)} train" if plan.trained is not None else ""),
        f"one sample: {flop_text(flops)} forward and backward, {byte_text(kept_bytes)} kept for the backward pass",
    ]


def _in_full(count: int) -> str:
    return f"{count:,}" if count < 10_000_000 else count_text(count)


def _training(plan: PlanView) -> list[str]:
    training = plan.training
    rate = f"{training.lr_written:.6g}"
    if training.lr != training.lr_written:
        rate += f" -> {training.lr:.6g}, scaled to the batch"
    rows = [
        ("optimizer", training.optimizer),
        ("learning rate", f"{rate} ({training.lr_schedule})"),
        ("precision", training.precision),
        ("clip", _clip(training)),
        *([("compiled", training.compiled)] if training.compiled else []),
        *([("logits", training.chunked)] if training.chunked else []),
        *([("recomputed", training.recomputed)] if training.recomputed else []),
        ("seed", str(training.seed)),
    ]
    if training.on_spike:
        rows.append(("loss spike", training.on_spike))
    if training.texts:
        rows.append(("texts", training.texts))
    if training.check_replicas:
        rows.append(("replicas", f"compared bit by bit every {plural(training.check_replicas, 'step')}"))
    if training.restarts:
        rows.append(("restarts", f"{training.restarts:,}, each from the newest checkpoint"))
    return table(rows)


def _clip(training: TrainingNode) -> str:
    if training.clip_value is not None:
        return f"{training.clip_value:g}, each number"
    return "none" if training.clip is None else f"{training.clip:g}, the global norm"


def _memory(plan: PlanView) -> list[str]:
    if not plan.ranks:
        return [f"{UNKNOWN}: {_why(plan)}"]
    kinds = [kind for kind in KINDS if any(getattr(node.memory, kind) for node in plan.ranks)]
    rows = [
        (
            ranks,
            *(byte_text(getattr(memory, kind)) for kind in kinds),
            byte_text(memory.peak),
            _of_limit(plan, memory.peak),
        )
        for ranks, memory in memory_groups(plan)
    ]
    right_columns = range(1, len(kinds) + 3)
    lines = table(rows, right_columns=right_columns, head=("ranks", *kinds, "peak", ""), limit=MOST_CLASSES)
    lines += _peak(max(plan.ranks, key=lambda node: node.memory.peak).memory)
    return [*lines, *_routing(plan)]


def _routing(plan: PlanView) -> list[str]:
    """Returns for which routing of tokens to experts the memory is."""
    if plan.experts is None:
        return []
    if plan.experts.skew is None:
        return [
            "this is for an even routing: if all tokens choose the experts of one rank, it works on up to "
            f"{plan.experts.size} times as many rows; `parallelism.expert_skew` states a bound"
        ]
    even = max((node.even_memory.peak for node in plan.ranks if node.even_memory is not None), default=None)
    return [
        f"this is for the busiest rank at a skew of {plan.experts.skew:g}, with {plan.experts.skew:g} times its even "
        f"share of rows; with an even routing the peak is {known_text(even, byte_text)}"
    ]


def _peak(memory: MemoryNode) -> list[str]:
    """Returns the moment of the peak, and the layers that hold most of it."""
    if not memory.when:
        return []
    lines = [f"the peak is {memory.moment}"]
    shares = ", ".join(f"{share.name} {byte_text(share.bytes)}" for share in memory.layers)
    return [*lines, *([f"most of its activations: {shares}"] if shares else []), f"at rest {byte_text(memory.rest)}"]


def _of_limit(plan: PlanView, peak: int) -> str:
    limit = limit_of(plan)
    return f"{percent_text(peak / limit)} of {byte_text(limit)}" if limit else f"limit {UNKNOWN}"


def _traffic(plan: PlanView) -> list[str]:
    if not plan.ranks:
        return [f"{UNKNOWN}: {_why(plan)}"]
    rows: list[Row] = []
    for _, equal_ranks in groupby(plan.ranks, key=lambda node: node.traffic):
        nodes = list(equal_ranks)
        rows.append((f"ranks {span_text(nodes[0].first, nodes[-1].last)}",))
        rows += _traffic_rows(plan, nodes[0])
    if all(len(row) == 1 for row in rows):
        return ["none: nothing is exchanged"]
    return table(rows, right_columns=(3, 4), head=TRAFFIC, limit=3 * MOST_CLASSES)


def _traffic_rows(plan: PlanView, node: RankNode) -> list[Row]:
    return [
        (
            "  " + operation,
            f"{axis} {scope} {members(plan, scope)}" if scope else axis,
            content,
            f"{count:,}",
            byte_text(size),
            *filter(None, (cadence, _at_skew(plan, content, size))),
        )
        for (axis, scope, operation, content, cadence), (count, size) in of_all_dtypes(plan, node).items()
    ]


def _at_skew(plan: PlanView, what: Payload, size: int) -> str:
    """Returns what arrives at or leaves the busiest rank of an expert axis, beside the bytes of an even routing."""
    skew = plan.experts.skew if plan.experts is not None else None
    return f"even; {byte_text(round(skew * size))} at skew {skew:g}" if skew and what in ROUTED else ""


def _schedule(plan: PlanView) -> list[str]:
    schedule = plan.schedule
    if schedule is None:
        if plan.data.microbatches == 1:
            return ["forward, backward, update"]
        forward_text = "the outputs of all micro-batches and their loss, then " if plan.data.ahead else ""
        if plan.data.counted_ahead:
            forward_text = "a forward pass of all micro-batches to count the tokens of each expert, then "
        return [f"{forward_text}forward and backward, {plan.data.microbatches} times, then the update"]
    stages = len(schedule.rows) * schedule.virtual_stages
    lines = [
        f"{schedule.name}: {len(schedule.rows)} ranks x {schedule.virtual_stages} = {plural(stages, 'stage')}, "
        f"{plural(plan.data.microbatches, 'micro-batch')}, bubble {known_text(plan.bubble, percent_text)}"
    ]
    lines += _balance(plan, schedule)
    rows = [(str(n), _row_text(row)) for n, row in enumerate(schedule.rows)]
    return [*lines, *table(rows, right_columns=(0,), limit=MOST_CLASSES), _key(schedule)]


def _balance(plan: PlanView, schedule: Schedule) -> list[str]:
    """Compares the slowest stage and the bubble with the slowest stage and the bubble of a cut into equal numbers of
    layers.
    """
    work = [layer.flops for layer in plan.layers]
    mean = sum(work) / max(1, len(plan.stages))
    if not mean:
        return []

    def slowest(cut: Sequence[range]) -> str:
        longest = max(sum(work[n] for n in stage) for stage in cut)
        return f"{flop_text(longest)} of a sample, {longest / mean:.2f} x the mean"

    cut = tuple(range(stage.first, stage.last + 1) for stage in plan.stages)
    equal = equal_counts(len(work), len(cut))
    if cut == equal:
        return [f"slowest stage: {slowest(cut)}; all have equal numbers of layers"]
    if schedule.equal_bubble is None:
        return [f"slowest stage: {slowest(cut)}; equal numbers of layers cannot be had"]
    longer = (1 - schedule.bubble) / (1 - schedule.equal_bubble)
    equal_text = f"bubble {percent_text(schedule.equal_bubble)}, {longer:.2f} x the time"
    return [f"slowest stage: {slowest(cut)}", f"equal numbers of layers: {slowest(equal)}, {equal_text}"]


def _row_text(row: str, limit: int = 14) -> str:
    actions = row.split(" ")
    return row if len(actions) <= limit else " ".join([*actions[: limit - 5], "…", *actions[-4:]])


def _key(schedule: Schedule) -> str:
    halves = any("I" in row or "W" in row for row in schedule.rows)
    kinds = "F forward, B backward" + (", I of the input, W of the weights" if halves else "")
    return f"2F0: stage 2, micro-batch 0; {kinds}; - idle"


def _estimate(plan: PlanView) -> list[str]:
    flops, bound = max((node.flops for node in plan.ranks), default=None), bound_text(plan)
    rows = [
        ("work of a rank", f"{flop_text(flops)} a step" if flops is not None else UNKNOWN),
        ("step time", known_text(plan.step_time, time_text) + time_source(plan)),
        *_spent(plan),
        ("throughput", (rate_text(plan) or UNKNOWN) + (bound if plan.step_time else "")),
        ("MFU", known_text(plan.mfu, percent_text) + (bound if plan.mfu is not None else "")),
        ("bubble", "none" if plan.bubble is None else percent_text(plan.bubble)),
    ]
    if plan.step_time is not None and plan.data.steps is not None:
        rows.append(("training", known_text(plan.step_time * plan.data.steps, time_text) + bound))
    return table(rows)


def _spent(plan: PlanView) -> list[tuple[str, str]]:
    """Returns the parts of a step's time, and a rank's traffic by link."""
    step = plan.step
    if step is None:
        return []
    parts = (
        ("arithmetic", step.arithmetic, ""),
        ("transfers", step.transfers, " within layers"),
        ("waiting", step.waiting, " for other stages"),
        ("exposed", step.exposed, " of gradients and parameters, behind no arithmetic"),
        ("update", step.update, ""),
        ("samples", step.samples, " to make those of a step"),
        ("launches", step.launches, " of kernels that take less"),
        ("rest", step.rest, " of no part"),
    )
    rows = [(f"  {name}", time_text(seconds) + note) for name, seconds, note in parts if seconds > 1e-9]
    links = ((step.within, "within a node"), (step.between, "between nodes"))
    moved_text = ", ".join(f"{byte_text(count)} {link}" for count, link in links if count)
    return [*rows, *([("a rank moves", moved_text)] if moved_text else [])]


# --------------------------------------------------------------------------------------------------------- one rank


def _place(plan: PlanView, rank: int) -> list[str]:
    top = plan.topology
    rows = [
        ("node", f"{rank // top.processes} of {top.nodes}"),
        ("local rank", f"{rank % top.processes} of {top.processes}, {top.device}"),
    ]
    place = coordinates(plan, rank)
    for axis in plan.axes:
        if axis.size > 1:
            members = group(plan, rank, axis.name)
            rows.append((axis.name, f"{place[axis.name]} of {axis.size}, with {_members(members, axis.stride)}"))
    if replicas(plan) > 1:
        groups = "; ".join(groups_text(plan, rank, groups) for groups in ("within", "across"))
        rows.append(("replica", f"{replica(plan, rank)} of {replicas(plan)}: shares {groups}"))
    return [*table([*rows, *experts_of(plan, rank)]), f"mesh: {mesh_text(plan)}"]


def _members(ranks: list[int], stride: int) -> str:
    if stride == 1:
        return f"ranks {span_text(ranks[0], ranks[-1])}"
    rank_texts = [str(r) for r in ranks] if len(ranks) <= 6 else [*map(str, ranks[:3]), "…", str(ranks[-1])]
    return f"ranks {', '.join(rank_texts)}"


def _rank_layers(plan: PlanView, rank: int) -> list[str]:
    node = class_of(plan, rank)
    if node is None:
        return [f"{UNKNOWN}: {_why(plan)}"]
    rows = [
        (str(s.index), span_text(s.first, s.last), count_text(s.parameters), flop_text(s.flops), stage_layers(plan, s))
        for s in stages_of(plan, node)
    ]
    split_axes = [
        f"{axis.name} {axis.size}" for axis in plan.axes if axis.name in ("tensor", "context") and axis.size > 1
    ]
    lines = table(rows, right_columns=(2, 3), head=("stage", "layers", "parameters", "work of a sample", ""))
    return [*lines, *([f"work and memory are divided over {' and '.join(split_axes)}"] if split_axes else [])]


def _rank_samples(plan: PlanView, rank: int) -> list[str]:
    mine = coordinates(plan, rank).get("data", 0)
    data = plan.data
    rows = []
    for name, size, shares in (("first batch", data.batch, data.shares), ("last batch", data.last, data.last_shares)):
        entries = entries_of(shares, mine)
        if entries:
            entries_text = f"entries {span_text(*entries)} of {size}: {plural(entries[1] - entries[0] + 1, 'sample')}"
            rows.append(
                (name, f"{entries_text}, in {plural(data.microbatches, 'micro-batch')} of up to {data.microbatch}")
            )
    order = "the epoch's shuffled order" if data.shuffle else "the data's own order"
    lines = table(rows)
    if data.shares:
        lines.append(f"entries of {order}; batch k begins at k x {data.batch}")
    stride = axis_of(plan, "data").stride
    if stride > 1:
        group_start = rank - rank % stride
        lines.append(f"ranks {span_text(group_start, group_start + stride - 1)} have the same samples")
    context = axis_of(plan, "context").size
    if context > 1:
        lines.append(f"of each sequence, part {coordinates(plan, rank)['context'] + 1} of {context}")
    return lines


def _rank_memory(plan: PlanView, rank: int) -> list[str]:
    node = class_of(plan, rank)
    if node is None:
        return [f"{UNKNOWN}: {_why(plan)}"]
    memory = memory_of(plan, node, rank)
    rows = [(kind, byte_text(getattr(memory, kind))) for kind in KINDS if getattr(memory, kind)]
    rows.append(("peak", byte_text(memory.peak), _of_limit(plan, memory.peak)))  # type: ignore[arg-type]
    return [*table(rows, right_columns=(1,)), *_peak(memory)]


def _rank_traffic(plan: PlanView, rank: int) -> list[str]:
    node = class_of(plan, rank)
    if node is None:
        return [f"{UNKNOWN}: {_why(plan)}"]
    rows = _traffic_rows(plan, node)
    return table(rows, right_columns=(3, 4), head=TRAFFIC) if rows else ["none: nothing is exchanged"]


def _rank_schedule(plan: PlanView, rank: int) -> list[str]:
    schedule = plan.schedule
    if schedule is None:
        return _schedule(plan)
    row = schedule.rows[coordinates(plan, rank)["pipeline"]]
    return [
        f"{schedule.name}, row {coordinates(plan, rank)['pipeline']}",
        *shorten_lines(wrap_words(row.split(" ")), MOST_LAYERS),
        _key(schedule),
    ]
