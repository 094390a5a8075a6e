"""The launchers of one training on several hosts: how they meet, what they agree on, and who is still there.

Model: docs/rendezvous.md has the states of a meeting. Each launcher calls `meet` with the address of a rendezvous, and
sends what it knows of the job: versions, digests of files, GPUs. If two differ, all leave with the same message. The
launcher on the host that has the address is the coordinator, node 0; the others are nodes in the order in which they
arrive. Before the ranks are started again all meet once more (`meet_again`), over new connections and with a new port
for the store. Each keeps its node; a new launcher, started with the same command, takes the place of a lost one.

Where torchrun or mpirun has started a process for each rank, each of these is a launcher, of one rank. They know their
places, meet at an `Endpoint`, which the launcher of rank 0 opens, and keep their connections: the loss of one ends the
training of all. The hosts of an elastic training (`Rendezvous.counts`) come and go: elastic.py.

Contract: one address listens to the end: a host that comes when all places are taken is refused there, at once, or, if
hosts may come back, when no host was lost for a while. A launcher whose connection ends is `lost` (connection.py).

Limits: if the training is not elastic, a fixed number of hosts, and a coordinator at a fixed address: while it is gone
no host goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from dslc.runtime.hosts import elastic
from dslc.runtime.hosts.authentication import MOST
from dslc.runtime.hosts.connection import PATIENCE, Connection, interface_of, listen, parse_endpoint, readable
from dslc.runtime.hosts.elastic import JoinQueue
from dslc.runtime.hosts.join_requests import JoinRequests
from dslc.runtime.hosts.messages import Message
from dslc.runtime.hosts.rendezvous import Rendezvous, StopRequestedError
from dslc.runtime.hosts.rendezvous_address import Endpoint, RendezvousError, address_of
from dslc.runtime.hosts.rendezvous_protocol import (
    AGAIN,
    PARTING,
    HostLeftError,
    LateJoiners,
    PreviousStart,
    RendezvousPlace,
    RendezvousResult,
    join,
    names_of,
    wait_for_hosts,
)

_TURNED_AWAY = 10.0  # seconds that a launcher which cannot train waits for others, to tell them
_NONCE_FILE = re.compile(r"\.dslc-[0-9a-f]{16}")  # by which a folder is tried

T = TypeVar("T")


class LauncherGroup:
    """The launchers that have met, as one of them sees it: the one of `node`, whose host is `machines[node]`, and which
    messages call `hosts[node]`. `ranks` are those that it starts, for the time `start`.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        place: RendezvousPlace,
        result: RendezvousResult,
        join_queue: JoinQueue | None = None,
    ) -> None:
        self._rendezvous, self._where, self._join_queue = rendezvous, place, join_queue
        listener = place.listening if rendezvous.endpoint is None else None
        requests = JoinRequests(listener, rendezvous.create_secret()) if listener is not None else None
        self._late = LateJoiners(rendezvous, requests) if requests is not None else None
        self.folder = result.folder  # the run directory of the coordinator, when it is known
        self._take(result)

    def _take(self, result: RendezvousResult) -> None:
        rendezvous, node, machines = self._rendezvous, result.node, tuple(result.machines)
        self.node, self.machines, self.store, self.start = node, machines, result.store, result.start
        self.changes, self._addresses = result.changes, result.addresses
        self.hosts = tuple(names_of(machines, ranks=rendezvous.ranks))
        self.ranks = range(node * rendezvous.processes, (node + 1) * rendezvous.processes)
        on_one_machine = rendezvous.ranks and len(set(machines)) == 1
        # The place of a rank's failure.
        self.place = "" if on_one_machine else self.machines[node] if rendezvous.ranks else self.hosts[node]
        self.listening = result.listening  # at the store's address, on the coordinator
        self.lost: dict[int, str] = {}  # nodes, and why
        self._is_reported = False  # by the coordinator: how the training ended
        self.apart = False  # True when the hosts have parted to meet again, and this one has met none
        self._connections = dict(result.connections)
        self._early = list(result.early)

    @property
    def elastic(self) -> bool:
        return bool(self._rendezvous.counts)

    @property
    def grows(self) -> bool:
        """True on the coordinator of an elastic training if hosts wait with which the job can train on more of them."""
        if self._join_queue is None:
            return False
        host_count = len(self.machines)
        can_grow = elastic.largest(self._rendezvous.counts, host_count + len(self._join_queue.arrived)) > host_count
        return can_grow and time.monotonic() > self._join_queue.last + elastic.SETTLE

    @property
    def handles(self) -> list[int]:
        comes = self._join_queue or self._turns_away
        connections = [connection.fileno() for connection in self.connections]
        return [*connections, *(comes.handles if comes is not None else ())]

    @property
    def _turns_away(self) -> LateJoiners | None:
        """Looks at the hosts that come, unless a host is lost and all meet again: then the meeting looks at them."""
        return None if self.lost and self._rendezvous.again else self._late

    @property
    def is_coordinator(self) -> bool:
        return self.node == 0

    @property
    def started_by(self) -> str:
        """The command that has started the launchers, all at once, as "mpirun"; "" if they came by themselves."""
        return self._rendezvous.by

    @property
    def speaks(self) -> bool:
        """True on the coordinator and, if it was lost before it has said how the training ended, on the next one."""
        return self.is_coordinator or (self.node == 1 and 0 in self.lost and not self._is_reported)

    @property
    def interface(self) -> str:
        return interface_of(self._local_address)

    @property
    def _local_address(self) -> str:
        if self._join_queue is not None:
            return self._join_queue.place[0]
        return next(iter(self._connections.values())).local_address

    @property
    def connections(self) -> list[Connection]:
        return [connection for node, connection in self._connections.items() if node not in self.lost]

    def leave(self, reason: str) -> None:
        """Tells the other launchers why this launcher cannot train; they leave, if they wait for it."""
        self.tell("leaves", why=reason[: MOST // 8])

    def tell(self, kind: str, **fields: object) -> None:
        """Sends a message: the coordinator to all others, another host to the coordinator."""
        for connection in self.connections:
            connection.send({"kind": kind, **fields})

    def hear(self) -> list[tuple[int, Message]]:
        """Returns the messages that have arrived, with the node that sent each, and notes who is lost. Lets in who
        comes.
        """
        if self._join_queue is not None:
            self._join_queue.look()
            self._join_queue.call()
        if self._turns_away is not None:
            self._turns_away.look(self.hosts)
        messages, self._early = self._early, []
        for node, connection in self._connections.items():
            if node not in self.lost:
                for message in connection.receive():
                    if message["kind"] == "reported" and node == 0:
                        self._is_reported = True
                    else:
                        messages.append((node, message))
                if connection.closed:
                    self.lost[node] = connection.why
        return messages

    def expel(self, node: int, reason: str) -> None:
        """Gives a host up, which then counts as lost."""
        self._connections[node].close()
        self.lost[node] = reason

    def wait_for(self, kind: str, timeout: float) -> dict[int, Message]:
        """Returns the message of this kind from each host at a connection, waiting for it. Raises RendezvousError."""
        answers: dict[int, Message] = {}
        other_messages: list[tuple[int, Message]] = []
        until = time.monotonic() + timeout
        while silent_nodes := [node for node in self._connections if node not in answers]:
            for node, message in self.hear():
                if message.get("kind") == "leaves":
                    raise RendezvousError(f"{self.hosts[node]} left: {message['why']}")
                if message.get("kind") == "again":
                    raise HostLeftError("a host was lost")
                if message.get("kind") == kind and node not in answers:
                    answers[node] = message
                else:
                    other_messages.append((node, message))
            lost_nodes = [node for node in silent_nodes if node in self.lost and node not in answers]
            if lost_nodes:
                raise HostLeftError(f"{self.hosts[lost_nodes[0]]} left: {self.lost[lost_nodes[0]]}")
            if time.monotonic() > until:
                raise HostLeftError(f"{self.hosts[silent_nodes[0]]} did not answer within {timeout:g} s")
            if len(answers) < len(self._connections):
                readable(self.connections, AGAIN)
        self._early = other_messages
        return answers

    def go_on(self, starts: int) -> None:
        """Continues a training that was cut off after `starts` starts of its ranks, which do not count as restarts; on
        the coordinator, which tells the other launchers (`shared`).
        """
        if starts:
            self.start, self.changes = starts + 1, starts

    def let_end(self) -> None:
        """Tells the others, on the coordinator, that it has written all. Elsewhere it returns when the coordinator has
        closed its connections, or does not within `PATIENCE` seconds; in an elastic training within those for which
        hosts are waited for.
        """
        if self.is_coordinator:
            self.tell("reported")
        until = time.monotonic() + (max(PATIENCE, self._rendezvous.timeout) if self.elastic else PATIENCE)
        while not self.is_coordinator and not self.apart and self.connections and time.monotonic() < until:
            readable(self.connections, AGAIN)
            self.hear()

    def meet_again(self, start: int, until: float, is_stopped: Callable[[], bool]) -> None:
        """Has all hosts meet for the start `start` of the ranks, until that time of the clock. Raises RendezvousError,
        and StopRequestedError if a host was asked to stop, as `is_stopped` says of this host.
        """
        if self.started_by:
            self._stay(start, until, is_stopped)
            return
        lost_nodes = frozenset(self.lost)
        if self._join_queue is not None:
            self._join_queue.busy = ""  # those who come back are no hosts that wait for a place
        deadline = time.monotonic() + PARTING
        # Or they might lose what it has said.
        while self.is_coordinator and self.connections and time.monotonic() < deadline:
            readable(self.connections, AGAIN)
            self.hear()
        local_address = self._local_address
        self._part()
        self.apart = True
        rendezvous = replace(self._rendezvous, until=until, stopped=is_stopped)
        previous_start = PreviousStart(node=self.node, start=start - 1, folder=self.folder, changes=self.changes)
        if self.elastic:
            membership = elastic.PreviousMembership(
                before=previous_start,
                join_queue=self._join_queue,
                lost=lost_nodes,
                addresses=self._addresses,
                here=local_address,
            )
            result, self._join_queue = elastic.meet_again(rendezvous, membership)
            self._take(result)
        elif self.is_coordinator:
            expected_nodes = frozenset(range(1, len(self.machines))) - lost_nodes
            self._take(wait_for_hosts(rendezvous, self._where, start, self._late, expected_nodes))
        else:
            self._take(join(rendezvous, self._where, previous_start))

    def _stay(self, start: int, until: float, is_stopped: Callable[[], bool]) -> None:
        if self.is_coordinator:
            answers = self.wait_for("ready", until - time.monotonic())
            self._early = []  # what they have said of the start before
            self._listen_anew()
            stops = is_stopped() or any(message["stops"] for message in answers.values())
            self.tell("store", port=self.store[1], start=start, stops=stops)
            self.start = start
        else:
            self.tell("ready", stops=is_stopped())
            reply = self.wait_for("store", until - time.monotonic())[0]
            self.store, self.start, stops = (self.store[0], int(reply["port"])), int(reply["start"]), reply["stops"]
        if stops:
            raise StopRequestedError

    def _listen_anew(self) -> None:
        assert self.listening is not None
        self.listening.close()
        self.listening = listen(self.store[0])
        self.store = self.store[0], int(self.listening.getsockname()[1])

    def gather(
        self, work: Callable[[], T], start: int, until: float, is_stopped: Callable[[], bool], *, has_met: bool = False
    ) -> T:
        """Has all hosts meet for the start `start`, and returns what `work` gives, which all of them call. A host that
        is lost meanwhile has them meet once more, if it may come back. `has_met`: they have met for the first start.
        Raises what `meet_again` does, and `work`.
        """
        while True:
            try:
                if not has_met:
                    self.meet_again(start, until, is_stopped)
                return work()
            except HostLeftError as error:
                if not (self._rendezvous.again or self.elastic):
                    raise
                has_met = False
                if self.is_coordinator:
                    self._rendezvous.say(f"{error}: the hosts meet again")
                    self.tell("again")

    def _part(self) -> None:
        for connection in self._connections.values():
            connection.close()
        if self.listening is not None:
            self.listening.close()

    def close(self) -> None:
        self._part()
        for comes in (self._join_queue, self._late):
            if comes is not None:
                comes.close()
        if self._where.listening is not None:
            self._where.listening.close()

    def dismiss(self, steps: int | None, *, was_stopped: bool = False) -> None:
        """Tells the hosts that wait to take part that the training is over, or `was_stopped`, after `steps`; None if it
        failed.
        """
        if self._join_queue is None:
            return
        if steps is None:
            self._join_queue.tell("refused", why="the training failed")
        else:
            self._join_queue.tell("over", steps=steps, host=self.machines[0], stopped=was_stopped)


# ------------------------------------------------------------------------------------------------------------ meeting


def meet(rendezvous: Rendezvous) -> LauncherGroup:
    """Returns the group of all hosts, when all have come and agree. Raises RendezvousError, and TrainingOverError."""
    try:
        if rendezvous.counts:
            result, join_queue = elastic.meet(rendezvous)
            return LauncherGroup(rendezvous, RendezvousPlace(rendezvous.address, lambda: None), result, join_queue)
        return _meet_at(rendezvous.endpoint, rendezvous) if rendezvous.endpoint is not None else _meet(rendezvous)
    except StopRequestedError:
        if rendezvous.counts:
            raise elastic.TrainingOverError(was_stopped=True) from None
        raise RendezvousError("another host was asked to stop while the hosts met") from None


def _meet(rendezvous: Rendezvous) -> LauncherGroup:
    try:
        name, port = parse_endpoint(rendezvous.address)
    except ValueError as error:
        raise RendezvousError(f"the rendezvous {error}") from error
    address = address_of(name)
    place = RendezvousPlace(f"{name}:{port}", lambda: (address, port))
    try:
        listener = listen(address, port)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise RendezvousError(_unheard(f"{name}:{port}", rendezvous, error)) from error
        place = replace(place, taken=error.errno == errno.EADDRINUSE)
        return LauncherGroup(rendezvous, place, join(rendezvous, place))
    return _start_coordinator(rendezvous, replace(place, listening=listener), listener)


def _meet_at(endpoint: Endpoint, rendezvous: Rendezvous) -> LauncherGroup:
    if rendezvous.fault:
        rendezvous = replace(rendezvous, timeout=min(rendezvous.timeout, _TURNED_AWAY))
    try:
        place = RendezvousPlace(endpoint.name, endpoint.find)
        if rendezvous.place:
            return LauncherGroup(rendezvous, place, join(rendezvous, place))
        try:
            listener = endpoint.open()
        except OSError as error:
            raise RendezvousError(_unheard(endpoint.name, rendezvous, error)) from error
        return _start_coordinator(rendezvous, replace(place, listening=listener), listener)
    finally:
        endpoint.close()


def _unheard(name: str, rendezvous: Rendezvous, error: OSError) -> str:
    remedy = {
        errno.EADDRNOTAVAIL: "rank 0 is on this host, and that is no address of it: leave `--rendezvous` out",
        errno.EADDRINUSE: "another program listens there: `--rendezvous HOST:PORT` names another port",
        errno.EACCES: "only root listens at ports below 1024: `--rendezvous HOST:PORT` names another",
    }.get(error.errno or 0, "")
    return f"{rendezvous.host} cannot listen at {name}: {error.strerror}" + (f"\nhelp: {remedy}" if remedy else "")


def _start_coordinator(rendezvous: Rendezvous, place: RendezvousPlace, listener: socket.socket) -> LauncherGroup:
    with contextlib.ExitStack() as until_met:
        until_met.enter_context(listener)
        group = LauncherGroup(rendezvous, place, wait_for_hosts(rendezvous, place))
        if rendezvous.again or rendezvous.endpoint is None:
            until_met.pop_all()  # the group closes it
        return group


# ------------------------------------------------------------------------------------------------- a folder of all


def shared(group: LauncherGroup, folder: str, timeout: float) -> tuple[str, list[int]]:
    """Returns the coordinator's `folder`, which exists, and the launchers that do not see it: each reads a file that
    the coordinator writes there. All learn the number of the start. Called by all. Raises RendezvousError, and OSError
    on the coordinator.
    """
    if not group.is_coordinator:
        request = group.wait_for("folder", timeout)[0]
        group.start = int(request["start"])
        group.tell("sees", content=_nonce_in(str(request["folder"]), str(request["file"])))
        reply = group.wait_for("blind", timeout)[0]
        return str(request["folder"]), [int(node) for node in reply["nodes"] if node < len(group.machines)]
    name, nonce = f".dslc-{secrets.token_hex(8)}", secrets.token_hex(16)
    path = os.path.join(folder, name)
    with open(path, "x", encoding="utf-8") as file:
        file.write(nonce)
    try:
        group.tell("folder", folder=folder, file=name, start=group.start)
        answers = group.wait_for("sees", timeout)
    finally:
        os.remove(path)
    blind = [node for node, message in sorted(answers.items()) if message["content"] != nonce]
    group.tell("blind", nodes=blind)
    return folder, blind


def _nonce_in(folder: str, name: str) -> str:
    """Returns what a file that the coordinator has made in a folder holds; "" if it is not seen, or is no such file."""
    if not _NONCE_FILE.fullmatch(name) or not os.path.isabs(folder) or "\0" in folder:
        return ""
    try:
        descriptor = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, UnicodeError):
        return ""
    with os.fdopen(descriptor, "rb") as file:
        return file.read(64).decode(errors="replace") if stat.S_ISREG(os.fstat(descriptor).st_mode) else ""


def require_same_value(group: LauncherGroup, subject: str, value: str, timeout: float) -> None:
    """Raises RendezvousError, on all hosts, if one has another `value` than the coordinator. Called by all."""
    if group.is_coordinator:
        answers = group.wait_for("value", timeout)
        values = {0: value} | {node: str(message["value"]) for node, message in sorted(answers.items())}
        different_node = next((node for node, node_value in values.items() if node_value != value), None)
        reason = "" if different_node is None else f"{group.hosts[different_node]} has not the same as {group.hosts[0]}"
        group.tell("alike", why=reason)
    else:
        group.tell("value", value=value)
        reason = str(group.wait_for("alike", timeout)[0]["why"])
    if reason:
        raise RendezvousError(f"the hosts differ in {subject}: {reason}; {group.hosts[group.node]} has {value}")
