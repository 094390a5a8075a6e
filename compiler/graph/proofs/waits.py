"""Proofs that nothing hangs. Each returns the reason why its proposition fails, or "".

Model: the strictest. A process runs one action after another; a send completes with its receive, a collective with the
last of its ranks. A process also waits for a transfer without a message (`data` edges). Torch waits less: its sends are
finished at the end of a step. So a plan that does not hang here does not hang there.

A process stands for ranks that do the same. If a pipeline coordinate has several processes, they are assumed to share
every group within it, and every connection out of it. This is stricter than the truth.
"""

from __future__ import annotations

from itertools import zip_longest

from dslc.compiler.graph.proofs.view import Key, View, message
from dslc.compiler.ir.actions import Collective, Message
from dslc.compiler.ir.records import TransferEdge


def ends(view: View) -> str:
    homes = view.homes
    members_of: dict[int, set[int]] = {}
    for index, coordinate in view.coordinates.items():
        members_of.setdefault(coordinate, set()).add(index)
    for key, names in view.ends_of.items():
        if key[0] == "message":
            _, way, stage, _ = key
            reason = _two_sides(
                view,
                names,
                members_of.get(homes.get(stage, -1), set()),
                members_of.get(homes.get(stage + way, -1), set()),
            )
        else:
            members = members_of[key[1]] if key[1] is not None else set(view.coordinates)
            missing = members - {view.action(name).process for name in names}
            reason = f"process {min(missing)} has no end of {names[0]}" if missing else ""
        if not reason:
            reason = _unlike(view, names)
        if reason:
            return reason
    return ""


def _two_sides(view: View, names: list[str], senders: set[int], receivers: set[int]) -> str:
    """Checks that a message leaves each sending process once, and arrives at each receiving one."""
    ends = {name: action for name in names if isinstance(action := view.action(name), Message)}
    send_names = [name for name, action in ends.items() if action.operation == "send"]
    receive_names = [name for name in ends if name not in send_names]
    if not receive_names:
        return f"{send_names[0]} has no receive"
    if not send_names:
        return f"{receive_names[0]} has no send"
    for side, expected in ((send_names, senders), (receive_names, receivers)):
        on = sorted(view.action(name).process for name in side)
        if on != sorted(expected):
            return f"{side[0]} is issued on process {', '.join(map(str, on))}, not on {sorted(expected)}"
    for one, receive_name in ((a, b) for a in send_names for b in receive_names):
        edge = view.plan.graph.get_edge_data(one, receive_name)
        if edge is None or edge["relation"] != TransferEdge(bytes=ends[one].bytes):
            return f"{one} does not hand its bytes to {receive_name}"
    return ""


def _unlike(view: View, names: list[str]) -> str:
    """Describes the difference between the ends of one exchange."""
    first_action = view.action(names[0])
    assert isinstance(first_action, Message | Collective), "local actions have no other end"
    for name in names[1:]:
        for field, word in first_action.compared.items():
            value_here, value_there = getattr(first_action, field), getattr(view.action(name), field)
            if value_here != value_there:
                return f"{names[0]} and {name} differ in {word}: {value_here} and {value_there}"
    return ""


def agreement(view: View) -> str:
    """Checks that both ends of a connection issue its messages in the same order."""
    homes, coordinates = view.homes, view.coordinates
    issued: dict[tuple[int, int], dict[int, list[tuple[Key, str]]]] = {}
    for process, line in view.lines.items():
        for name, action in line:
            if not isinstance(action, Message):
                continue
            key = message(action)
            peer = homes[action.sender + action.way]
            a, b = sorted((homes[action.sender], peer))
            issued.setdefault((a, b), {}).setdefault(process, []).append((key, name))
    for rows in issued.values():
        (one, first_row), *other_rows = rows.items()
        for two, row in other_rows:
            for n, (mine, theirs) in enumerate(zip_longest(first_row, row)):
                if mine is None or theirs is None or mine[0] != theirs[0]:
                    texts = [end[1] if end else "nothing" for end in (mine, theirs)]
                    return (
                        f"processes {one} and {two} (pipeline {coordinates[one]} and {coordinates[two]}) disagree on "
                        f"their message {n + 1}: {texts[0]} and {texts[1]}"
                    )
    return ""


def waits(view: View) -> str:
    """Runs the step, each process as far as it can go; if any are left, they wait in a circle."""
    return _WaitSimulation(view).reason()


class _WaitSimulation:
    """All processes at their places in their lines. Since each line is fixed, the end is the same whatever the
    order.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.rows = {process: [name for name, _ in line] for process, line in view.lines.items()}
        self.at = dict.fromkeys(self.rows, 0)
        self.done: set[str] = set()
        self.here: dict[Key, set[str]] = {}  # ends that wait for the others
        self.wakes = {sender: name for name, handed in view.handed.items() for sender in handed}

    def reason(self) -> str:
        ready = list(self.rows)
        while ready:
            ready += self._go(ready.pop())
        stuck = {p: row[self.at[p]] for p, row in self.rows.items() if self.at[p] < len(row)}
        return f"a circle of waits, a plan that hangs: {' -> '.join(self._circle(stuck))}" if stuck else ""

    def _go(self, process: int) -> list[int]:
        """Runs one process until it must wait; returns the processes that this releases."""
        row, freed = self.rows[process], []
        while self.at[process] < len(row):
            name = row[self.at[process]]
            if any(sender not in self.done for sender in self.view.handed.get(name, ())):
                break
            completed = self._register_arrival(name)
            if not completed:
                break
            for end in completed:
                self.done.add(end)
                peer = self.view.action(end).process
                self.at[peer] += 1
                if peer != process:
                    freed.append(peer)
                if end in self.wakes:
                    freed.append(self.view.action(self.wakes[end]).process)
        return freed

    def _register_arrival(self, name: str) -> list[str]:
        """Returns the actions completed by the arrival of a process at `name`: all ends, if it is the last of them."""
        key = self.view.key_of.get(name)
        if key is None:
            return [name]
        arrived = self.here.setdefault(key, set())
        arrived.add(name)
        ends_ = self.view.ends_of[key]
        return ends_ if len(arrived) == len(ends_) else []

    def _circle(self, stuck: dict[int, str]) -> list[str]:
        """Follows the waits from one action until an action comes again."""
        name = next(iter(stuck.values()))
        path: list[str] = []
        while name not in path:
            path.append(name)
            name = stuck[self._waits_for(name)]
        return [*path[path.index(name) :], name]

    def _waits_for(self, name: str) -> int:
        """Returns a process that must continue before this action can complete. It is stuck too, else it would have
        continued.
        """
        missing = [sender for sender in self.view.handed.get(name, ()) if sender not in self.done]
        if not missing:
            key = self.view.key_of[name]
            missing = [end for end in self.view.ends_of[key] if end not in self.here[key]]
        return int(self.view.action(missing[0]).process)
