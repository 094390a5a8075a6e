"""The passes that build the plan graph, in one tuple. Each takes a valid graph and returns a valid graph: `verify` runs
after each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dslc.compiler.cost.schedule_cost import held
from dslc.compiler.cost.traffic import SHARED, message_bytes, messages
from dslc.compiler.graph.exchanges import exchanges
from dslc.compiler.graph.graph import PlanGraph, unknown
from dslc.compiler.graph.verify import verify
from dslc.compiler.placement.lowering import Issue, lowered
from dslc.compiler.placement.sharding import sharding_of
from dslc.compiler.placement.tensor_plan import tensor_plan
from dslc.compiler.rules.analysis import Analysis

Pass = Callable[[PlanGraph], None]


def place_devices(plan: PlanGraph) -> None:
    """Machines and their devices."""
    layout = plan.analysis.layout
    plan.graph.add_node("nodes", kind="node", count=layout.nodes)
    plan.graph.add_node("devices", kind="device", count=layout.world_size, processes=layout.processes, gpus=layout.gpus)
    plan.graph.add_edge("devices", "nodes", relation="placement")


def place_processes(plan: PlanGraph) -> None:
    """A process on each device, the ranks of one pipeline coordinate together."""
    layout = plan.analysis.layout
    for p in range(layout.sizes["pipeline"]):
        ranks = layout.ranks(p)
        plan.graph.add_node(f"process {p}", kind="process", index=p, pipeline=p, first=ranks[0], last=ranks[-1])
        plan.graph.add_edge(f"process {p}", "devices", relation="placement")


def place_stages(plan: PlanGraph) -> None:
    """The model's stages on the processes."""
    pipeline = plan.analysis.pipeline
    if pipeline is None:
        return
    placement = pipeline.schedule.placement if pipeline.schedule else (0,)
    for index, (layers, rank) in enumerate(zip(pipeline.stages, placement, strict=True)):
        plan.graph.add_node(f"stage {index}", kind="stage", index=index, first=layers[0], last=layers[-1])
        plan.graph.add_edge(f"stage {index}", f"process {rank}", relation="placement")


def deal_samples(plan: PlanGraph) -> None:
    """Shares of a batch on the data ranks; they enter at the process of the first stage."""
    workload = plan.analysis.workload
    for batch, samples in (("full", workload.batch), ("last", workload.last_trained or 0)):
        for first, ranks, size in shares(samples, plan.analysis.layout.sizes["data"]):
            name = f"share {batch} {first}"
            plan.graph.add_node(name, kind="share", batch=batch, first_rank=first, ranks=ranks, samples=size)
            plan.graph.add_edge(name, "process 0", relation="data", bytes=0)


def shares(samples: int, ranks: int) -> list[tuple[int, int, int]]:
    """`samples` dealt out in order, sizes differing by at most one, the larger first: (first rank, ranks, size)."""
    size, rest = divmod(samples, ranks)
    return [run for run in ((0, rest, size + 1), (rest, ranks - rest, size)) if run[1] and run[2]]


def order_actions(plan: PlanGraph) -> None:
    """What each process does in a step, one thing after another, and what stages hand to one another."""
    analysis = plan.analysis
    if unknown(plan):
        return
    schedule = analysis.pipeline.schedule if analysis.pipeline else None
    if schedule:
        rows = lowered(schedule)
    else:
        rows = (tuple(Issue(kind, 0, m) for m in range(analysis.layout.microbatches) for kind in ("F", "B")),)
    gathers = sharding_of(analysis.job, analysis.layout).engine == "fsdp"
    for p, row in enumerate(rows):
        names = []
        for issue in (part for entry in row for part in entry.parts):
            if issue.kind == "RESHARD" or (issue.kind in ("UNSHARD", "REDUCE_GRAD") and not gathers):
                continue
            names.append(_name(str(issue), plan))
            plan.graph.add_node(
                names[-1], kind="action", process=p, what=issue.kind, stage=issue.stage, microbatch=issue.microbatch
            )
        names.append(f"update {p}")
        plan.graph.add_node(names[-1], kind="action", process=p, what="update", stage=-1, microbatch=-1)
        plan.line(names, instead_of=[])
    if schedule:
        _hand_over(plan)


def _name(text: str, plan: PlanGraph) -> str:
    """A name that no action has yet: a stage is gathered again where it was let go."""
    name, n = text, 1
    while name in plan.graph:
        n += 1
        name = f"{text} ({n})"
    return name


def _hand_over(plan: PlanGraph) -> None:
    """Outputs to the next stage, and gradients of inputs to the one before, where that is on another rank."""
    analysis = plan.analysis
    assert analysis.staging is not None
    placement = analysis.staging.placement
    cuts = tensor_plan(analysis.job, analysis.layout.sizes["tensor"], analysis.staging.model)
    facts = messages(analysis.staging, cuts)
    for stage, sent in enumerate(facts):
        size = sum(message_bytes(fact) for fact in sent)
        shape, dtype = tuple(fact.shape for fact in sent), tuple(fact.dtype for fact in sent)
        if placement[stage] == placement[stage + 1]:
            continue  # it is there already
        for m in range(analysis.layout.microbatches):
            for send, receive in (
                (f"{stage}SEND_F{m}", f"{stage + 1}RECV_F{m}"),
                (f"{stage + 1}SEND_B{m}", f"{stage}RECV_B{m}"),
            ):
                plan.graph.add_edge(send, receive, relation="data", bytes=size)
                for end in (send, receive):
                    plan.graph.nodes[end].update(shape=shape, dtype=dtype, count=len(sent), bytes=size)


def exchange(plan: PlanGraph) -> None:
    """The collectives of a step, beside the actions that cause them."""
    analysis = plan.analysis
    sharding = sharding_of(analysis.job, analysis.layout)
    lines, _ = plan.lines()
    for p, cost in enumerate(analysis.costs):
        plan.graph.nodes[f"process {p}"]["traffic"] = cost.traffic
        line = [plan.graph.nodes[name] for name in lines[p]]
        beside: dict[tuple[int, bool], list[str]] = {}
        # What stages hand over is there already.
        others = [t for t in cost.traffic if t.operation not in ("send", "receive") or t.what == SHARED]
        for n, traffic in enumerate(others):
            for k, (place, data) in enumerate(exchanges(sharding, traffic, line)):
                name = f"exchange {p}.{n}.{k}"
                plan.graph.add_node(name, kind="action", process=p, stage=-1, microbatch=-1, **data)
                beside.setdefault(place, []).append(name)
        names = []
        for n, name in enumerate(lines[p]):
            names += [*beside.get((n, False), ()), name, *beside.get((n, True), ())]
        plan.line(names, instead_of=lines[p])


def account(plan: PlanGraph) -> None:
    """Bytes by kind on each process, and the micro-batches that each stage holds."""
    pipeline = plan.analysis.pipeline
    if pipeline is not None:
        most = held(pipeline.schedule) if pipeline.schedule else (1,)
        for index, count in enumerate(most):
            plan.graph.nodes[f"stage {index}"]["held"] = count
    for p, cost in enumerate(plan.analysis.costs):
        plan.graph.nodes[f"process {p}"]["memory"] = cost.memory


PASSES: tuple[Pass, ...] = (
    place_devices,  # needs nothing
    place_processes,  # needs devices to put them on
    place_stages,  # needs processes
    deal_samples,  # needs processes: samples enter at the first stage
    order_actions,  # needs stages: an action is of a stage
    exchange,  # needs actions: collectives stand beside what causes them
    account,  # needs processes; last, because it is checked against the limit
)


def build_graph(analysis: Analysis) -> PlanGraph:
    """Runs the passes, each one verified."""
    plan = PlanGraph(analysis)
    for step in PASSES:
        step(plan)
        plan = replace(plan, done=(*plan.done, step.__name__))
        verify(plan)
    return plan
