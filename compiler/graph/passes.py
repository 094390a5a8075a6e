"""The passes that build the plan graph, in one tuple. Each takes a valid graph and leaves a valid graph.

A pass sees the plan and its arguments, which are records; so it runs on a plan of any origin. build.py computes the
arguments of each pass from the analysis of a job.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.proofs.view import message
from dslc.compiler.ir import records
from dslc.compiler.ir.actions import Action, Collective, Message, StageAction, Update
from dslc.compiler.ir.memory import MemoryNode
from dslc.compiler.operations.moments import IN_SCHEDULE, StepOperation, traffic
from dslc.compiler.placement.shares import deal, equal_share_runs, share_runs
from dslc.dsl.record import Record, record


def add_constants(plan: PlanGraph, constants: Mapping[str, records.NodeRecord]) -> None:
    """Adds the constants of the job; if a size is unknown that a run needs, what is known without it."""
    for name, constant in constants.items():
        plan.put(name, constant)


def place_devices(plan: PlanGraph, machines: records.Machines, devices: records.Devices) -> None:
    plan.put("nodes", machines)
    plan.put("devices", devices)
    plan.relate("devices", "nodes", records.PlacementEdge())


def place_processes(plan: PlanGraph) -> None:
    """Adds a process on each device, the ranks of one pipeline coordinate together."""
    pipeline = plan.axis("pipeline")
    for p in range(pipeline.size):
        first = p * pipeline.stride
        plan.put(f"process {p}", records.Process(index=p, pipeline=p, first=first, last=first + pipeline.stride - 1))
        plan.relate(f"process {p}", "devices", records.PlacementEdge())


def place_stages(
    plan: PlanGraph, network: records.Network | None, stages: Sequence[records.Stage], placement: Sequence[int]
) -> None:
    """Adds the model's layers in stages, and places these on the processes of their coordinates."""
    if network is not None:
        plan.put("network", network)
    for stage, coordinate in zip(stages, placement, strict=True):
        plan.put(f"stage {stage.index}", stage)
        plan.relate(f"stage {stage.index}", f"process {coordinate}", records.PlacementEdge())


def hold_weights(
    plan: PlanGraph,
    weights: Mapping[str, records.Weights | records.SharedWeight],
    numbers: Mapping[int, int],
    dealt: Mapping[int, Sequence[int]],
) -> None:
    """Adds the parameters of each stage, in groups that are gathered and summed together, and the weights that several
    stages share. `numbers` counts the parameters of each stage, `dealt` the parameters that each rank of a process
    updates.
    """
    for name, group in weights.items():
        plan.put(name, group)
    for stage, count in numbers.items():
        plan.change(f"stage {stage}", numbers=count)
    for process, counts in dealt.items():
        plan.change(f"process {process}", dealt=tuple(counts))


def deal_samples(plan: PlanGraph, batches: records.Batches) -> None:
    """Adds the shares of a batch on the data ranks; they enter at the process of the first stage."""
    plan.put("batches", batches)
    processes = dict(plan.of_kind(records.Process))
    enters = [name for name in plan.graph.adj.get("stage 0", ()) if name in processes]
    full = deal(batches.full, batches.weights, batches.microbatches) if batches.weights else ()
    for batch, samples in (("full", batches.full), ("last", batches.last)):
        shares = full and (full if batch == "full" else deal(samples, full))
        for first, ranks, size in share_runs(shares) if full else equal_share_runs(samples, plan.axis("data").size):
            name = f"share {batch} {first}"
            plan.put(name, records.Share(batch=batch, first_rank=first, ranks=ranks, samples=size))
            plan.relate(name, enters[0] if enters else "process 0", records.PlacementEdge())


def account(
    plan: PlanGraph,
    costs: Sequence[tuple[MemoryNode, int, tuple[records.ShareMemory, ...], MemoryNode | None]],
    held: Sequence[int],
) -> None:
    """Adds bytes by kind and FLOPs to each process, and to each stage the micro-batches that it holds."""
    for index, count in enumerate(held):
        plan.change(f"stage {index}", held=count)
    for p, (memory, flops, share_memory, even_memory) in enumerate(costs):
        plan.change(f"process {p}", memory=memory, flops=flops, share_memory=share_memory, even_memory=even_memory)


def estimate_step(plan: PlanGraph, estimate: records.Estimate | None) -> None:
    """Adds the predicted time of a step, if it is known."""
    if estimate is not None:
        plan.put("estimate", estimate)


def order_actions(plan: PlanGraph, rows: Sequence[Iterable[StageAction]], schedule: records.Schedule | None) -> None:
    """Adds the actions of each process in a step, in order, and the transfers between stages."""
    for p, row in enumerate(rows):
        names = []
        for action in (*row, Update(process=p)):
            names.append(_name(str(action), plan))
            plan.put(names[-1], action)
        plan.line(names, instead_of=[])
    if schedule is not None:
        plan.put("schedule", schedule)
    ends = {(end.operation, message(end)): (name, end) for name, end in plan.of_kind(Message)}
    for (operation, key), (name, end) in ends.items():
        if operation == "send":
            plan.relate(name, ends["receive", key][0], records.TransferEdge(bytes=end.bytes))


def _name(text: str, plan: PlanGraph) -> str:
    """Returns a name that no action has yet: a stage is gathered again after it was freed."""
    name, n = text, 1
    while name in plan.graph:
        n += 1
        name = f"{text} ({n})"
    return name


class InsertionPoint(NamedTuple):
    """Before or after the action at `position` of a line."""

    position: int
    after: bool


def _insertions(
    process: int, operation: StepOperation, line: Sequence[Action]
) -> Iterator[tuple[InsertionPoint, Collective]]:
    """Yields the actions that an operation becomes, each with its place in the line of the process.

    Its count and bytes are divided over the actions beside which it stands, so that the sums are kept. All ranks of a
    process do the same, so all of them issue the collectives at one place in the same order; the order of operations
    within one action is torch's own, and the same on all ranks.
    """
    points = _points(operation, line)
    assert points, f"no action of process {process} has {operation} beside it"
    for n, point in enumerate(points):
        before, after = (operation.count * m // len(points) for m in (n, n + 1))
        size = operation.bytes * after // operation.count - operation.bytes * before // operation.count
        if after > before:
            yield (
                point,
                Collective(
                    process=process,
                    operation=operation.operation,
                    axis=operation.axis,
                    carries=operation.what,
                    dtype=operation.dtype,
                    count=after - before,
                    bytes=size,
                    ranks=operation.ranks,
                    stride=operation.stride,
                    run=operation.run,
                    weights=operation.weights,
                    when=operation.when,
                ),
            )


def _points(operation: StepOperation, line: Sequence[Action]) -> list[InsertionPoint]:
    moment, stage = operation.moment, operation.stage
    positions = [
        n
        for n, action in enumerate(line)
        if isinstance(action, moment.kinds)
        and (stage is None or (isinstance(action, StageAction) and action.stage == stage))
    ]
    if operation.occurrences is not None:
        positions = [positions[n] for n in operation.occurrences]
    chosen = {"each": positions, "first": positions[:1], "last": positions[-1:]}[moment.which]
    return [InsertionPoint(n, moment.after) for n in chosen]


def exchange(plan: PlanGraph, operations: Sequence[Sequence[StepOperation]]) -> None:
    """Adds the collectives of a step, beside the actions that cause them, and their sums to each process."""
    lines, _ = plan.lines()
    for p, row in enumerate(operations):
        plan.change(f"process {p}", traffic=traffic(row))
        line = [plan.node_record(name, Action) for name in lines[p]]
        beside: dict[InsertionPoint, list[Collective]] = {}
        for operation in (each for each in row if each.moment != IN_SCHEDULE):
            for point, action in _insertions(p, operation, line):
                beside.setdefault(point, []).append(action)
        names: list[str] = []
        count = itertools.count()
        for n, name in enumerate(lines[p]):
            for is_after in (False, True):
                for collective in beside.get(InsertionPoint(n, is_after), ()):
                    names.append(f"exchange {p}.{next(count)}")
                    plan.put(names[-1], collective)
                names += [] if is_after else [name]
        plan.line(names, instead_of=lines[p])


@record
class Pass(Record):
    """A pass, and the passes that it needs before it."""

    function: Callable[..., None]
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.function.__name__


PASSES: tuple[Pass, ...] = (
    Pass(function=add_constants),
    Pass(function=place_devices),
    Pass(function=place_processes, needs=("place_devices",)),
    Pass(function=place_stages, needs=("place_processes",)),
    Pass(function=hold_weights, needs=("place_stages",)),
    Pass(function=deal_samples, needs=("place_stages",)),  # samples enter at the first stage
    Pass(function=account, needs=("place_stages",)),
    Pass(function=estimate_step),
    Pass(function=order_actions, needs=("place_stages",)),
    Pass(function=exchange, needs=("hold_weights", "order_actions")),
)
