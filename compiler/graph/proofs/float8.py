"""The proof of weights that are gathered in 8 bits. It returns the reason why the proposition fails, or ""."""

from __future__ import annotations

from dslc.compiler.graph.proofs.flow import holders_of, weights_by_stage
from dslc.compiler.graph.proofs.view import Line, View, collectives
from dslc.compiler.ir.actions import Collective, Payload, Update
from dslc.compiler.ir.records import Weights


def scaled(view: View) -> str:
    """Checks that the ranks with the shares of weights that are gathered in 8 bits agree on their scales, once a step:
    before the first of these weights is gathered, and before the update that changes them.
    """
    of_stage = weights_by_stage(view)
    for name, group in view.plan.of_kind(Weights):
        if (group.float8 > 0) != (group.scales > 0) or (group.scales and group.dtype != "uint8"):
            return f"{name} have {group.float8} numbers in 8 bits with {group.scales} scales, gathered as {group.dtype}"
    for process, line in view.lines.items():
        stages = [s for s in of_stage if view.homes.get(s) == view.coordinates.get(process)]
        due = {name: group for s in stages for name, group in of_stage[s].items() if group.scales}
        if reason := _check_line(view, line, due):
            return f"process {process}: {reason}"
    return ""


def _check_line(view: View, line: Line, due: dict[str, Weights]) -> str:
    """Walks a process; `due` are the weights whose scales the ranks must agree on."""
    missing = set(due)
    for n, name, action in collectives(line):
        if action.gathers_parameters and (early := missing & set(action.weights)):
            return f"{name} gathers {min(early)} without scales"
        if action.carries is not Payload.WEIGHT_SCALES:
            continue
        if not set(action.weights) <= missing:
            return f"{name} is of weights that need no scales, or have them"
        if any(isinstance(earlier, Update) for _, earlier in line[:n]):
            return f"{name} comes after the update"
        if reason := _among_shards(view, name, action, [due[group] for group in action.weights]):
            return reason
        missing -= set(action.weights)
    return f"{min(missing)} have no scales" if missing else ""


def _among_shards(view: View, name: str, action: Collective, groups: list[Weights]) -> str:
    """Checks that an all-reduce has a number for each weight, from the ranks that have the shares."""
    count = sum(group.scales for group in groups)
    if (action.operation, action.count, action.bytes, action.dtype) != ("all_reduce", 1, 4 * count, "float32"):
        return f"{name} is no all-reduce of {count} numbers"
    neighbours = {holders_of(view.plan, group).covered(action.group) for group in groups}
    sound = neighbours == {1} and {group.shards for group in groups} == {action.ranks}
    return "" if sound else f"{name} is not among the ranks that have the shares"
