"""Proofs of places: devices, layers, samples and bytes. Each returns the reason why its proposition fails, or "".
verify.py lists the propositions.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.proofs.view import View
from dslc.compiler.ir.program import DataStep, Training
from dslc.compiler.ir.records import (
    Batches,
    Devices,
    Machines,
    Network,
    PlacementEdge,
    Process,
    Share,
    SharedWeight,
    Stage,
    Weights,
)
from dslc.compiler.placement.axes import AXES


def devices(view: View) -> str:
    plan = view.plan
    device_node, machines = plan.one(Devices), plan.one(Machines)
    if device_node.count != machines.count * device_node.processes:
        return f"{device_node.count} devices on {machines.count} nodes of {device_node.processes}"
    twice = sorted({gpu for gpu in device_node.gpus if device_node.gpus.count(gpu) > 1})
    if twice:
        return f"GPU {twice[0]} is used twice on each node"
    if device_node.gpus and len(device_node.gpus) != device_node.processes:
        return f"{device_node.processes} processes on {len(device_node.gpus)} GPUs of each node"
    expected = 0
    for name, process in _processes(plan):
        if process.first != expected:
            shared = " has two processes" if process.first < expected else f", not {expected}"
            return f"{name} begins at rank {process.first}{shared}"
        expected = process.last + 1
    if expected != device_node.count:
        return f"{expected} ranks on {device_node.count} devices"
    placements = [("devices", "nodes"), *((name, "devices") for name, _ in plan.of_kind(Process))]
    for name, on in placements:
        edge = plan.graph.get_edge_data(name, on)
        if edge is None or not isinstance(edge["relation"], PlacementEdge):
            return f"{name} is not placed on {on}"
    sizes = {axis.name: axis.size for axis in device_node.axes}
    if tuple(axis.name for axis in device_node.axes) != AXES:
        return f"axes {', '.join(axis.name for axis in device_node.axes)}, not {', '.join(AXES)}"
    return (
        _axes(plan) if prod(sizes.values()) == device_node.count else f"axes of {sizes} on {device_node.count} devices"
    )


def _processes(plan: PlanGraph) -> list[tuple[str, Process]]:
    return sorted(plan.of_kind(Process), key=lambda item: item[1].first)


def _axes(plan: PlanGraph) -> str:
    """Checks that the ranks along the axes are all ranks, each once. The processes must be the pipeline's coordinates,
    which contain the groups of all other axes.
    """
    expected = 1
    for axis in reversed(plan.one(Devices).axes):
        if axis.stride != expected:
            return f"neighbours along the {axis.name} axis are {axis.stride} ranks apart, not {expected}"
        expected *= axis.size
    pipeline = plan.axis("pipeline")
    for name, process in _processes(plan):
        for rank in (process.first, process.last):
            if rank // pipeline.stride % pipeline.size != process.pipeline:
                return f"{name} holds rank {rank}, which is not at pipeline coordinate {process.pipeline}"
        if process.first // pipeline.stride != process.last // pipeline.stride:
            return f"{name} holds ranks {process.first} to {process.last}, of several pipeline coordinates"
    return ""


def layers(view: View) -> str:
    plan, network = view.plan, view.plan.find(Network)
    if network is None:
        return ""
    stages_of: dict[int, set[str]] = {}
    for name, process in plan.of_kind(Process):
        stages_of.setdefault(process.pipeline, set()).add(name)
    expected = 0
    for name, stage in sorted(plan.of_kind(Stage), key=lambda item: item[1].index):
        if stage.first != expected or stage.last < stage.first:
            return f"{name} holds layers {stage.first} to {stage.last}, not {expected} on"
        expected = stage.last + 1
        homes = {
            neighbour for neighbour, edge in plan.graph.adj[name].items() if isinstance(edge["relation"], PlacementEdge)
        }
        if homes not in stages_of.values():
            return f"{name} is on {len(homes)} processes, which are not those of one pipeline coordinate"
    return "" if expected == len(network.layers) else f"{expected} of {len(network.layers)} layers are on a stage"


def samples(view: View) -> str:
    plan, batches = view.plan, view.plan.one(Batches)
    ranks = plan.axis("data").size
    for batch, dealt in (("full", batches.full), ("last", batches.last)):
        shares = [share for _, share in plan.of_kind(Share) if share.batch == batch]
        runs = sorted((share.first_rank, share.ranks, share.samples) for share in shares)
        reason = _dealt(runs, dealt, ranks if dealt else 0)
        if not reason and dealt and batches.weights:
            sizes = [samples for _, count, samples in runs for _ in range(count)]
            reason = _proportions(sizes, batches, batches.microbatches if batch == "full" else 1)
            step = plan.find(DataStep)
            if not reason and batch == "full" and step is not None and step.shares != tuple(sizes):
                reason = f"ranks take {step.shares}, not the shares"
        if reason:
            return f"{reason} of the {batch} batch"
    return _entering(view)


def _entering(view: View) -> str:
    """Returns the first share that does not enter at the first stage."""
    plan, first_process = view.plan, view.homes.get(0, 0)
    for name, _ in plan.of_kind(Share):
        edges = plan.graph.adj[name].items()
        on = [
            view.coordinates[plan.node_record(b, Process).index]
            for b, e in edges
            if isinstance(e["relation"], PlacementEdge)
        ]
        if on != [first_process]:
            return f"{name} enters at pipeline coordinate {on}, and the first stage is at {first_process}"
    return ""


def _dealt(runs: list[tuple[int, int, int]], samples: int, ranks: int) -> str:
    ends = [(0, 0, 0), *runs, (ranks, 0, 0)]
    for (start, count, _), (following, _, _) in pairwise(ends):
        expected = start + count
        if following != expected:
            return f"data rank {min(expected, following)} has {'two shares' if following < expected else 'no share'}"
    total = sum(count * size for _, count, size in runs)
    if total != samples:
        return f"{total} samples are dealt out of {samples}"
    return "" if all(size > 0 for _, _, size in runs) else "a share is empty"


def _proportions(sizes: list[int], batches: Batches, unit: int) -> str:
    """Checks that each share is a multiple of the unit and within one unit of its proportion. Shares that were raised
    to one unit are taken from the others.
    """
    samples, total = sum(sizes), sum(batches.weights)
    if len(sizes) != len(batches.weights):
        return f"{len(batches.weights)} weights for {len(sizes)} data ranks"
    exact = [samples * weight / total for weight in batches.weights]
    raised = sum(size - value for size, value in zip(sizes, exact, strict=True) if size == unit and value < unit)
    for rank, (size, value) in enumerate(zip(sizes, exact, strict=True)):
        if size % unit:
            return f"data rank {rank} has {size} samples, which are no {unit} equal micro-batches,"
        if size - value >= unit or value - size >= unit + raised:
            return f"data rank {rank} has {size} samples, and {value:.4g} by its weight,"
    return ""


def memory(view: View) -> str:
    limit = view.plan.one(Devices).memory
    for name, process in view.plan.of_kind(Process):
        if process.memory and limit and process.memory.peak > limit:
            return f"{name} holds {process.memory.peak} bytes, over {limit}"
        if process.memory:
            parameter_bytes = 0 if "parameters" in _offloaded(view.plan) else _kept_bytes(view, process.pipeline)
            if process.memory.parameters != parameter_bytes:
                return (
                    f"{name} has {parameter_bytes} bytes of parameters, and {process.memory.parameters} by the account"
                )
            fault = _share_memory(view, process, process.memory.peak)
            if fault:
                return f"{name} {fault}"
    return ""


def _share_memory(view: View, process: Process, peak: int) -> str:
    """Checks that each smaller share has its memory, at most the largest share's."""
    batches = view.plan.one(Batches)
    sizes = {share.samples for _, share in view.plan.of_kind(Share) if share.batch == "full"}
    smaller = sizes - {max(sizes, default=0)} if batches.weights and not batches.most_share else set()
    if {each.samples for each in process.share_memory} != smaller:
        return f"has memory of the shares {[each.samples for each in process.share_memory]}, not of {sorted(smaller)}"
    if process.even_memory is not None and process.even_memory.peak > peak:
        return f"holds {process.even_memory.peak} bytes for an even routing to experts, over {peak} for an uneven one"
    largest_memory = max((each.memory.peak for each in process.share_memory), default=0)
    return f"holds {largest_memory} bytes for a smaller share, over {peak}" if largest_memory > peak else ""


def _offloaded(plan: PlanGraph) -> tuple[str, ...]:
    training = plan.find(Training)
    return training.offload if training else ()


def _kept_bytes(view: View, coordinate: int) -> int:
    """Returns the bytes of parameters that a rank at a pipeline coordinate keeps; a weight of two stages is one."""
    groups = [group for _, group in view.plan.of_kind(Weights) if view.homes.get(group.stage) == coordinate]
    twice = 0
    for _, shared in view.plan.of_kind(SharedWeight):
        copies = sum(view.homes.get(stage) == coordinate for stage in shared.stages)
        twice += 4 * shared.numbers * max(0, copies - 1)
    return sum(group.kept_bytes for group in groups) - twice
