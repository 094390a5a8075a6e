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
    at: dict[int, set[int]] = {}
    for index, coordinate in view.coordinates.items():
        at.setdefault(coordinate, set()).add(index)
    for key, names in view.ends_of.items():
        if key[0] == "message":
            _, way, stage, _ = key
            reason = _two_sides(
                view, names, at.get(homes.get(stage, -1), set()), at.get(homes.get(stage + way, -1), set())
            )
        else:
            joined = at[key[1]] if key[1] is not None else set(view.coordinates)
            missing = joined - {view.action(name).process for name in names}
            reason = f"process {min(missing)} has no end of {names[0]}" if missing else ""
        if not reason:
            reason = _unlike(view, names)
        if reason:
            return reason
    return ""


def _two_sides(view: View, names: list[str], senders: set[int], receivers: set[int]) -> str:
    """Checks that a message leaves each sending process once, and arrives at each receiving one."""
    ends = {name: action for name in names if isinstance(action := view.action(name), Message)}
    sent = [name for name, action in ends.items() if action.operation == "send"]
    taken = [name for name in ends if name not in sent]
    if not taken:
        return f"{sent[0]} has no receive"
    if not sent:
        return f"{taken[0]} has no send"
    for side, wanted in ((sent, senders), (taken, receivers)):
        on = sorted(view.action(name).process for name in side)
        if on != sorted(wanted):
            return f"{side[0]} is issued on process {', '.join(map(str, on))}, not on {sorted(wanted)}"
    for one, other in ((a, b) for a in sent for b in taken):
        edge = view.plan.graph.get_edge_data(one, other)
        if edge is None or edge["relation"] != TransferEdge(bytes=ends[one].bytes):
            return f"{one} does not hand its bytes to {other}"
    return ""


def _unlike(view: View, names: list[str]) -> str:
    """Describes the difference between the ends of one exchange."""
    first = view.action(names[0])
    assert isinstance(first, Message | Collective), "local actions have no other end"
    for name in names[1:]:
        for field, word in first.compared.items():
            here, there = getattr(first, field), getattr(view.action(name), field)
            if here != there:
                return f"{names[0]} and {name} differ in {word}: {here} and {there}"
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
            other = homes[action.sender + action.way]
            a, b = sorted((homes[action.sender], other))
            issued.setdefault((a, b), {}).setdefault(process, []).append((key, name))
    for rows in issued.values():
        (one, first), *others = rows.items()
        for two, row in others:
            for n, (mine, theirs) in enumerate(zip_longest(first, row)):
                if mine is None or theirs is None or mine[0] != theirs[0]:
                    shown = [end[1] if end else "nothing" for end in (mine, theirs)]
                    return (
                        f"processes {one} and {two} (pipeline {coordinates[one]} and {coordinates[two]}) disagree on "
                        f"their message {n + 1}: {shown[0]} and {shown[1]}"
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
        self.wakes = {before: name for name, handed in view.handed.items() for before in handed}

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
            if any(before not in self.done for before in self.view.handed.get(name, ())):
                break
            done = self._register_arrival(name)
            if not done:
                break
            for end in done:
                self.done.add(end)
                other = self.view.action(end).process
                self.at[other] += 1
                if other != process:
                    freed.append(other)
                if end in self.wakes:
                    freed.append(self.view.action(self.wakes[end]).process)
        return freed

    def _register_arrival(self, name: str) -> list[str]:
        """Returns the actions completed by the arrival of a process at `name`: all ends, if it is the last of them."""
        key = self.view.key_of.get(name)
        if key is None:
            return [name]
        here = self.here.setdefault(key, set())
        here.add(name)
        ends_ = self.view.ends_of[key]
        return ends_ if len(here) == len(ends_) else []

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
        late = [other for other in self.view.handed.get(name, ()) if other not in self.done]
        if not late:
            key = self.view.key_of[name]
            late = [end for end in self.view.ends_of[key] if end not in self.here[key]]
        return int(self.view.action(late[0]).process)
