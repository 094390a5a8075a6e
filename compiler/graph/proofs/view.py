"""A plan graph prepared for the proofs: read once, so that each proof is a walk over lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.ir.actions import Action, Collective, Message
from dslc.compiler.ir.program import ModelStep
from dslc.compiler.ir.records import Process, Stage, TransferEdge
from dslc.compiler.ir.steps import ModuleStep
from dslc.dsl.record import Record, record

Line = list[tuple[str, Action]]
Key = tuple[Any, ...]  # the object of a meeting: a message, or the n-th collective of an axis
WIDE = ("pipeline", "all")  # axes whose collectives join ranks of several coordinates


@record
class View(Record):
    """`lines` are the actions of each process in order; `broken` says why there are none.

    `homes` has the pipeline coordinate of each stage, `coordinates` the pipeline coordinate of each process. `ends_of`
    are the ends of each message and each collective, `key_of` the message or collective of an action. `handed` is an
    action's input without a message.
    """

    plan: PlanGraph
    actions: dict[str, Action]
    lines: dict[int, Line]
    broken: str
    homes: dict[int, int]
    coordinates: dict[int, int]
    ends_of: dict[Key, list[str]]
    key_of: dict[str, Key]
    handed: dict[str, list[str]]

    def action(self, name: str) -> Action:
        return self.actions[name]


def view(plan: PlanGraph) -> View:
    names, broken_lines = plan.lines()
    actions = dict(plan.of_kind(Action))
    lines = {process: [(name, actions[name]) for name in row] for process, row in names.items()}
    processes = dict(plan.of_kind(Process))
    coordinates = {process.index: process.pipeline for process in processes.values()}
    ends_of, key_of = _meetings(lines, coordinates)
    handed: dict[str, list[str]] = {}
    for sender, name, data in plan.graph.edges(data=True):
        meet = sender in key_of and key_of[sender] == key_of.get(name)
        if isinstance(data["relation"], TransferEdge) and sender in actions and not meet:
            handed.setdefault(name, []).append(sender)
    homes = {}
    for name, stage in plan.of_kind(Stage):
        on = [process for process in plan.graph.successors(name) if process in processes]
        homes[stage.index] = processes[on[0]].pipeline if on else -1
    return View(
        plan=plan,
        actions=actions,
        lines=lines,
        broken=broken_lines,
        homes=homes,
        coordinates=coordinates,
        ends_of=ends_of,
        key_of=key_of,
        handed=handed,
    )


def _meetings(lines: dict[int, Line], coordinates: dict[int, int]) -> tuple[dict[Key, list[str]], dict[str, Key]]:
    ends_of: dict[Key, list[str]] = {}
    key_of: dict[str, Key] = {}
    for process, line in lines.items():
        issued: dict[str, int] = {}
        for name, action in line:
            match action:
                case Message():
                    key = message(action)
                case Collective() if not action.is_message:  # both messages are posted, then both waited for
                    axis = action.axis
                    issued[axis] = issued.get(axis, 0) + 1
                    key = (axis, None if axis in WIDE else coordinates.get(process), issued[axis])
                case _:
                    continue
            ends_of.setdefault(key, []).append(name)
            key_of[name] = key
    return ends_of, key_of


def message(action: Message) -> Key:
    """Returns ("message", from a stage to the next or the one before, the sender, the micro-batch) for one end."""
    return "message", action.way, action.sender, action.microbatch


def collectives(line: Line) -> Iterator[tuple[int, str, Collective]]:
    """Yields the position, the name and the record of each collective."""
    for n, (name, action) in enumerate(line):
        if isinstance(action, Collective):
            yield n, name, action


def experts_with_balance_loss(plan: PlanGraph) -> Iterator[tuple[str, int]]:
    """Yields the routers of layers that a loss balances, by module name, with their numbers of experts."""
    model = plan.find(ModelStep)
    if model is not None and model.root is not None:
        yield from _routers_with("factor", model.root, "")


def experts_with_capacity(plan: PlanGraph) -> Iterator[tuple[str, int]]:
    """Yields the routers of layers whose experts have a capacity, by module name, with their numbers of experts."""
    model = plan.find(ModelStep)
    if model is not None and model.root is not None:
        yield from _routers_with("capacity", model.root, "")


def _routers_with(argument: str, step: ModuleStep, path: str) -> Iterator[tuple[str, int]]:
    for child in step.children:
        name = f"{path}{child.name}"
        if child.kind == ".Router" and child.arguments[argument] is not None:
            yield name, child.arguments["experts"]
        yield from _routers_with(argument, child, f"{name}.")
