"""The second gate, against our own mistakes: proves a plan graph sound after each pass.

A graph that fails is a bug of the compiler, reported as one: `Unsound` names the proposition and what breaks it. It
speaks of what the plan owns; not of control flow in a user's module that depends on data.

Proved, as far as the passes done so far have said something about it:

    devices     every rank has a device, every device one rank
    layers      every layer is on exactly one stage, every stage on exactly one process
    samples     every sample of every batch is on exactly one data rank
    actions     every micro-batch goes forward once and backward once through each stage, on that stage's process;
                each process updates once
    order       the actions, by order and data, have no circle: no rank waits for itself; an exchange of gradients
                follows all backwards of its process, an update everything
    memory      the peak is within the limit
"""

from __future__ import annotations

from collections import Counter

import networkx as nx

from dslc.compiler.graph import PlanGraph

BACKWARD = ("B", "I", "W")

class Unsound(Exception):
    """A plan that is not what it must be: a mistake of the compiler, not of the job."""

    def __init__(self, proposition: str, reason: str, after: str) -> None:
        super().__init__(f"the plan is unsound after `{after}` ({proposition}): {reason}")
        self.proposition = proposition


def verify(plan: PlanGraph) -> None:
    """Raises `Unsound` unless every proposition that can be told holds."""
    for proposition, needs, check in (
        ("devices", "place_processes", _devices),
        ("layers", "place_stages", _layers),
        ("samples", "deal_samples", _samples),
        ("actions", "order_actions", _actions),
        ("order", "order_actions", _order),
        ("memory", "account", _memory),
    ):
        if needs in plan.done:
            reason = check(plan)
            if reason:
                raise Unsound(proposition, reason, plan.done[-1])


def _devices(plan: PlanGraph) -> str:
    devices = sum(data["count"] for _, data in plan.of_kind("device"))
    machines = sum(data["count"] for _, data in plan.of_kind("node"))
    each = sum(data["processes"] for _, data in plan.of_kind("device"))
    if devices != machines * each:
        return f"{devices} devices on {machines} nodes of {each}"
    expected = 0
    for name, data in sorted(plan.of_kind("process"), key=lambda item: item[1]["first"]):
        if data["first"] != expected:
            return f"{name} begins at rank {data['first']}, not {expected}"
        expected = data["last"] + 1
    return "" if expected == devices else f"{expected} ranks on {devices} devices"


def _layers(plan: PlanGraph) -> str:
    model = plan.analysis.model
    if model is None:
        return ""
    expected = 0
    for name, data in sorted(plan.of_kind("stage"), key=lambda item: item[1]["index"]):
        if data["first"] != expected or data["last"] < data["first"]:
            return f"{name} holds layers {data['first']} to {data['last']}, not {expected} on"
        expected = data["last"] + 1
        homes = [b for b in plan.graph.successors(name) if plan.graph.nodes[b]["kind"] == "process"]
        if len(homes) != 1:
            return f"{name} is on {len(homes)} processes"
    return "" if expected == len(model.layers) else f"{expected} of {len(model.layers)} layers are on a stage"


def _samples(plan: PlanGraph) -> str:
    workload, ranks = plan.analysis.workload, plan.analysis.layout.sizes["data"]
    for batch, samples in (("full", workload.batch), ("last", workload.last or 0)):
        runs = sorted(
            (data["first_rank"], data["ranks"], data["samples"])
            for _, data in plan.of_kind("share")
            if data["batch"] == batch
        )
        dealt, expected = 0, 0
        for first, count, size in runs:
            if first != expected:
                return f"data rank {expected} of the {batch} batch has {'two shares' if first < expected else 'none'}"
            expected, dealt = first + count, dealt + count * size
        if dealt != samples or expected != (ranks if samples else 0):
            return f"{dealt} of {samples} samples of the {batch} batch are dealt out to {expected} of {ranks} ranks"
    return ""


def _actions(plan: PlanGraph) -> str:
    homes = {
        data["index"]: plan.graph.nodes[process]["pipeline"]
        for name, data in plan.of_kind("stage")
        for process in plan.graph.successors(name)
    }
    seen: Counter[tuple[int, int, str]] = Counter()
    for name, data in plan.of_kind("action"):
        if data["what"] not in ("F", "B", "I", "W"):
            continue
        if homes and homes.get(data["stage"]) != data["process"]:
            return f"{name} is on process {data['process']}, its stage on {homes.get(data['stage'])}"
        seen[data["stage"], data["microbatch"], data["what"]] += 1
    for stage in homes or {0: 0}:
        for m in range(plan.analysis.layout.microbatches):
            once = [seen[stage, m, kind] for kind in "FBIW"]
            if once not in ([1, 1, 0, 0], [1, 0, 1, 1]):
                return f"micro-batch {m} at stage {stage}: forward {once[0]}, backward {once[1]}, halves {once[2:]}"
    updates = Counter(data["process"] for _, data in plan.of_kind("action") if data["what"] == "update")
    for name, data in plan.of_kind("process"):
        if updates[data["pipeline"]] != 1:
            return f"{name} has {updates[data['pipeline']]} updates"
    return ""


def _order(plan: PlanGraph) -> str:
    actions = plan.actions()
    if not nx.is_directed_acyclic_graph(actions):
        circle = nx.find_cycle(actions)
        return "a circle of waits: " + " -> ".join(edge[0] for edge in circle)
    of_process: dict[int, list[tuple[str, str]]] = {}
    for name, data in plan.of_kind("action"):
        of_process.setdefault(data["process"], []).append((name, data["what"]))
    for name, data in plan.of_kind("action"):
        if data["what"] == "update":
            wanted = {what for _, what in of_process[data["process"]]} - {"update"}
        elif data.get("carries") == "gradients":
            wanted = set(BACKWARD)
        else:
            continue
        before = nx.ancestors(actions, name)
        late = [other for other, what in of_process[data["process"]] if what in wanted and other not in before]
        if late:
            return f"{name} does not wait for {late[0]}"
    return ""


def _memory(plan: PlanGraph) -> str:
    job, layout = plan.analysis.job, plan.analysis.layout
    limit = job.memory.limit or layout.hardware.memory
    for name, data in plan.of_kind("process"):
        memory = data.get("memory")
        if memory and limit and memory.peak > limit:
            return f"{name} holds {memory.peak} bytes, over {limit}"
    return ""
