"""Proofs of what is where: devices, layers, samples and bytes. Each gives the reason why its proposition does not hold,
or nothing. The propositions are told in `verify`."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

from dslc.compiler.graph.graph import PlanGraph
from dslc.compiler.graph.proof_view import View
from dslc.compiler.placement.layout import AXES


def devices(view: View) -> str:
    plan = view.plan
    layout = plan.analysis.layout
    count = sum(data["count"] for _, data in plan.of_kind("device"))
    machines = sum(data["count"] for _, data in plan.of_kind("node"))
    each = sum(data["processes"] for _, data in plan.of_kind("device"))
    if count != machines * each:
        return f"{count} devices on {machines} nodes of {each}"
    for name, data in plan.of_kind("device"):
        gpus = data["gpus"]
        twice = sorted({gpu for gpu in gpus if gpus.count(gpu) > 1})
        if twice:
            return f"{name}: GPU {twice[0]} is used twice on each node"
        if gpus and len(gpus) != each:
            return f"{name}: {each} processes on {len(gpus)} GPUs of each node"
    expected = 0
    for name, data in _processes(plan):
        if data["first"] != expected:
            shared = " has two processes" if data["first"] < expected else f", not {expected}"
            return f"{name} begins at rank {data['first']}{shared}"
        expected = data["last"] + 1
    if expected != count:
        return f"{expected} ranks on {count} devices"
    return _axes(plan) if prod(layout.sizes.values()) == count else f"axes of {layout.sizes} on {count} devices"


def _processes(plan: PlanGraph) -> list[tuple[str, dict[str, Any]]]:
    return sorted(plan.of_kind("process"), key=lambda item: item[1]["first"])


def _axes(plan: PlanGraph) -> str:
    """Whether the processes are the pipeline's coordinates, which is what keeps the groups of all other axes within."""
    layout = plan.analysis.layout
    inner = prod(layout.sizes[axis] for axis in AXES if axis != "pipeline")
    for name, data in _processes(plan):
        for rank in (data["first"], data["last"]):
            if rank // inner != data["pipeline"] or layout.coordinates(rank)["pipeline"] != data["pipeline"]:
                return f"{name} holds rank {rank}, which is not at pipeline coordinate {data['pipeline']}"
    return ""


def layers(view: View) -> str:
    plan = view.plan
    model = plan.analysis.model
    if model is None:
        return ""
    at: dict[int, set[str]] = {}
    for name, data in plan.of_kind("process"):
        at.setdefault(data["pipeline"], set()).add(name)
    expected = 0
    for name, data in sorted(plan.of_kind("stage"), key=lambda item: item[1]["index"]):
        if data["first"] != expected or data["last"] < data["first"]:
            return f"{name} holds layers {data['first']} to {data['last']}, not {expected} on"
        expected = data["last"] + 1
        homes = {b for b in plan.graph.successors(name) if plan.graph.nodes[b]["kind"] == "process"}
        if homes not in at.values():
            return f"{name} is on {len(homes)} processes, which are not those of one pipeline coordinate"
    return "" if expected == len(model.layers) else f"{expected} of {len(model.layers)} layers are on a stage"


def samples(view: View) -> str:
    plan = view.plan
    workload, ranks = plan.analysis.workload, plan.analysis.layout.sizes["data"]
    for batch, dealt in (("full", workload.batch), ("last", workload.last_trained or 0)):
        runs = sorted(
            (data["first_rank"], data["ranks"], data["samples"])
            for _, data in plan.of_kind("share")
            if data["batch"] == batch
        )
        reason = _dealt(runs, dealt, ranks if dealt else 0)
        if reason:
            return f"{reason} of the {batch} batch"
    return ""


def _dealt(runs: list[tuple[int, int, int]], samples: int, ranks: int) -> str:
    ends = [(0, 0, 0), *runs, (ranks, 0, 0)]
    for (first, count, _), (following, _, _) in pairwise(ends):
        expected = first + count
        if following != expected:
            return f"data rank {min(expected, following)} has {'two shares' if following < expected else 'no share'}"
    total = sum(count * size for _, count, size in runs)
    if total != samples:
        return f"{total} samples are dealt out of {samples}"
    return "" if all(size > 0 for _, _, size in runs) else "a share is empty"


def memory(view: View) -> str:
    plan = view.plan
    job, layout = plan.analysis.job, plan.analysis.layout
    limit = job.memory.limit or layout.hardware.memory
    for name, data in plan.of_kind("process"):
        found = data.get("memory")
        if found and limit and found.peak > limit:
            return f"{name} holds {found.peak} bytes, over {limit}"
    return ""
