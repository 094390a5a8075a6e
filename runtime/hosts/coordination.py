"""Keeps the ranks of several hosts together: they are done together, stop after the same step, and fail with one cause.

Model: docs/rendezvous.md has the states and messages. Every launcher asks its `HostGroup` what to do, a few times a
second, and the coordinator decides for all. A launcher whose ranks fail reports the cause that it sees; the coordinator
asks the others for theirs, and takes the best. A host that is lost is a cause too. Where one command has started all
launchers, the loss of one ends all at once: that command soon does. Ranks of several hosts share no board, so the
coordinator searches for a step that no rank has reached, and has all leave after it.

Contract: nothing is done in a step for this: ranks read the board of their own host, as on one host.

Limits: while the coordinator is gone no launcher decides.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from enum import Enum

from dslc.compiler.ir.codec import from_json
from dslc.runtime.hosts.launcher_group import LauncherGroup
from dslc.runtime.hosts.messages import Message
from dslc.runtime.process.error_text import narrow
from dslc.runtime.process.failure import Failure, better, for_others
from dslc.runtime.process.stop import RunControl

Follow = Callable[[Failure, bool, bool], tuple[bool, Failure]]  # the failure; a host was asked to stop; one is lost
_OF_THE_COORDINATOR = ("settle", "hold", "leave", "release", "part", "end")  # messages that nobody else sends
_OF_OTHERS = ("done", "failed", "held")
PATIENCE = 10.0  # seconds that hosts have to report what they see of a failure


class LauncherState(Enum):
    TRAINING = "its ranks train"
    REPORTING = "the coordinator has asked what it sees of a failure"
    DONE = "the ranks of all hosts are done, or have stopped after one step"
    FAILED = "the training, or this start of it, has failed with one cause"


class HostGroup:
    """One launcher's part in a training of `steps` steps. `next_wait` gives the first step from one on at whose end
    ranks can wait. `follow` gives whether ranks are started again after a failure, and the text that reports it.
    """

    def __init__(
        self, group: LauncherGroup, board: RunControl, steps: int, next_wait: Callable[[int], int], follow: Follow
    ) -> None:
        self.group, self._board, self._steps, self._next_wait = group, board, steps, next_wait
        self._follow = follow
        self.cause: Failure | None = None
        self.again = False  # ranks are started again
        self.change = False  # because hosts of an elastic training have come or gone
        self.end = ""  # the last words of rank 0, when all are done
        self._done: dict[int, str] = {}  # the coordinator's: by node
        self._seen: dict[int, Failure | None] = {}
        self._settles_until = 0.0
        self.reported = False  # what this launcher sees of a failure
        self.asked_of = ""  # the kind of failure that another one sees
        self._told_done = self._told_stop = False
        self._hold = _Hold()
        self._state = LauncherState.TRAINING

    def look(self) -> LauncherState:
        """Takes what has arrived, and returns what this launcher must do now."""
        board, group = self._board, self.group
        for node, message in group.hear():
            try:
                if message["kind"] in (_OF_THE_COORDINATOR if group.is_coordinator else _OF_OTHERS):
                    raise ValueError("it is not for this launcher")
                self._receive(node, message)
            except ValueError as error:  # also of the codec: it says what is wrong where
                group.expel(node, f"its message `{message['kind']}` cannot be taken: {narrow(str(error))}")
        if group.is_coordinator:
            self._keep()
        elif group.lost and self.cause is None and self._state is not LauncherState.DONE:
            self.again, self.cause = self._follow(self._loss(0), board.stop_requested, True)
            self.change = group.elastic
            self._state = LauncherState.FAILED
        if board.all_done and not self._told_done:
            self._told_done = True
            self._say(group.node, {"kind": "done", "end": board.last_message(0) if group.is_coordinator else ""})
        if (board.stop_requested or board.time_is_up) and not self._told_stop:
            self._told_stop = True
            self._say(group.node, {"kind": "stop", "timed": board.time_is_up and not board.stop_requested})
        return self._state

    def failed(self, failure: Failure | None) -> None:
        """Reports what this launcher sees of a failure, once: None if its ranks show nothing."""
        if self.reported:
            return
        self.reported = True
        if failure is not None and self.group.place:
            failure = for_others(failure, self.group.place)
        self._say(self.group.node, {"kind": "failed", "seen": dataclasses.asdict(failure) if failure else None})
        if self._state is LauncherState.REPORTING:
            self._state = LauncherState.TRAINING

    def _say(self, node: int, message: Message) -> None:
        if self.group.is_coordinator:
            self._receive(node, message)
        else:
            self.group.tell(**message)

    def _broadcast(self, kind: str, **fields: object) -> None:
        self.group.tell(kind, **fields)
        self._receive(0, {"kind": kind, **fields})

    # ------------------------------------------------------------------------------------------------- what is heard

    def _receive(self, node: int, message: Message) -> None:
        match message.get("kind"):
            case "done":
                self._done[node] = str(message["end"])
            case "failed":
                failure = from_json(Failure, message["seen"]) if message["seen"] is not None else None
                self._seen[node] = failure
                self._begin_to_settle(failure.kind if failure is not None else "")
            case "settle" if not self.reported:
                self._state, self.asked_of = LauncherState.REPORTING, str(message["of"])
            case "stop":
                is_timed = bool(message.get("timed"))
                self._hold.wanted, self._hold.timed, self._hold.changes = True, is_timed, False
            case "hold":
                self._board.hold_at(int(message["step"]))
                self._say(self.group.node, {"kind": "held", "step": message["step"], "at": self._board.furthest})
            case "held" if int(message["step"]) == self._hold.step:
                self._hold.at[node] = int(message["at"])
            case "leave":
                self._board.leave_at(int(message["step"]), timed=bool(message["timed"]))
            case "release":
                self._board.release()
            case "part":
                self.end, self._state = str(message["end"]), LauncherState.DONE
                self.again = self.change = bool(message["again"])
            case "end":
                self.cause, self.again = from_json(Failure, message["cause"]), bool(message["again"])
                self.change, self._state = bool(message["change"]), LauncherState.FAILED

    # --------------------------------------------------------------------------------------- what the coordinator does

    def _keep(self) -> None:
        nodes = range(len(self.group.hosts))
        if self._state in (LauncherState.DONE, LauncherState.FAILED):
            return
        if len(self._done) == len(nodes):
            restarts = self._hold.changes and json.loads(self._done[0])["stopped_at"] is not None
            self._broadcast("part", end=self._done[0], again=restarts)
            return
        lost_nodes = [node for node in self.group.lost if node not in self._done]
        if lost_nodes or self._seen:
            self._begin_to_settle("lost")
            silent_nodes = [node for node in nodes if node not in self._seen and node not in self.group.lost]
            if not silent_nodes or time.monotonic() > self._settles_until or (lost_nodes and self.group.started_by):
                failures = [failure for failure in self._seen.values() if failure is not None]
                failures += [self._loss(node) for node in lost_nodes]
                failures = failures or [self._failure(node, "reports a failure, and no cause") for node in self._seen]
                stop_requested = self._board.stop_requested or (self._hold.wanted and not self._hold.timed)
                restarts, cause = self._follow(better(failures), stop_requested, bool(lost_nodes))
                change = bool(lost_nodes) and self.group.elastic
                self._broadcast("end", cause=dataclasses.asdict(cause), again=restarts, change=change)
            return
        if not self._hold.wanted and self._board.furthest and self.group.grows:
            self._hold.wanted = self._hold.changes = True
        if self._hold.wanted and not self._hold.decided:
            self._stop(len(nodes))

    def _begin_to_settle(self, kind: str) -> None:
        if not self._settles_until:
            self._settles_until = time.monotonic() + PATIENCE
            self._broadcast("settle", of=kind)

    def _loss(self, node: int) -> Failure:
        return self._failure(node, f"is gone: {self.group.lost[node]}")

    def _failure(self, node: int, event: str) -> Failure:
        host, step = self.group.hosts[node], self._board.furthest
        return Failure(rank=None, step=step, kind="ended", message=f"{host} {event}", host=host, time=time.time())

    def _stop(self, nodes: int) -> None:
        hold = self._hold
        if not hold.step:
            hold.step = self._next_wait(max(self._board.furthest, hold.furthest) + hold.margin)
            if hold.step >= self._steps:
                hold.decided = True  # they end by themselves
                return
            hold.at = {}
            self._broadcast("hold", step=hold.step)
        elif len(hold.at) == nodes:
            hold.furthest = max(hold.at.values())
            if hold.furthest < hold.step:
                hold.decided = True
                self._broadcast("leave", step=hold.step, timed=hold.timed)
            else:
                self._broadcast("release")
                hold.step, hold.margin = 0, 2 * hold.margin


@dataclasses.dataclass
class _Hold:
    wanted: bool = False
    timed: bool = False
    changes: bool = False  # for hosts that have come
    decided: bool = False
    step: int = 0
    margin: int = 2
    furthest: int = 0
    at: dict[int, int] = dataclasses.field(default_factory=dict)  # by node: the furthest step of its ranks
