"""The proofs of experts: of their axis, their balance loss and their capacity. Each returns the reason why its
proposition fails, or "".

Neighbours along the data axis are in groups of the axis's size. The rank at place n of its group holds the n-th of
equal parts of each layer's experts. So each expert is on one rank of each group, and a row finds it within the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dslc.compiler.graph.proofs.flow import holders
from dslc.compiler.graph.proofs.view import Line, View, collectives, experts_with_balance_loss, experts_with_capacity
from dslc.compiler.ir.actions import Action, Backward, Collective, Forward, ForwardAhead, InputBackward, Payload
from dslc.compiler.ir.program import ExpertParallelStep
from dslc.compiler.ir.records import Network, Stage, Weights

_FORWARD = (Payload.ROW_COUNTS, Payload.EXPERT_ROWS, Payload.EXPERT_RESULTS)
_BACKWARD = (Payload.RESULT_GRADIENTS, Payload.ROW_GRADIENTS)


def routed(view: View) -> str:
    """Checks that each group of ranks holds each expert once, and that rows which a pass sends return: their counts are
    agreed on, as many results come back, and so do their gradients.
    """
    step, data = view.plan.find(ExpertParallelStep), view.plan.axis("data")
    of_experts = [group for _, group in view.plan.of_kind(Weights) if group.experts > 1]
    if step is None:
        travels = next((name for name, action in view.actions.items() if _is_routed(action)), "")
        return f"{travels} sends rows to experts, and no axis shares these" if travels or of_experts else ""
    if step.size < 2 or data.size % step.size or any(group.experts != step.size for group in of_experts):
        return f"{step.size} ranks share experts, on a data axis of {data.size}"
    for layer, experts in step.layers:
        if experts % step.size:
            return f"{experts} experts of {layer} are not in {step.size} equal parts"
    for process, line in view.lines.items():
        if reason := _returns(line, (step.size, data.stride)):
            return f"process {process}: {reason}"
    return ""


def _is_routed(action: Action) -> bool:
    return isinstance(action, Collective) and action.carries in (*_FORWARD, *_BACKWARD)


def _returns(line: Line, group: tuple[int, int]) -> str:
    """Checks the exchanges that follow each pass; a pass of a stage without experts has none."""
    sent: Counter[Payload] = Counter()
    counts: Counter[Payload] = Counter()
    last: Action | None = None
    for name, action in line:
        if not isinstance(action, Collective):
            if reason := _unreturned(sent, counts):
                return f"before {name} {reason}"
            sent, counts, last = Counter(), Counter(), action
        elif _is_routed(action):
            kinds = (Forward, ForwardAhead) if action.carries in _FORWARD else (Backward, InputBackward)
            if (action.operation, action.axis, action.group) != ("all_to_all", "expert", group) or not isinstance(
                last, kinds
            ):
                return f"{name} is among {action.ranks} ranks, {action.stride} apart, after {last}"
            sent[action.carries] += action.bytes
            counts[action.carries] += action.count
    return _unreturned(sent, counts)


def _unreturned(sent: Counter[Payload], counts: Counter[Payload]) -> str:
    agreed, rows, results = _FORWARD
    if not counts[agreed] == counts[rows] == counts[results] or sent[rows] != sent[results]:
        return f"{counts[rows]} all-to-alls send {sent[rows]} bytes of rows, and {sent[results]} return"
    of_results, of_rows = _BACKWARD
    if counts[of_results] != counts[of_rows] or sent[of_results] != sent[of_rows]:
        return f"{sent[of_results]} bytes of gradients go to experts, and {sent[of_rows]} return"
    return ""


def balanced(view: View) -> str:
    """Checks that the tokens of all experts with a balance loss are summed over the ranks that hold other tokens, once
    a step: after the passes that count them, and before the first backward pass. Of a pipeline each process does so for
    its own stages.
    """
    everywhere, routers = holders(view.plan), list(experts_with_balance_loss(view.plan))
    for process, line in view.lines.items():
        experts = sum(count for name, count in routers if _is_on(view, process, name))
        expected = [8 * experts] if experts and everywhere.ranks > 1 else []
        sums = [entry for entry in collectives(line) if entry[2].carries is Payload.BALANCE_COUNTS]
        if [action.bytes for _, _, action in sums] != expected:
            return f"process {process} does not sum the tokens of {experts} experts once"
        if experts and (reason := _untimely(line, sums, (everywhere.ranks, everywhere.stride))):
            return f"process {process}: {reason}"
    return ""


def within_capacity(view: View) -> str:
    """Checks that each forward pass gathers over the data axis the tokens of all experts with a capacity, for it drops
    those beyond. A pass that is computed again may gather again.
    """
    data, routers = view.plan.axis("data"), list(experts_with_capacity(view.plan))
    for process, line in view.lines.items():
        experts = sum(count for name, count in routers if _is_on(view, process, name))
        least = 8 * experts if data.size > 1 else 0
        gathers = [(n, name, each) for n, name, each in collectives(line) if each.carries is Payload.CAPACITY_COUNTS]
        gathered = sum(action.bytes for _, _, action in gathers)
        if not least <= gathered <= 2 * least:
            return f"process {process} gathers {gathered} bytes of the tokens of {experts} experts with a capacity"
        for n, name, action in gathers:
            is_late = any(isinstance(earlier, Backward | InputBackward) for _, earlier in line[:n])
            if is_late or (action.operation, action.group) != ("all_gather", (data.size, data.stride)):
                return f"process {process}: {name} gathers the tokens of experts too late or over other ranks"
    return ""


def _untimely(line: Line, sums: Sequence[tuple[int, str, Collective]], group: tuple[int, int]) -> str:
    """Returns why the tokens of experts are not all counted, and summed, before a backward pass uses them."""
    counting = ForwardAhead if any(isinstance(action, ForwardAhead) for _, action in line) else Forward
    last = max((n for n, (_, action) in enumerate(line) if isinstance(action, counting)), default=0)
    if any(isinstance(action, Backward | InputBackward) for _, action in line[:last]):
        return "a backward pass comes before the tokens of experts are counted"
    for n, name, action in sums:
        is_late = any(isinstance(earlier, Backward | InputBackward) for _, earlier in line[:n])
        if n < last or is_late or action.group != group:
            return f"{name} sums the tokens of experts too early, too late or over other ranks"
    return ""


def _is_on(view: View, process: int, module: str) -> bool:
    network = view.plan.find(Network)
    if network is None or view.plan.axis("pipeline").size == 1:
        return True
    stages = [stage for _, stage in view.plan.of_kind(Stage) if view.homes[stage.index] == view.coordinates[process]]
    names = (layer.name for stage in stages for layer in network.layers[stage.first : stage.last + 1])
    return any(module.startswith(f"{name}.") for name in names)
