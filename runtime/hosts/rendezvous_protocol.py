"""How launchers find each other at a rendezvous: the keeper, who waits for them, and the others, who come.

Model: the keeper listens. Each other launcher says hello, with what it knows of the job, and waits. When all have come
the keeper compares. If they agree, it welcomes them with a node each and the address of the store. Else it refuses them
with the name of the first thing in which two hosts differ: its values stay where they are. After the first start of the
ranks a host that differs is refused alone. A new host takes the place of a host that was lost, or is not back within
`BACK` seconds.
"""

from __future__ import annotations

import errno
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from dslc.runtime.hosts.authentication import MOST, NO_SECRET
from dslc.runtime.hosts.connection import SILENCE, Connection, listen, readable
from dslc.runtime.hosts.join_requests import HELLO, JoinRequests
from dslc.runtime.hosts.messages import Message
from dslc.runtime.hosts.rendezvous_address import Endpoint, RendezvousError
from dslc.runtime.hosts.run_secret import TOKEN, RunSecret, SecretError

AGAIN = 0.2  # seconds between two attempts to connect
_SAY = 2.0, 60.0  # seconds after which it is first said who is awaited, and then every so many
_HEARD = 8.0  # seconds in which a keeper that waits for hosts answers to a hello
_UNSEEN = 10.0  # seconds after which a host that does not see the file of the secret gives up
_REFUSALS = 10  # connections that end before they are authenticated, after which a host gives up
_LONGEST = 1 << 14  # characters of a reason that is sent
PARTING = 5.0  # seconds that the keeper waits for the others to leave
BACK = 5.0  # seconds in which a host of the last start keeps its place for itself
_FOR_HOSTS = "the job takes {} (`devices.nodes`), each started with the same command"
_NOBODY = "nothing listens there: `--rendezvous` names one of the hosts that train, where the same command runs"
_NO_WAY = "no way leads there from here: look at the network of both (`ip route`), and at the name or address"
_EXPLAINED_BY = {"the plan": "--set"}  # facts that are compared only where another one differs


class HostLeftError(RendezvousError):
    """A host left while others waited for it. It may come back."""


class StopRequestedError(Exception):
    """A host was asked to stop while hosts met."""


@dataclass(frozen=True)
class Rendezvous:
    """The part of one launcher: where they meet, how many they are, and what it knows of the job, by name.

    With a `door` the launchers know their places, and what has started them (`by`: "mpirun"); each starts `processes`
    ranks. One that cannot train has the reason as its `fault`, and comes to say so: all leave, and the keeper with that
    reason.
    """

    rendezvous: str
    nodes: int  # the most, of an elastic training
    facts: Mapping[str, str]
    timeout: float  # seconds that hosts are waited for
    say: Callable[[str], object] = field(default=lambda text: None)
    host: str = field(default_factory=socket.gethostname)
    processes: int = 1
    door: Endpoint | None = None
    place: int = 0
    by: str = ""
    needs: str = _FOR_HOSTS
    fault: str = ""
    again: bool = False  # hosts that are lost may come back
    secret: RunSecret = field(default_factory=RunSecret)
    until: float = math.inf  # the time of the clock, if that is before `timeout` has passed
    stopped: Callable[[], bool] = field(default=lambda: False)
    counts: tuple[int, ...] = ()  # of an elastic training: the numbers of hosts on which it can go on
    claim: Callable[[str], bool] = field(default=lambda folder: True)  # takes a run directory over, if it is free
    holder: Callable[[], str] = field(default=lambda: "")  # who trains in the run directory, if somebody does
    remedy: Callable[[str], str] = field(default=lambda name: "")  # for a fact in which two hosts differ
    patient: bool = False  # before the first start hosts are waited for without end: a cluster brings them

    @property
    def takes(self) -> str:
        """The number of hosts, in words."""
        return f"{self.counts[0]} to {self.nodes}" if self.counts and self.counts[0] < self.nodes else str(self.nodes)

    def create_secret(self) -> bytes:
        """Returns the secret of the run, on the keeper. Raises RendezvousError and OSError."""
        try:
            return self._of_door or self.secret.create()
        except SecretError as error:
            raise RendezvousError(str(error)) from error

    def read_secret(self) -> bytes | None:
        """Returns the secret of the run; None if its file is not seen here. Raises RendezvousError."""
        try:
            return self._of_door or self.secret.load()
        except SecretError as error:
            raise RendezvousError(str(error)) from error

    @property
    def _of_door(self) -> bytes:
        return self.door.secret if self.door is not None and not self.secret.token else b""

    @property
    def ranks(self) -> bool:
        """True if each launcher launches one rank, with a place that it was given."""
        return self.door is not None and self.processes == 1


@dataclass(frozen=True, kw_only=True)
class RendezvousResult:
    """The result of a meeting: this launcher's node, all machines, the wires by node, and the store's address; the
    number of this start of the ranks, and the run directory of the one before.
    """

    node: int
    machines: Sequence[str]
    wires: Mapping[int, Connection]
    store: tuple[str, int]
    start: int = 1
    folder: str = ""
    changes: int = 0  # how many of the starts so far were no restarts: hosts had come or gone
    addresses: Sequence[str] = ()  # of an elastic training, by node
    early: Sequence[tuple[int, Message]] = ()  # messages that arrived already
    listening: socket.socket | None = None


@dataclass(frozen=True, kw_only=True)
class PreviousStart:
    """What a launcher reports about the previous start that it took part in."""

    node: int
    start: int
    folder: str
    changes: int = 0


@dataclass(frozen=True)
class RendezvousPlace:
    """The rendezvous: its name in messages, how its address is found, and the socket that listens, on the keeper.
    `taken`: another program of this host listens there.
    """

    name: str
    find: Callable[[], tuple[str, int] | None]
    listening: socket.socket | None = None
    taken: bool = False


# --------------------------------------------------------------------------------------------------------- the keeper


def keep(
    meeting: Rendezvous,
    where: RendezvousPlace,
    start: int = 1,
    late: LateJoiners | None = None,
    awaited: frozenset[int] = frozenset(),
) -> RendezvousResult:
    """Waits for all hosts. `start`: of the ranks; after the first a host that differs is refused alone. `late` has
    those that have come already, and `awaited` are the nodes of the last start that were not lost.
    """
    assert where.listening is not None
    name = where.name if meeting.door is not None else meeting.rendezvous
    waiting = WaitReporter(meeting, f"for the hosts at {name}")
    requests = late.requests if late is not None else JoinRequests(where.listening, meeting.create_secret())
    arrived = late.hand_over() if late is not None else []
    began = time.monotonic()
    try:
        while len(arrived) + 1 < meeting.nodes or (
            time.monotonic() < began + BACK and not awaited <= {hello.get("node") for _, hello in arrived}
        ):
            waiting.why = f"; {requests.refusal}" if requests.refusal else ""
            waiting.look([str(message["host"]) for _, message in arrived])
            readable([*requests.handles, *(wire.fileno() for wire, _ in arrived)], AGAIN)
            arrived += [each for each in _said_hello(requests) if start == 1 or has_same_facts(meeting, *each)]
            arrived = [(wire, message) for wire, message in arrived if not _has_left(wire)]
        if meeting.door is None:
            arrived = _as_many(meeting, arrived)
        return _complete_rendezvous(meeting, arrived, where.listening.getsockname()[0], start)
    except BaseException as error:
        for wire, _ in arrived:
            if isinstance(error, StopRequestedError):
                wire.send({"kind": "stopped"})
            wire.close()
        if isinstance(error, StopRequestedError):
            _tell_who_comes(requests, meeting.nodes - 1 - len(arrived))
        raise
    finally:
        requests.close()


def _as_many(meeting: Rendezvous, arrived: list[tuple[Connection, Message]]) -> list[tuple[Connection, Message]]:
    """Returns as many hosts as the job takes, hosts of the last start first, and refuses the others."""
    arrived = sorted(arrived, key=lambda each: each[1].get("node") is None)
    taken, over = arrived[: meeting.nodes - 1], arrived[meeting.nodes - 1 :]
    hosts = names_of([meeting.host, *(str(hello["host"]) for _, hello in taken)], ranks=False)
    for wire, hello in over:
        refuse(wire, _too_late(meeting, hello, hosts))
    return taken


def _too_late(meeting: Rendezvous, hello: Message, hosts: Sequence[str]) -> str:
    return (
        f"{hello['host']} comes too late: the job takes {meeting.takes} (`devices.nodes`), and trains with "
        f"{' and '.join(hosts)}\n"
        f"help: the same command once on each host; `--set devices.nodes={len(hosts) + 1}` on all is for one more"
    )


def _tell_who_comes(requests: JoinRequests, most: int) -> None:
    """Tells the hosts that come late that all stop, for a while: they would wait for this one to come back."""
    until = time.monotonic() + PARTING
    while most > 0 and (rest := until - time.monotonic()) > 0:
        readable(requests.handles, rest)
        for wire, _ in requests.poll():
            wire.send({"kind": "stopped"})
            wire.close()
            most -= 1


def _said_hello(requests: JoinRequests) -> Iterator[tuple[Connection, Message]]:
    """Yields the connections that have said who they are."""
    for wire, messages in requests.poll():
        _hear_stop(messages)
        wire.send({"kind": "heard"})
        yield wire, messages[0]


def _has_left(wire: Connection) -> bool:
    _hear_stop(wire.receive())
    return wire.closed


def _hear_stop(messages: Sequence[Message]) -> None:
    if any(message.get("kind") == "stop" for message in messages):
        raise StopRequestedError


def has_same_facts(meeting: Rendezvous, wire: Connection, hello: Message) -> bool:
    """True for a host with the same facts as this one; another host is refused with the first fact that differs."""
    differs = _difference(meeting, [meeting.host, str(hello["host"])], [meeting.facts, hello["facts"]])
    if differs is not None:
        meeting.say(f"{hello['host']} was not taken: {differs.here}")
        refuse(wire, differs.there, differs.fact)
    return differs is None


def refuse(wire: Connection, why: str, fact: str = "") -> None:
    wire.send({"kind": "refused", "why": why[:_LONGEST], "fact": fact})
    wire.close()


@dataclass(frozen=True, kw_only=True)
class LauncherMismatch:
    """Why launchers cannot train together: in words for this one and for the others, and the `fact` that differs."""

    here: str
    there: str
    fact: str = ""


def _complete_rendezvous(
    meeting: Rendezvous, arrived: list[tuple[Connection, Message]], address: str, start: int
) -> RendezvousResult:
    if meeting.door is not None:
        arrived.sort(key=lambda each: _place(each[1]))
    else:
        arrived = _in_order(arrived)
    hosts = [meeting.host, *(str(message["host"]) for _, message in arrived)]
    wrong = _fault(meeting, [message for _, message in arrived], hosts)
    if wrong is not None:
        for wire, _ in arrived:
            refuse(wire, wrong.there, wrong.fact)
        raise RendezvousError(wrong.here)
    # If this keeper is a new one, the others know more than it does.
    last, folder = max(((int(m.get("start") or 0), str(m.get("folder") or "")) for _, m in arrived), default=(0, ""))
    listening = listen(address)
    store = address, int(listening.getsockname()[1])
    wires = dict(enumerate((wire for wire, _ in arrived), 1))
    folder = folder if last else ""
    start = max(start, last + 1)
    for node, wire in wires.items():
        wire.send({"kind": "welcome", "node": node, "hosts": hosts, "store": store, "start": start})
    return RendezvousResult(
        node=0, machines=hosts, wires=wires, store=store, start=start, folder=folder, listening=listening
    )


def _in_order(arrived: list[tuple[Connection, Message]]) -> list[tuple[Connection, Message]]:
    """Returns the hosts in the order of their nodes: those that had one keep it, the others take what is free."""
    nodes: dict[int, tuple[Connection, Message]] = {}
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


def _fault(meeting: Rendezvous, hellos: Sequence[Message], hosts: Sequence[str]) -> LauncherMismatch | None:
    """Returns why these launchers cannot train together; None if they can."""
    faults = [meeting.fault, *(str(hello.get("fault", "")) for hello in hellos)] if meeting.door is not None else []
    for fault, host in zip(faults, hosts, strict=False):
        if fault:
            said = fault if len(set(hosts)) == 1 else f"{host}: {fault}"
            return LauncherMismatch(here=said, there=said)
    places = [0, *map(_place, hellos)]
    if meeting.door is not None and places != list(range(len(places))):
        twice = next((place for n, place in enumerate(places) if place != n), 0)
        said = f"{meeting.door.name}: two processes have come in the place {twice}, of {len(places)}"
        return LauncherMismatch(here=said, there=said)
    facts = [meeting.facts, *(hello["facts"] for hello in hellos)]
    return _difference(meeting, names_of(hosts, ranks=meeting.ranks), facts)


def names_of(hosts: Sequence[str], *, ranks: bool) -> list[str]:
    """Returns names by which a message can tell launchers apart; several launchers may be on one host. `ranks`: each
    launches one rank.
    """
    if ranks:
        return [f"rank {n} ({name})" if len(set(hosts)) > 1 else f"rank {n}" for n, name in enumerate(hosts)]
    return [f"{name} (node {n})" if hosts.count(name) > 1 else name for n, name in enumerate(hosts)]


def _difference(
    meeting: Rendezvous, hosts: Sequence[str], facts: Sequence[Mapping[str, object]]
) -> LauncherMismatch | None:
    """Returns the first thing in which two hosts differ, with the remedy; None if there is none."""
    names = list(dict.fromkeys(name for each in facts for name in each if name not in _EXPLAINED_BY.values()))
    for name in names:
        other = _first_difference(name, facts)
        if other is None:
            continue
        cause = _EXPLAINED_BY.get(name, name)
        name, other = (
            (cause, cause_other) if (cause_other := _first_difference(cause, facts)) is not None else (name, other)
        )
        told = [str(facts[n].get(name, "nothing")) for n in (0, other)]
        remedy = meeting.remedy(name)
        help = f"\nhelp: {remedy}" if remedy else ""
        differ = f"the hosts differ in {name}"
        return LauncherMismatch(
            here=f"{differ}: {hosts[0]} has {told[0]}, and {hosts[other]} has {told[1]}{help}",
            there=f"{differ}: {hosts[other]} has not the same as {hosts[0]}{help}",
            fact=name,
        )
    return None


def refusal_error(meeting: Rendezvous, message: Message) -> RendezvousError:
    """Returns the error of a host that was refused, with its own value of what differs."""
    first, newline, rest = str(message["why"]).partition("\n")
    fact = message.get("fact", "")
    value = f"; {meeting.host} has {meeting.facts.get(fact, 'nothing')}" if fact else ""
    return RendezvousError(f"{first}{value}{newline}{rest}")


def _first_difference(name: str, facts: Sequence[Mapping[str, object]]) -> int | None:
    """Returns the first that has another fact of this name than the first of all; None if there is none."""
    told = [str(each.get(name, "nothing")) for each in facts]
    return next((n for n, value in enumerate(told) if value != told[0]), None)


class LateJoiners:
    """Refuses the hosts that come when all have met, until the training ends.

    If hosts that are lost may be replaced, a host that comes waits `SILENCE` seconds for a place. The keeper may take
    so long to notice that another host is lost. A host of the last start has noticed that before the keeper, and waits.
    """

    def __init__(self, meeting: Rendezvous, requests: JoinRequests) -> None:
        self._meeting, self.requests = meeting, requests
        self._arrived: dict[Connection, tuple[Message, float]] = {}  # hello, and when

    @property
    def handles(self) -> list[int]:
        """The descriptors to wait for."""
        return [*self.requests.handles, *(wire.fileno() for wire in self._arrived)]

    def look(self, hosts: Sequence[str]) -> None:
        """Tells those who have come with which hosts the training goes on."""
        now = time.monotonic()
        for wire, (hello, *_) in self.requests.poll():
            wire.send({"kind": "heard"})
            self._arrived[wire] = hello, now
        for wire, (hello, since) in list(self._arrived.items()):
            wire.receive()
            why = self._why(hello, hosts, now - since)
            if why or wire.closed:
                del self._arrived[wire]
                refuse(wire, why)

    def hand_over(self) -> list[tuple[Connection, Message]]:
        """Returns those that wait for a place to the next meeting."""
        arrived, self._arrived = self._arrived, {}
        return [(wire, hello) for wire, (hello, _) in arrived.items()]

    def _why(self, hello: Message, hosts: Sequence[str], waited: float) -> str:
        """Returns why a host has to leave; "" if it may find a place yet."""
        if _difference(self._meeting, ["", ""], [self._meeting.facts, hello["facts"]]) is not None:
            return (
                f"another training meets at {self._meeting.rendezvous}, that of {' and '.join(hosts)}, and "
                f"{hello['host']} has another job or another --out\n"
                "help: on all hosts of this job another port, as `--rendezvous HOST:29401`"
            )
        if self._meeting.again and (hello.get("node") is not None or waited < SILENCE):
            return ""
        return _too_late(self._meeting, hello, hosts)

    def close(self) -> None:
        """Closes the connections; the socket that listens is the company's."""
        self.requests.close()
        for wire in self._arrived:
            wire.close()


# ------------------------------------------------------------------------------------------------------- other hosts


def join(meeting: Rendezvous, where: RendezvousPlace, before: PreviousStart | None = None) -> RendezvousResult:
    waiting, attempts = WaitReporter(meeting, ""), 0
    while True:
        waiting.what = f"for {where.name}, where the hosts meet"
        wire = _connected(meeting, where.find, waiting)
        try:
            return _welcomed(meeting, wire, where, before, waiting)
        except HostLeftError:
            wire.close()
            attempts += not wire.authenticated
            if before is None and (wire.authenticated or attempts > _REFUSALS):
                raise
            time.sleep(0.0 if wire.authenticated else AGAIN)
        except BaseException as error:
            if isinstance(error, StopRequestedError):
                wire.send({"kind": "stop"})
            wire.close()
            raise


def _connected(meeting: Rendezvous, find: Callable[[], tuple[str, int] | None], waiting: WaitReporter) -> Connection:
    while True:
        place = find()
        try:
            if place is not None:
                connection = socket.create_connection(place, timeout=HELLO)
                secret = meeting.read_secret()
                if secret is not None:
                    return Connection(connection, secret)
                connection.close()
                waiting.unseen(meeting.secret.path)
        except OSError as error:
            waiting.why = f": {(error.strerror or str(error)).lower()}"
            waiting.help = _NOBODY if error.errno == errno.ECONNREFUSED else _NO_WAY
        waiting.look([])
        time.sleep(AGAIN)


def _welcomed(
    meeting: Rendezvous, wire: Connection, where: RendezvousPlace, before: PreviousStart | None, waiting: WaitReporter
) -> RendezvousResult:
    """Says hello to the keeper, and returns what it answers when all have come. Raises RendezvousError, and
    HostLeftError if it leaves before.
    """
    hello = {"kind": "hello", "host": meeting.host, "facts": dict(meeting.facts), **(asdict(before) if before else {})}
    wire.send({**hello, "place": meeting.place, "fault": meeting.fault[: MOST // 8]})  # a letter takes 6 bytes at most
    waiting.what, waiting.why, waiting.help = f"for the other hosts at {where.name}", "", ""
    heard, since = False, time.monotonic()
    while True:
        readable([wire], AGAIN)
        messages = wire.receive()
        for n, message in enumerate(messages):
            heard = True
            if message.get("kind") == "refused":
                raise refusal_error(meeting, message)
            if message.get("kind") == "stopped":
                raise StopRequestedError
            if message.get("kind") == "welcome":
                return welcome(message, wire, messages[n + 1 :])
        heard = heard or wire.authenticated
        if before is None and wire.strange and wire.why == NO_SECRET:
            raise RendezvousError(other_secret(meeting, where.name))
        if before is None and (wire.strange or (wire.closed and where.taken and not heard)):
            raise RendezvousError(
                _other_program(meeting, where, "another program listens there, or a training that has begun")
            )
        if wire.closed:
            raise HostLeftError(
                f"the connection to {where.name} ended: it left before all hosts had come, or they are enough"
            )
        if not heard and meeting.door is None and time.monotonic() - since > _HEARD:
            silent = "another program listens there, or a training that has begun"
            if not meeting.again:
                raise RendezvousError(_other_program(meeting, where, silent))
            waiting.why = f", which does not answer: {silent}"
        waiting.look([])


def other_secret(meeting: Rendezvous, name: str) -> str:
    """Returns the message of a host that knows another secret than the one at this place."""
    source = meeting.secret.path or (f"that of {TOKEN}" if meeting.secret.token else "none")
    return (
        f"the launcher at {name} does not know the secret of this run as {meeting.host} does, which has {source}\n"
        f"help: `export {TOKEN}=…`, the same on all hosts; or a folder that all share, which --out names"
    )


def _other_program(meeting: Rendezvous, where: RendezvousPlace, what: str) -> str:
    told = f"{where.name}, where the hosts are to meet, does not answer {meeting.host} as dslc does: {what}"
    host = where.name.rpartition(":")[0]
    return (
        told if meeting.door is not None else f"{told}\nhelp: on all hosts another port, as `--rendezvous {host}:29401`"
    )


def welcome(message: Message, wire: Connection, early: Sequence[Message]) -> RendezvousResult:
    """Returns what a keeper's welcome says of the meeting; `early` has what arrived after it."""
    address, port = message["store"]
    machines = [str(host) for host in message["hosts"]]
    addresses = message.get("addresses", ())
    if not 0 < message["node"] < len(machines) or (addresses and len(addresses) != len(machines)):
        raise RendezvousError(
            f"{machines[0] if machines else 'the first host'} sent a welcome with a place that is none"
        )
    return RendezvousResult(
        node=int(message["node"]),
        machines=machines,
        wires={0: wire},
        store=(str(address), int(port)),
        start=int(message["start"]),
        changes=int(message.get("changes", 0)),
        addresses=[str(each) for each in addresses],
        early=[(0, each) for each in early],
    )


class WaitReporter:
    """Says what is waited for, now and then; raises RendezvousError when that lasts too long, StopRequestedError when
    one is asked to.
    """

    def __init__(self, meeting: Rendezvous, what: str) -> None:
        self.what, self.why, self.help = what, "", ""
        self.patient = False  # it is known that this host waits for a place
        self._meeting, self._began = meeting, time.monotonic()
        self._unseen = 0.0  # since when somebody answers, but the file of the secret is not seen
        self._next = self._began + _SAY[0]

    def turn_to(self, what: str, help: str) -> None:
        """Waits for something else from now on, and says so at once."""
        if what != self.what:
            self.what, self.why, self.help, self._next = what, "", help, time.monotonic()

    def unseen(self, path: str) -> None:
        """Waits for the file of the secret, for a while. Raises RendezvousError."""
        self._unseen = self._unseen or time.monotonic()
        self.why = f", whose secret {path} is not seen here"
        self.help = f"a folder that all hosts share, which --out names; or the same {TOKEN} on all of them"
        if time.monotonic() > self._unseen + _UNSEEN:
            raise RendezvousError(f"{self._meeting.host} waited {_UNSEEN:g} s {self.what}{self.why}\nhelp: {self.help}")

    def look(self, arrived: Sequence[str]) -> None:
        if self._meeting.stopped():
            raise StopRequestedError
        now = time.monotonic()
        there = f"; here: {', '.join([self._meeting.host, *arrived])}" if arrived else ""
        limit = math.inf if self._meeting.patient else self._began + self._meeting.timeout
        if not self.patient and now > min(limit, self._meeting.until):
            waited = f"{self._meeting.host} waited {self._meeting.timeout:g} s (`launch.timeout`) {self.what}{self.why}"
            help = f"\nhelp: {self.help}" if self.help else ""
            raise RendezvousError(f"{waited}{there}; {self._meeting.needs.format(self._meeting.takes)}{help}")
        if now >= self._next and not self.patient:
            self._next = now + _SAY[1]
            self._meeting.say(f"waiting {self.what}{self.why}{there}; the job takes {self._meeting.takes}")
