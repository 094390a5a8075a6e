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
        self, rendezvous: Rendezvous, where: RendezvousPlace, met: RendezvousResult, join_queue: JoinQueue | None = None
    ) -> None:
        self._rendezvous, self._where, self._join_queue = rendezvous, where, join_queue
        listening = where.listening if rendezvous.endpoint is None else None
        requests = JoinRequests(listening, rendezvous.create_secret()) if listening is not None else None
        self._late = LateJoiners(rendezvous, requests) if requests is not None else None
        self.folder = met.folder  # the run directory of the coordinator, when it is known
        self._take(met)

    def _take(self, met: RendezvousResult) -> None:
        rendezvous, node, machines = self._rendezvous, met.node, tuple(met.machines)
        self.node, self.machines, self.store, self.start = node, machines, met.store, met.start
        self.changes, self._addresses = met.changes, met.addresses
        self.hosts = tuple(names_of(machines, ranks=rendezvous.ranks))
        self.ranks = range(node * rendezvous.processes, (node + 1) * rendezvous.processes)
        alone = rendezvous.ranks and len(set(machines)) == 1
        # The place of a rank's failure.
        self.place = "" if alone else self.machines[node] if rendezvous.ranks else self.hosts[node]
        self.listening = met.listening  # at the store's address, on the coordinator
        self.lost: dict[int, str] = {}  # nodes, and why
        self.apart = False  # True when the hosts have parted to meet again, and this one has met none
        self._connections = dict(met.connections)
        self._early = list(met.early)

    @property
    def elastic(self) -> bool:
        return bool(self._rendezvous.counts)

    @property
    def grows(self) -> bool:
        """True on the coordinator of an elastic training if hosts wait with which the job can train on more of them."""
        if self._join_queue is None:
            return False
        here = len(self.machines)
        more = elastic.largest(self._rendezvous.counts, here + len(self._join_queue.arrived)) > here
        return more and time.monotonic() > self._join_queue.last + elastic.SETTLE

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
        """True on the coordinator and, if it is lost, on the next one."""
        return self.is_coordinator or (self.node == 1 and 0 in self.lost)

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

    def leave(self, why: str) -> None:
        """Tells the other launchers why this launcher cannot train; they leave, if they wait for it."""
        self.tell("leaves", why=why[: MOST // 8])

    def tell(self, kind: str, **more: object) -> None:
        """Sends a message: the coordinator to all others, another host to the coordinator."""
        for connection in self.connections:
            connection.send({"kind": kind, **more})

    def hear(self) -> list[tuple[int, Message]]:
        """Returns the messages that have arrived, with the node that sent each, and notes who is lost. Lets in who
        comes.
        """
        if self._join_queue is not None:
            self._join_queue.look()
            self._join_queue.call()
        if self._turns_away is not None:
            self._turns_away.look(self.hosts)
        found, self._early = self._early, []
        for node, connection in self._connections.items():
            if node not in self.lost:
                found += [(node, message) for message in connection.receive()]
                if connection.closed:
                    self.lost[node] = connection.why
        return found

    def expel(self, node: int, why: str) -> None:
        """Gives a host up, which then counts as lost."""
        self._connections[node].close()
        self.lost[node] = why

    def wait_for(self, kind: str, timeout: float) -> dict[int, Message]:
        """Returns the message of this kind from each host at a connection, waiting for it. Raises RendezvousError."""
        found: dict[int, Message] = {}
        others: list[tuple[int, Message]] = []
        until = time.monotonic() + timeout
        while missing := [node for node in self._connections if node not in found]:
            for node, message in self.hear():
                if message.get("kind") == "leaves":
                    raise RendezvousError(f"{self.hosts[node]} left: {message['why']}")
                if message.get("kind") == "again":
                    raise HostLeftError("a host was lost")
                if message.get("kind") == kind and node not in found:
                    found[node] = message
                else:
                    others.append((node, message))
            gone = [node for node in missing if node in self.lost and node not in found]
            if gone:
                raise HostLeftError(f"{self.hosts[gone[0]]} left: {self.lost[gone[0]]}")
            if time.monotonic() > until:
                raise HostLeftError(f"{self.hosts[missing[0]]} did not answer within {timeout:g} s")
            if len(found) < len(self._connections):
                readable(self.connections, AGAIN)
        self._early = others
        return found

    def go_on(self, starts: int) -> None:
        """Takes the training to be one that was cut off after `starts` starts of its ranks, if any, none of which
        counts as a restart; on the coordinator, which tells the other launchers (`shared`).
        """
        if starts:
            self.start, self.changes = starts + 1, starts

    def let_end(self) -> None:
        """Returns on the coordinator, and elsewhere when the coordinator has closed its connections, as it has written
        all, or does not within `PATIENCE` seconds; in an elastic training within those for which hosts are waited for.
        """
        until = time.monotonic() + (max(PATIENCE, self._rendezvous.timeout) if self.elastic else PATIENCE)
        while not self.is_coordinator and not self.apart and self.connections and time.monotonic() < until:
            readable(self.connections, AGAIN)
            self.hear()

    def meet_again(self, start: int, until: float, stopped: Callable[[], bool]) -> None:
        """Has all hosts meet for the start `start` of the ranks, until that time of the clock. Raises RendezvousError,
        and StopRequestedError if a host was asked to stop, as `stopped` says of this one.
        """
        if self.started_by:
            self._stay(start, until, stopped)
            return
        lost = frozenset(self.lost)
        if self._join_queue is not None:
            self._join_queue.busy = ""  # those who come back are no hosts that wait for a place
        parted = time.monotonic() + PARTING
        # Or they might lose what it has said.
        while self.is_coordinator and self.connections and time.monotonic() < parted:
            readable(self.connections, AGAIN)
            self.hear()
        here = self._local_address
        self._part()
        self.apart = True
        rendezvous = replace(self._rendezvous, until=until, stopped=stopped)
        before = PreviousStart(node=self.node, start=start - 1, folder=self.folder, changes=self.changes)
        if self.elastic:
            was = elastic.PreviousMembership(
                before=before, join_queue=self._join_queue, lost=lost, addresses=self._addresses, here=here
            )
            met, self._join_queue = elastic.meet_again(rendezvous, was)
            self._take(met)
        elif self.is_coordinator:
            awaited = frozenset(range(1, len(self.machines))) - lost
            self._take(wait_for_hosts(rendezvous, self._where, start, self._late, awaited))
        else:
            self._take(join(rendezvous, self._where, before))

    def _stay(self, start: int, until: float, stopped: Callable[[], bool]) -> None:
        if self.is_coordinator:
            ready = self.wait_for("ready", until - time.monotonic())
            self._early = []  # what they have said of the start before
            self._listen_anew()
            stops = stopped() or any(message["stops"] for message in ready.values())
            self.tell("store", port=self.store[1], start=start, stops=stops)
            self.start = start
        else:
            self.tell("ready", stops=stopped())
            told = self.wait_for("store", until - time.monotonic())[0]
            self.store, self.start, stops = (self.store[0], int(told["port"])), int(told["start"]), told["stops"]
        if stops:
            raise StopRequestedError

    def _listen_anew(self) -> None:
        assert self.listening is not None
        self.listening.close()
        self.listening = listen(self.store[0])
        self.store = self.store[0], int(self.listening.getsockname()[1])

    def gather(
        self, work: Callable[[], T], start: int, until: float, stopped: Callable[[], bool], *, met: bool = False
    ) -> T:
        """Has all hosts meet for the start `start`, and returns what `work` gives, which all of them call. A host that
        is lost meanwhile has them meet once more, if it may come back. `met`: they have met already, for the first one.
        Raises what `meet_again` does, and `work`.
        """
        while True:
            try:
                if not met:
                    self.meet_again(start, until, stopped)
                return work()
            except HostLeftError as error:
                if not (self._rendezvous.again or self.elastic):
                    raise
                met = False
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

    def dismiss(self, steps: int | None, *, stopped: bool = False) -> None:
        """Tells the hosts that wait to take part that the training is over, or was `stopped`, after `steps`; None if it
        failed.
        """
        if self._join_queue is None:
            return
        if steps is None:
            self._join_queue.tell("refused", why="the training failed")
        else:
            self._join_queue.tell("over", steps=steps, host=self.machines[0], stopped=stopped)


# ------------------------------------------------------------------------------------------------------------ meeting


def meet(rendezvous: Rendezvous) -> LauncherGroup:
    """Returns the group of all hosts, when all have come and agree. Raises RendezvousError, and TrainingOverError."""
    try:
        if rendezvous.counts:
            met, join_queue = elastic.meet(rendezvous)
            return LauncherGroup(rendezvous, RendezvousPlace(rendezvous.address, lambda: None), met, join_queue)
        return _meet_at(rendezvous.endpoint, rendezvous) if rendezvous.endpoint is not None else _meet(rendezvous)
    except StopRequestedError:
        if rendezvous.counts:
            raise elastic.TrainingOverError(stopped=True) from None
        raise RendezvousError("another host was asked to stop while the hosts met") from None


def _meet(rendezvous: Rendezvous) -> LauncherGroup:
    try:
        name, port = parse_endpoint(rendezvous.address)
    except ValueError as error:
        raise RendezvousError(f"the rendezvous {error}") from error
    address = address_of(name)
    where = RendezvousPlace(f"{name}:{port}", lambda: (address, port))
    try:
        listening = listen(address, port)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise RendezvousError(_unheard(f"{name}:{port}", rendezvous, error)) from error
        where = replace(where, taken=error.errno == errno.EADDRINUSE)
        return LauncherGroup(rendezvous, where, join(rendezvous, where))
    return _start_coordinator(rendezvous, replace(where, listening=listening), listening)


def _meet_at(endpoint: Endpoint, rendezvous: Rendezvous) -> LauncherGroup:
    if rendezvous.fault:
        rendezvous = replace(rendezvous, timeout=min(rendezvous.timeout, _TURNED_AWAY))
    try:
        where = RendezvousPlace(endpoint.name, endpoint.find)
        if rendezvous.place:
            return LauncherGroup(rendezvous, where, join(rendezvous, where))
        try:
            listening = endpoint.open()
        except OSError as error:
            raise RendezvousError(_unheard(endpoint.name, rendezvous, error)) from error
        return _start_coordinator(rendezvous, replace(where, listening=listening), listening)
    finally:
        endpoint.close()


def _unheard(name: str, rendezvous: Rendezvous, error: OSError) -> str:
    remedy = {
        errno.EADDRNOTAVAIL: "rank 0 is on this host, and that is no address of it: leave `--rendezvous` out",
        errno.EADDRINUSE: "another program listens there: `--rendezvous HOST:PORT` names another port",
        errno.EACCES: "only root listens at ports below 1024: `--rendezvous HOST:PORT` names another",
    }.get(error.errno or 0, "")
    return f"{rendezvous.host} cannot listen at {name}: {error.strerror}" + (f"\nhelp: {remedy}" if remedy else "")


def _start_coordinator(rendezvous: Rendezvous, where: RendezvousPlace, listening: socket.socket) -> LauncherGroup:
    with contextlib.ExitStack() as until_met:
        until_met.enter_context(listening)
        group = LauncherGroup(rendezvous, where, wait_for_hosts(rendezvous, where))
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
        asked = group.wait_for("folder", timeout)[0]
        group.start = int(asked["start"])
        group.tell("sees", content=_nonce_in(str(asked["folder"]), str(asked["file"])))
        told = group.wait_for("blind", timeout)[0]
        return str(asked["folder"]), [int(node) for node in told["nodes"] if node < len(group.machines)]
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


def require_same_value(group: LauncherGroup, what: str, value: str, timeout: float) -> None:
    """Raises RendezvousError, on all hosts, if one has another `value` than the coordinator. Called by all."""
    if group.is_coordinator:
        answers = group.wait_for("value", timeout)
        told = {0: value} | {node: str(message["value"]) for node, message in sorted(answers.items())}
        wrong = next((node for node, each in told.items() if each != value), None)
        why = "" if wrong is None else f"{group.hosts[wrong]} has not the same as {group.hosts[0]}"
        group.tell("alike", why=why)
    else:
        group.tell("value", value=value)
        why = str(group.wait_for("alike", timeout)[0]["why"])
    if why:
        raise RendezvousError(f"the hosts differ in {what}: {why}; {group.hosts[group.node]} has {value}")
