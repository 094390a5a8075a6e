"""The launchers of one training on several hosts: how they meet, what they agree on, and who is still there.

Model: each host compiles the job and then calls `meet` with the address of a rendezvous. The launcher on the host that
has this address is the keeper, node 0, whose first rank is rank 0; the others are nodes in the order in which they
arrive. Each sends what it knows of the job: versions, digests of files, GPUs. If two differ, all leave with the same
message. From then on every launcher has a `Company`: the keeper a wire to each other one, the others one to the keeper.

Where torchrun or mpirun has started a process for each rank, each of these is a launcher, of one rank. They know their
places and meet at a `Door`, which the one of rank 0 opens.

Before the ranks are started again all launchers meet once more (`meet_again`), at the same address, over new wires, and
have a new port for the store. A host that was lost may come back meanwhile: its launcher, which tries again, or a new
one, started with the same command, for which the place is free. Each keeps its node. A keeper that was lost comes back
as any other: the hosts that wait for it say which start was the last, and where the run directory is.

Contract: one address listens, while the hosts meet, and to the end if hosts may come back: a host that comes early
waits there. A launcher whose connection ends is `lost` (wire.py).

Limits: a fixed number of hosts, and a keeper at a fixed address: while it is gone nobody goes on. Those at a `Door` do
not meet again.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from dslc.runtime.hosts.doors import Door, NotMet, address_of
from dslc.runtime.hosts.wire import MOST, PATIENCE, Message, Wire, endpoint, interface_of, listen

_AGAIN = 0.2  # seconds between two attempts to connect
_SAY = 2.0, 60.0  # seconds after which it is first said who is awaited, and then every so many
_HELLO = 10.0  # seconds that a connection has to say who it is
_PARTING = 5.0  # seconds that the keeper waits for the others to leave
_TURNED_AWAY = 10.0  # seconds that a launcher which cannot train waits for others, to tell them
_FOR_HOSTS = "the job takes {} (`devices.nodes`), each started with the same command"


class Left(NotMet):
    """A host left while others waited for it. It may come back."""


class Stopped(Exception):
    """A host was asked to stop while hosts met."""


@dataclass(frozen=True)
class Meeting:
    """What one launcher brings: where they meet, how many they are, and what it knows of the job, by name.

    With a `door` the launchers know their places; each starts `processes` ranks. One that cannot train has the reason
    as its `fault`, and comes to say so: all leave, and the keeper with that reason.
    """

    rendezvous: str
    nodes: int
    facts: Mapping[str, str]
    timeout: float  # seconds that hosts are waited for
    say: Callable[[str], object] = field(default=lambda text: None)
    host: str = field(default_factory=socket.gethostname)
    processes: int = 1
    door: Door | None = None
    place: int = 0
    needs: str = _FOR_HOSTS
    fault: str = ""
    again: bool = False  # hosts that are lost may come back
    until: float = math.inf  # the time of the clock, if that is before `timeout` has passed
    stopped: Callable[[], bool] = field(default=lambda: False)

    @property
    def ranks(self) -> bool:
        """True if each launcher is that of one rank, with a place that it was given."""
        return self.door is not None and self.processes == 1


@dataclass(frozen=True, kw_only=True)
class _Met:
    """What a meeting came to: this launcher's node, all machines, the wires by node, and the store's address; the
    number of this start of the ranks, and the run directory of the one before.
    """

    node: int
    machines: Sequence[str]
    wires: Mapping[int, Wire]
    store: tuple[str, int]
    start: int = 1
    folder: str = ""
    early: Sequence[tuple[int, Message]] = ()  # messages that arrived already
    listening: socket.socket | None = None


@dataclass(frozen=True, kw_only=True)
class _Before:
    """What a launcher says of the start before this one, of which it was."""

    node: int
    start: int
    folder: str


@dataclass(frozen=True)
class _Where:
    """The rendezvous: its name in messages, how its address is found, and the socket that listens, on the keeper.
    `taken`: another program of this host listens there.
    """

    name: str
    find: Callable[[], tuple[str, int] | None]
    listening: socket.socket | None = None
    taken: bool = False


class Company:
    """The launchers that have met, as one of them sees it: the one of `node`, whose host is `machines[node]`, and which
    messages call `hosts[node]`. `ranks` are those that it starts, for the time `start`.
    """

    def __init__(self, meeting: Meeting, where: _Where, met: _Met) -> None:
        self._meeting, self._where = meeting, where
        self.folder = met.folder  # the run directory of the keeper, when it is known
        self._take(met)

    def _take(self, met: _Met) -> None:
        meeting, node, machines = self._meeting, met.node, tuple(met.machines)
        self.node, self.machines, self.store, self.start = node, machines, met.store, met.start
        self.hosts = tuple(names_of(machines, ranks=meeting.ranks))
        self.ranks = range(node * meeting.processes, (node + 1) * meeting.processes)
        alone = meeting.ranks and len(set(machines)) == 1
        self.place = "" if alone else self.machines[node] if meeting.ranks else self.hosts[node]  # of a rank's failure
        self.listening = met.listening  # at the store's address, on the keeper
        self.lost: dict[int, str] = {}  # nodes, and why
        self._wires = dict(met.wires)
        self._early = list(met.early)

    @property
    def keeps(self) -> bool:
        """True on the keeper."""
        return self.node == 0

    @property
    def interface(self) -> str:
        """The network interface that leads to the other hosts; "" if it is not known."""
        return interface_of(next(iter(self._wires.values())).here)

    @property
    def wires(self) -> list[Wire]:
        """The connections that are open."""
        return [wire for node, wire in self._wires.items() if node not in self.lost]

    def tell(self, kind: str, **more: object) -> None:
        """Sends a message: the keeper to all others, another host to the keeper."""
        for wire in self.wires:
            wire.send({"kind": kind, **more})

    def hear(self) -> list[tuple[int, Message]]:
        """Returns the messages that have arrived, with the node that sent each, and notes who is lost."""
        found, self._early = self._early, []
        for node, wire in self._wires.items():
            if node not in self.lost:
                found += [(node, message) for message in wire.read()]
                if wire.closed:
                    self.lost[node] = wire.why
        return found

    def wait_for(self, kind: str, timeout: float) -> dict[int, Message]:
        """Returns the message of this kind from each host at a wire, waiting for it. Raises NotMet."""
        found: dict[int, Message] = {}
        others: list[tuple[int, Message]] = []
        until = time.monotonic() + timeout
        while missing := [node for node in self._wires if node not in found]:
            for node, message in self.hear():
                if message.get("kind") == kind and node not in found:
                    found[node] = message
                else:
                    others.append((node, message))
            gone = [node for node in missing if node in self.lost and node not in found]
            if gone:
                raise Left(f"{self.hosts[gone[0]]} left: {self.lost[gone[0]]}")
            if time.monotonic() > until:
                raise Left(f"{self.hosts[missing[0]]} did not answer within {timeout:g} s")
            if len(found) < len(self._wires):
                select.select(self.wires, [], [], _AGAIN)
        self._early = others
        return found

    def let_end(self) -> None:
        """Returns on the keeper, and elsewhere when the keeper has closed its connections, or does not within
        `PATIENCE` seconds.
        """
        until = time.monotonic() + PATIENCE
        while not self.keeps and self.wires and time.monotonic() < until:
            select.select(self.wires, [], [], _AGAIN)
            self.hear()

    def meet_again(self, start: int, until: float, stopped: Callable[[], bool]) -> None:
        """Has all hosts meet for another start of the ranks, `start` on the keeper, until that time of the clock.

        Raises NotMet, and Stopped if a host was asked to stop, as `stopped` says of this one.
        """
        parted = time.monotonic() + _PARTING
        while self.keeps and self.wires and time.monotonic() < parted:  # or they might lose what it has said
            select.select(self.wires, [], [], _AGAIN)
            self.hear()
        self._part()
        meeting = replace(self._meeting, until=until, stopped=stopped)
        before = _Before(node=self.node, start=self.start, folder=self.folder)
        if self.keeps:
            self._take(_keep(meeting, self._where, start))
        else:
            self._take(_join(meeting, self._where, before))

    def _part(self) -> None:
        for wire in self._wires.values():
            wire.close()
        if self.listening is not None:
            self.listening.close()

    def close(self) -> None:
        """Closes all connections, and what listens."""
        self._part()
        if self._where.listening is not None:
            self._where.listening.close()


# ------------------------------------------------------------------------------------------------------------ meeting


def meet(meeting: Meeting) -> Company:
    """Returns the company of all hosts, when all have come and agree. Raises NotMet."""
    try:
        return _meet_at(meeting.door, meeting) if meeting.door is not None else _meet(meeting)
    except Stopped:
        raise NotMet("another host was asked to stop while the hosts met") from None


def _meet(meeting: Meeting) -> Company:
    try:
        name, port = endpoint(meeting.rendezvous)
    except ValueError as error:
        raise NotMet(f"the rendezvous {error}") from error
    address = address_of(name)
    where = _Where(f"{name}:{port}", lambda: (address, port))
    try:
        listening = listen(address, port)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise NotMet(f"{name}:{port} cannot be listened at: {error.strerror}") from error
        where = replace(where, taken=error.errno == errno.EADDRINUSE)
        return Company(meeting, where, _join(meeting, where))
    return _kept(meeting, replace(where, listening=listening), listening)


def _meet_at(door: Door, meeting: Meeting) -> Company:
    if meeting.fault:
        meeting = replace(meeting, timeout=min(meeting.timeout, _TURNED_AWAY))
    try:
        where = _Where(door.name, door.find)
        if meeting.place:
            return Company(meeting, where, _join(meeting, where))
        try:
            listening = door.open()
        except OSError as error:
            raise NotMet(f"{door.name} cannot be listened at: {error.strerror}") from error
        return _kept(meeting, replace(where, listening=listening), listening)
    finally:
        door.close()


# --------------------------------------------------------------------------------------------------------- the keeper


def _kept(meeting: Meeting, where: _Where, listening: socket.socket) -> Company:
    with contextlib.ExitStack() as until_met:
        until_met.enter_context(listening)
        company = Company(meeting, where, _keep(meeting, where))
        if meeting.again:
            until_met.pop_all()  # the company closes it
        return company


def _keep(meeting: Meeting, where: _Where, start: int = 1) -> _Met:
    """Waits for all hosts. `start`: of the ranks; after the first a host that differs is refused alone."""
    assert where.listening is not None
    name = where.name if meeting.door is not None else meeting.rendezvous
    waiting = _Waiting(meeting, f"for the hosts at {name}")
    arrived: list[tuple[Wire, Message]] = []
    strangers: dict[Wire, float] = {}
    try:
        while len(arrived) + 1 < meeting.nodes:
            waiting.look([str(message["host"]) for _, message in arrived])
            known = [wire.fileno() for wire in (*strangers, *(wire for wire, _ in arrived))]
            ready, _, _ = select.select([where.listening.fileno(), *known], [], [], _AGAIN)
            if where.listening.fileno() in ready:
                strangers[Wire(where.listening.accept()[0])] = time.monotonic()
            arrived += [each for each in _said_hello(strangers) if start == 1 or _is_alike(meeting, *each)]
            arrived = [(wire, message) for wire, message in arrived if not _has_left(wire)]
        return _agreed(meeting, arrived, where.listening.getsockname()[0], start)
    except BaseException as error:
        for wire, _ in arrived:
            if isinstance(error, Stopped):
                wire.send({"kind": "stopped"})
            wire.close()
        if isinstance(error, Stopped):
            _tell_who_comes(where.listening, meeting.nodes - 1 - len(arrived))
        raise
    finally:
        for wire in strangers:
            wire.close()


def _tell_who_comes(listening: socket.socket, most: int) -> None:
    """Tells the hosts that come late that all stop, for a while: they would wait for this one to come back."""
    until = time.monotonic() + _PARTING
    while most > 0 and (rest := until - time.monotonic()) > 0:
        if select.select([listening], [], [], rest)[0]:
            wire = Wire(listening.accept()[0])
            select.select([wire], [], [], _AGAIN)
            wire.read()  # a connection that is closed with something unread loses what was sent
            wire.send({"kind": "stopped"})
            wire.close()
            most -= 1


def _said_hello(strangers: dict[Wire, float]) -> Iterator[tuple[Wire, Message]]:
    """Yields the connections that have said who they are, and drops those that say anything else, or nothing."""
    for wire, since in list(strangers.items()):
        messages = wire.read()
        hello = next((message for message in messages if _is_hello(message)), None)
        if hello is not None:
            del strangers[wire]
            _hear_stop(messages)
            yield wire, hello
        elif wire.closed or time.monotonic() - since > _HELLO:
            del strangers[wire]
            wire.close()


def _is_hello(message: Message) -> bool:
    facts = isinstance(message.get("facts"), dict)
    before = all(type(message.get(name)) in (int, type(None)) for name in ("node", "start"))
    return message.get("kind") == "hello" and isinstance(message.get("host"), str) and facts and before


def _has_left(wire: Wire) -> bool:
    _hear_stop(wire.read())
    return wire.closed


def _hear_stop(messages: Sequence[Message]) -> None:
    if any(message.get("kind") == "stop" for message in messages):
        raise Stopped


def _is_alike(meeting: Meeting, wire: Wire, hello: Message) -> bool:
    """True for a host that has all alike; another one is told why not, and leaves."""
    differs = _difference([meeting.host, str(hello["host"])], [meeting.facts, hello["facts"]])
    if differs:
        meeting.say(f"{hello['host']} was not taken: {differs}")
        _refuse(wire, differs)
    return not differs


def _refuse(wire: Wire, why: str) -> None:
    wire.send({"kind": "refused", "why": why[: MOST // 8]})  # a letter takes 6 bytes of JSON at most
    wire.close()


def _agreed(meeting: Meeting, arrived: list[tuple[Wire, Message]], address: str, start: int) -> _Met:
    if meeting.door is not None:
        arrived.sort(key=lambda each: _place(each[1]))
    else:
        arrived = _in_order(arrived)
    hosts = [meeting.host, *(str(message["host"]) for _, message in arrived)]
    wrong = _fault(meeting, [message for _, message in arrived], hosts)
    if wrong:
        for wire, _ in arrived:
            _refuse(wire, wrong)
        raise NotMet(wrong)
    # If this keeper is a new one, the others know more than it does.
    last, folder = max(((int(m.get("start") or 0), str(m.get("folder") or "")) for _, m in arrived), default=(0, ""))
    listening = listen(address)
    store = address, int(listening.getsockname()[1])
    wires = dict(enumerate((wire for wire, _ in arrived), 1))
    start = max(start, last + 1)
    for node, wire in wires.items():
        wire.send({"kind": "welcome", "node": node, "hosts": hosts, "store": store, "start": start})
    return _Met(node=0, machines=hosts, wires=wires, store=store, start=start, folder=folder, listening=listening)


def _in_order(arrived: list[tuple[Wire, Message]]) -> list[tuple[Wire, Message]]:
    """Returns the hosts in the order of their nodes: those that had one keep it, the others take what is free."""
    nodes: dict[int, tuple[Wire, Message]] = {}
    for each in arrived:
        node = each[1].get("node")
        if node is not None and 0 < node <= len(arrived):
            nodes.setdefault(node, each)
    free = (node for node in range(1, len(arrived) + 1) if node not in nodes)
    placed = [each[0] for each in nodes.values()]
    nodes |= dict(zip(free, [each for each in arrived if each[0] not in placed], strict=True))
    return [nodes[node] for node in sorted(nodes)]


def _place(hello: Message) -> int:
    place = hello.get("place")
    return place if isinstance(place, int) else -1


def _fault(meeting: Meeting, hellos: Sequence[Message], hosts: Sequence[str]) -> str:
    """Returns why these launchers cannot train together; "" if they can."""
    faults = [meeting.fault, *(str(hello.get("fault", "")) for hello in hellos)]
    for fault, host in zip(faults, hosts, strict=True):
        if fault:
            return fault if len(set(hosts)) == 1 else f"{host}: {fault}"
    places = [0, *map(_place, hellos)]
    if meeting.door is not None and places != list(range(len(places))):
        twice = next((place for n, place in enumerate(places) if place != n), 0)
        return f"{meeting.door.name}: two processes have come in the place {twice}, of {len(places)}"
    facts = [meeting.facts, *(hello["facts"] for hello in hellos)]
    return _difference(names_of(hosts, ranks=meeting.ranks), facts)


def names_of(hosts: Sequence[str], *, ranks: bool) -> list[str]:
    """Returns names by which a message can tell launchers apart, of which several may be on one host. `ranks`: each is
    that of one rank.
    """
    if ranks:
        return [f"rank {n} ({name})" if len(set(hosts)) > 1 else f"rank {n}" for n, name in enumerate(hosts)]
    return [f"{name} (node {n})" if hosts.count(name) > 1 else name for n, name in enumerate(hosts)]


def _difference(hosts: Sequence[str], facts: Sequence[Mapping[str, object]]) -> str:
    """Returns the first thing in which two hosts differ, in words; "" if there is none."""
    names = list(dict.fromkeys(name for each in facts for name in each))
    for name in names:
        told = [str(each.get(name, "nothing")) for each in facts]
        other = next((n for n, value in enumerate(told) if value != told[0]), None)
        if other is not None:
            return f"the hosts differ in {name}: {hosts[0]} has {told[0]}, and {hosts[other]} has {told[other]}"
    return ""


# ------------------------------------------------------------------------------------------------------- other hosts


def _join(meeting: Meeting, where: _Where, before: _Before | None = None) -> _Met:
    waiting = _Waiting(meeting, "")
    while True:
        waiting.what = f"for {where.name}, where the hosts meet"
        wire = _connected(where.find, waiting)
        try:
            return _welcomed(meeting, wire, where, before, waiting)
        except Left:
            wire.close()
            if before is None:
                raise
        except BaseException as error:
            if isinstance(error, Stopped):
                wire.send({"kind": "stop"})
            wire.close()
            raise


def _connected(find: Callable[[], tuple[str, int] | None], waiting: _Waiting) -> Wire:
    while True:
        where = find()
        try:
            if where is not None:
                return Wire(socket.create_connection(where, timeout=_HELLO))
        except OSError as error:
            waiting.why = f": {(error.strerror or str(error)).lower()}"
        waiting.look([])
        time.sleep(_AGAIN)


def _welcomed(meeting: Meeting, wire: Wire, where: _Where, before: _Before | None, waiting: _Waiting) -> _Met:
    """Says hello to the keeper, and returns what it answers when all have come. Raises NotMet, and Left if it leaves
    before.
    """
    hello = {"kind": "hello", "host": meeting.host, "facts": dict(meeting.facts), **(asdict(before) if before else {})}
    wire.send({**hello, "place": meeting.place, "fault": meeting.fault[: MOST // 8]})
    waiting.what, waiting.why = f"for the other hosts at {where.name}", ""
    while True:
        select.select([wire], [], [], _AGAIN)
        messages = wire.read()
        for n, message in enumerate(messages):
            if message.get("kind") == "refused":
                raise NotMet(str(message["why"]))
            if message.get("kind") == "stopped":
                raise Stopped
            if message.get("kind") == "welcome":
                address, port = message["store"]
                return _Met(
                    node=int(message["node"]),
                    machines=[str(host) for host in message["hosts"]],
                    wires={0: wire},
                    store=(str(address), int(port)),
                    start=int(message["start"]),
                    early=[(0, each) for each in messages[n + 1 :]],
                )
        if wire.closed:
            what = "another program listens there" if where.taken else "it left before all hosts had come"
            raise Left(f"the connection to {where.name} ended: {what}")
        waiting.look([])


class _Waiting:
    """Says what is waited for, now and then; raises NotMet when that lasts too long, Stopped when one is asked to."""

    def __init__(self, meeting: Meeting, what: str) -> None:
        self.what, self.why = what, ""
        self._meeting, self._began = meeting, time.monotonic()
        self._next = self._began + _SAY[0]

    def look(self, arrived: Sequence[str]) -> None:
        if self._meeting.stopped():
            raise Stopped
        now = time.monotonic()
        there = f"; here: {', '.join([self._meeting.host, *arrived])}" if arrived else ""
        if now > min(self._began + self._meeting.timeout, self._meeting.until):
            raise NotMet(
                f"waited {self._meeting.timeout:g} s (`launch.timeout`) {self.what}{self.why}{there}; "
                f"{self._meeting.needs.format(self._meeting.nodes)}"
            )
        if now >= self._next:
            self._next = now + _SAY[1]
            self._meeting.say(f"waiting {self.what}{self.why}{there}; the job takes {self._meeting.nodes}")


# ------------------------------------------------------------------------------------------------- a folder of all


def shared(company: Company, folder: str, timeout: float) -> tuple[str, list[int]]:
    """Returns the keeper's `folder`, which exists, and the launchers that do not see it: each looks for a file that the
    keeper writes there. Called by all. Raises NotMet, and OSError on the keeper.
    """
    if not company.keeps:
        asked = company.wait_for("folder", timeout)[0]
        company.tell("sees", sees=os.path.exists(str(asked["file"])))
        told = company.wait_for("blind", timeout)[0]
        return str(asked["folder"]), [int(node) for node in told["nodes"]]
    path = os.path.join(folder, f".dslc-{secrets.token_hex(8)}")
    with open(path, "x", encoding="utf-8"):
        pass
    try:
        company.tell("folder", folder=folder, file=path)
        answers = company.wait_for("sees", timeout)
    finally:
        os.remove(path)
    blind = [node for node, message in sorted(answers.items()) if not message.get("sees")]
    company.tell("blind", nodes=blind)
    return folder, blind
