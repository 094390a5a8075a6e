"""The passes that build the plan graph, in one tuple. Each takes a valid graph and returns a valid graph: `verify` runs
after each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dslc.compiler.analyse import Analysis
from dslc.compiler.graph import PlanGraph
from dslc.compiler.verify import verify

Pass = Callable[[PlanGraph], None]


def place_devices(plan: PlanGraph) -> None:
    """Machines and their devices."""
    layout = plan.analysis.layout
    plan.graph.add_node("nodes", kind="node", count=layout.nodes)
    plan.graph.add_node("devices", kind="device", count=layout.world_size, processes=layout.processes)
    plan.graph.add_edge("devices", "nodes", relation="placement")


def place_processes(plan: PlanGraph) -> None:
    """A process on each device, the ranks of one pipeline coordinate together."""
    layout = plan.analysis.layout
    for p in range(layout.sizes["pipeline"]):
        ranks = layout.ranks(p)
        plan.graph.add_node(f"process {p}", kind="process", pipeline=p, first=ranks[0], last=ranks[-1])
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
    for batch, samples in (("full", workload.batch), ("last", workload.last or 0)):
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
    pipeline = analysis.pipeline
    schedule = pipeline.schedule if pipeline else None
    for p in range(analysis.layout.sizes["pipeline"]):
        work: list[tuple[str, int, int]]
        if schedule:
            work = [(a.kind, a.stage, a.microbatch) for a in schedule.work(p)]
        else:
            work = [(kind, 0, m) for m in range(analysis.layout.microbatches) for kind in ("F", "B")]
        _chain(plan, p, work)
    if schedule:
        _hand_over(plan)


def _chain(plan: PlanGraph, process: int, work: list[tuple[str, int, int]]) -> None:
    before = None
    for what, stage, microbatch in work:
        name = f"{stage}{what}{microbatch}"
        plan.graph.add_node(
            name, kind="action", process=process, what=what, stage=stage, microbatch=microbatch
        )
        if before:
            plan.graph.add_edge(before, name, relation="order")
        before = name
    plan.graph.add_node(f"update {process}", kind="action", process=process, what="update", stage=-1, microbatch=-1)
    if before:
        plan.graph.add_edge(before, f"update {process}", relation="order")


def _hand_over(plan: PlanGraph) -> None:
    """Outputs to the next stage, gradients of inputs to the one before."""
    analysis = plan.analysis
    assert analysis.pipeline is not None and analysis.model is not None
    stages, layers = analysis.pipeline.stages, analysis.model.layers
    element = 4 if analysis.job.train.precision.word == "fp32" else 2
    for stage in range(len(stages) - 1):
        numbers = 1
        for dim in layers[stages[stage][-1]].output.shape:
            numbers *= dim
        size = numbers * analysis.workload.microbatch * element
        for m in range(analysis.layout.microbatches):
            plan.graph.add_edge(f"{stage}F{m}", f"{stage + 1}F{m}", relation="data", bytes=size)
            sender = f"{stage + 1}I{m}" if f"{stage + 1}I{m}" in plan.graph else f"{stage + 1}B{m}"
            receiver = f"{stage}I{m}" if f"{stage}I{m}" in plan.graph else f"{stage}B{m}"
            plan.graph.add_edge(sender, receiver, relation="data", bytes=size)


def exchange(plan: PlanGraph) -> None:
    """The collectives a step owns: before the update, after the last backward that feeds them."""
    for p, cost in enumerate(plan.analysis.costs):
        update = f"update {p}"
        before = next(iter(plan.graph.predecessors(update)), None)
        for n, traffic in enumerate(t for t in cost.traffic if t.axis == "data"):
            name = f"exchange {p}.{n}"
            plan.graph.add_node(
                name,
                kind="action",
                process=p,
                what=traffic.operation,
                stage=-1,
                microbatch=-1,
                axis=traffic.axis,
                carries=traffic.what,
                bytes=traffic.bytes,
                count=traffic.count,
            )
            if before:
                plan.graph.add_edge(before, name, relation="data", bytes=traffic.bytes)
            plan.graph.add_edge(name, update, relation="order")


def account(plan: PlanGraph) -> None:
    """Bytes by kind on each process."""
    for p, cost in enumerate(plan.analysis.costs):
        plan.graph.nodes[f"process {p}"]["memory"] = cost.memory


PASSES: tuple[Pass, ...] = (
    place_devices,  # needs nothing
    place_processes,  # needs devices to put them on
    place_stages,  # needs processes
    deal_samples,  # needs processes: samples enter at the first stage
    order_actions,  # needs stages: an action is of a stage
    exchange,  # needs actions: gradients follow the last backward
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
