"""How launchers find each other at a rendezvous: the coordinator waits, and the other launchers come to it.

Model: each other launcher sends a join request, with what it knows of the job, and waits. When all have come the
coordinator compares. If they agree, it accepts them with a node each and the address of the store. Else it refuses them
with the name of the first thing in which two hosts differ: its values stay where they are. After the first start of the
ranks a host that differs is refused alone. A new host takes the place of a host that was lost, or is not back within
`BACK` seconds.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from dslc.runtime.hosts.authentication import MOST, NO_SECRET
from dslc.runtime.hosts.connection import SILENCE, Connection, listen, readable
from dslc.runtime.hosts.join_requests import HELLO, JoinRequests
from dslc.runtime.hosts.messages import Message
from dslc.runtime.hosts.rendezvous import Rendezvous, StopRequestedError, WaitReporter
from dslc.runtime.hosts.rendezvous_address import RendezvousError
from dslc.runtime.hosts.run_secret import TOKEN

AGAIN = 0.2  # seconds between two attempts to connect
_HEARD = 8.0  # seconds in which a coordinator that waits for hosts answers to a join request
_REFUSALS = 10  # connections that end before they are authenticated, after which a host gives up
_LONGEST = 1 << 14  # characters of a reason that is sent
PARTING = 5.0  # seconds that the coordinator waits for the others to leave
BACK = 5.0  # seconds in which a host of the last start keeps its place for itself
_NOBODY = "nothing listens there: `--rendezvous` names one of the hosts that train, where the same command runs"
_NO_WAY = "no way leads there from here: look at the network of both (`ip route`), and at the name or address"
_SILENT = "another program listens there, or a training that has begun"
_EXPLAINED_BY = {"the plan": "--set"}  # facts that are compared only where another one differs


class HostLeftError(RendezvousError):
    """A host left while other hosts waited for it. It may come back."""


@dataclass(frozen=True, kw_only=True)
class RendezvousResult:
    """The result of a meeting: this launcher's node, all machines, the connections by node, and the store's address;
    the number of this start of the ranks, and the run directory of the previous start.
    """

    node: int
    machines: Sequence[str]
    connections: Mapping[int, Connection]
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
    """The rendezvous: its name in messages, how its address is found, and the socket that listens, on the coordinator.
    `taken`: another program of this host listens there.
    """

    name: str
    find: Callable[[], tuple[str, int] | None]
    listening: socket.socket | None = None
    taken: bool = False


# ---------------------------------------------------------------------------------------------------- the coordinator


def wait_for_hosts(
    rendezvous: Rendezvous,
    where: RendezvousPlace,
    start: int = 1,
    late: LateJoiners | None = None,
    awaited: frozenset[int] = frozenset(),
) -> RendezvousResult:
    """Waits for all hosts. `start`: of the ranks; after the first a host that differs is refused alone. `late` has
    those that have come already, and `awaited` are the nodes of the last start that were not lost.
    """
    assert where.listening is not None
    name = where.name if rendezvous.endpoint is not None else rendezvous.address
    waiting = WaitReporter(rendezvous, f"for the hosts at {name}")
    requests = late.requests if late is not None else JoinRequests(where.listening, rendezvous.create_secret())
    arrived = late.hand_over() if late is not None else []
    began = time.monotonic()
    try:
        while len(arrived) + 1 < rendezvous.nodes or (
            time.monotonic() < began + BACK and not awaited <= {join_request.get("node") for _, join_request in arrived}
        ):
            waiting.why = f"; {requests.refusal}" if requests.refusal else ""
            waiting.look([str(message["host"]) for _, message in arrived])
            readable([*requests.handles, *(connection.fileno() for connection, _ in arrived)], AGAIN)
            joined = _accept_join_requests(requests)
            arrived += [each for each in joined if start == 1 or has_same_facts(rendezvous, *each)]
            arrived = [(connection, message) for connection, message in arrived if not _has_left(connection)]
        if rendezvous.endpoint is None:
            arrived = _as_many(rendezvous, arrived)
        return _complete_rendezvous(rendezvous, arrived, where.listening.getsockname()[0], start)
    except BaseException as error:
        for connection, _ in arrived:
            if isinstance(error, StopRequestedError):
                connection.send({"kind": "stopped"})
            connection.close()
        if isinstance(error, StopRequestedError):
            _tell_who_comes(requests, rendezvous.nodes - 1 - len(arrived))
        raise
    finally:
        requests.close()


def _as_many(rendezvous: Rendezvous, arrived: list[tuple[Connection, Message]]) -> list[tuple[Connection, Message]]:
    """Returns as many hosts as the job takes, hosts of the last start first, and refuses the rest."""
    arrived = sorted(arrived, key=lambda each: each[1].get("node") is None)
    taken, over = arrived[: rendezvous.nodes - 1], arrived[rendezvous.nodes - 1 :]
    hosts = names_of([rendezvous.host, *(str(join_request["host"]) for _, join_request in taken)], ranks=False)
    for connection, join_request in over:
        refuse(connection, _too_late(rendezvous, join_request, hosts))
    return taken


def _too_late(rendezvous: Rendezvous, join_request: Message, hosts: Sequence[str]) -> str:
    return (
        f"{join_request['host']} comes too late: the job takes {rendezvous.takes} (`devices.nodes`), and trains with "
        f"{' and '.join(hosts)}\n"
        f"help: the same command once on each host; `--set devices.nodes={len(hosts) + 1}` on all is for one more"
    )


def _tell_who_comes(requests: JoinRequests, most: int) -> None:
    """Tells the hosts that come late that all stop, for a while: they would wait for this one to come back."""
    until = time.monotonic() + PARTING
    while most > 0 and (rest := until - time.monotonic()) > 0:
        readable(requests.handles, rest)
        for connection, _ in requests.poll():
            connection.send({"kind": "stopped"})
            connection.close()
            most -= 1


def _accept_join_requests(requests: JoinRequests) -> Iterator[tuple[Connection, Message]]:
    for connection, messages in requests.poll():
        _hear_stop(messages)
        connection.send({"kind": "heard"})
        yield connection, messages[0]


def _has_left(connection: Connection) -> bool:
    _hear_stop(connection.receive())
    return connection.closed


def _hear_stop(messages: Sequence[Message]) -> None:
    if any(message.get("kind") == "stop" for message in messages):
        raise StopRequestedError


def has_same_facts(rendezvous: Rendezvous, connection: Connection, join_request: Message) -> bool:
    """True for a host with the same facts as this one; another host is refused with the first fact that differs."""
    hosts, facts = [rendezvous.host, str(join_request["host"])], [rendezvous.facts, join_request["facts"]]
    differs = _difference(rendezvous, hosts, facts)
    if differs is not None:
        rendezvous.say(f"{join_request['host']} was not taken: {differs.here}")
        refuse(connection, differs.there, differs.fact)
    return differs is None


def refuse(connection: Connection, why: str, fact: str = "") -> None:
    connection.send({"kind": "refused", "why": why[:_LONGEST], "fact": fact})
    connection.close()


@dataclass(frozen=True, kw_only=True)
class LauncherMismatch:
    here: str
    there: str
    fact: str = ""


def _complete_rendezvous(
    rendezvous: Rendezvous, arrived: list[tuple[Connection, Message]], address: str, start: int
) -> RendezvousResult:
    if rendezvous.endpoint is not None:
        arrived.sort(key=lambda each: _place(each[1]))
    else:
        arrived = _in_order(arrived)
    hosts = [rendezvous.host, *(str(message["host"]) for _, message in arrived)]
    wrong = _fault(rendezvous, [message for _, message in arrived], hosts)
    if wrong is not None:
        for connection, _ in arrived:
            refuse(connection, wrong.there, wrong.fact)
        raise RendezvousError(wrong.here)
    last, folder = last_start(arrived)
    return accept_hosts(arrived, hosts, address, max(start, last + 1), folder)


def last_start(arrived: Sequence[tuple[Connection, Message]]) -> tuple[int, str]:
    """Returns the number of the last start and its run directory, by the hosts that took part in it and may know more
    than a new coordinator; 0 and "" if none did.
    """
    starts = ((int(m.get("start") or 0), str(m.get("folder") or "")) for _, m in arrived)
    last, folder = max(starts, default=(0, ""))
    return last, folder if last else ""


def accept_hosts(
    arrived: Sequence[tuple[Connection, Message]],
    hosts: Sequence[str],
    address: str,
    start: int,
    folder: str,
    changes: int = 0,
    addresses: Sequence[str] = (),
) -> RendezvousResult:
    """Opens the store's port, and sends each host its node, in the order in which they are given."""
    listening = listen(address)
    store = address, int(listening.getsockname()[1])
    reply = {"hosts": hosts, "store": store, "start": start, "changes": changes, "addresses": addresses}
    connections = dict(enumerate((connection for connection, _ in arrived), 1))
    for node, connection in connections.items():
        connection.send({"kind": "join_reply", "node": node, **reply})
    return RendezvousResult(
        node=0,
        machines=hosts,
        connections=connections,
        store=store,
        start=start,
        folder=folder,
        changes=changes,
        addresses=addresses,
        listening=listening,
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


def _place(join_request: Message) -> int:
    place = join_request.get("place")
    return place if isinstance(place, int) else -1


def _fault(rendezvous: Rendezvous, join_requests: Sequence[Message], hosts: Sequence[str]) -> LauncherMismatch | None:
    faults = [rendezvous.fault, *(str(request.get("fault", "")) for request in join_requests)]
    if rendezvous.endpoint is None:
        faults = []
    for fault, host in zip(faults, hosts, strict=False):
        if fault:
            said = fault if len(set(hosts)) == 1 else f"{host}: {fault}"
            return LauncherMismatch(here=said, there=said)
    places = [0, *map(_place, join_requests)]
    if rendezvous.endpoint is not None and places != list(range(len(places))):
        twice = next((place for n, place in enumerate(places) if place != n), 0)
        said = f"{rendezvous.endpoint.name}: two processes have come in the place {twice}, of {len(places)}"
        return LauncherMismatch(here=said, there=said)
    facts = [rendezvous.facts, *(join_request["facts"] for join_request in join_requests)]
    return _difference(rendezvous, names_of(hosts, ranks=rendezvous.ranks), facts)


def names_of(hosts: Sequence[str], *, ranks: bool) -> list[str]:
    """Returns names by which a message can tell launchers apart, several of which may be on one host, or start one rank
    each (`ranks`).
    """
    if ranks:
        return [f"rank {n} ({name})" if len(set(hosts)) > 1 else f"rank {n}" for n, name in enumerate(hosts)]
    return [f"{name} (node {n})" if hosts.count(name) > 1 else name for n, name in enumerate(hosts)]


def _difference(
    rendezvous: Rendezvous, hosts: Sequence[str], facts: Sequence[Mapping[str, object]]
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
        remedy = rendezvous.remedy(name)
        help = f"\nhelp: {remedy}" if remedy else ""
        differ = f"the hosts differ in {name}"
        return LauncherMismatch(
            here=f"{differ}: {hosts[0]} has {told[0]}, and {hosts[other]} has {told[1]}{help}",
            there=f"{differ}: {hosts[other]} has not the same as {hosts[0]}{help}",
            fact=name,
        )
    return None


def refusal_error(rendezvous: Rendezvous, message: Message) -> RendezvousError:
    first, newline, rest = str(message["why"]).partition("\n")
    fact = message.get("fact", "")
    value = f"; {rendezvous.host} has {rendezvous.facts.get(fact, 'nothing')}" if fact else ""
    return RendezvousError(f"{first}{value}{newline}{rest}")


def _first_difference(name: str, facts: Sequence[Mapping[str, object]]) -> int | None:
    """Returns the first that has another fact of this name than the first of all; None if there is none."""
    told = [str(each.get(name, "nothing")) for each in facts]
    return next((n for n, value in enumerate(told) if value != told[0]), None)


class LateJoiners:
    """Refuses the hosts that come when all have met, until the training ends. If lost hosts may be replaced, a host
    that comes waits `SILENCE` seconds for a place: the coordinator may take so long to notice a loss, which a host of
    the last start notices before.
    """

    def __init__(self, rendezvous: Rendezvous, requests: JoinRequests) -> None:
        self._rendezvous, self.requests = rendezvous, requests
        self._arrived: dict[Connection, tuple[Message, float]] = {}  # join request, and when

    @property
    def handles(self) -> list[int]:
        return [*self.requests.handles, *(connection.fileno() for connection in self._arrived)]

    def look(self, hosts: Sequence[str]) -> None:
        """Tells the hosts that have come with which hosts the training goes on."""
        now = time.monotonic()
        for connection, (join_request, *_) in self.requests.poll():
            connection.send({"kind": "heard"})
            self._arrived[connection] = join_request, now
        for connection, (join_request, since) in list(self._arrived.items()):
            connection.receive()
            why = self._why(join_request, hosts, now - since)
            if why or connection.closed:
                del self._arrived[connection]
                refuse(connection, why)

    def hand_over(self) -> list[tuple[Connection, Message]]:
        """Returns those that wait for a place to the next meeting."""
        arrived, self._arrived = self._arrived, {}
        return [(connection, join_request) for connection, (join_request, _) in arrived.items()]

    def _why(self, join_request: Message, hosts: Sequence[str], waited: float) -> str:
        """Returns why a host must leave; "" if it may find a place yet."""
        if _difference(self._rendezvous, ["", ""], [self._rendezvous.facts, join_request["facts"]]) is not None:
            return (
                f"another training meets at {self._rendezvous.address}, that of {' and '.join(hosts)}, and "
                f"{join_request['host']} has another job or another --out\n"
                "help: on all hosts of this job another port, as `--rendezvous HOST:29401`"
            )
        if self._rendezvous.again and (join_request.get("node") is not None or waited < SILENCE):
            return ""
        return _too_late(self._rendezvous, join_request, hosts)

    def close(self) -> None:
        self.requests.close()
        for connection in self._arrived:
            connection.close()


# ------------------------------------------------------------------------------------------------------- other hosts


def join(rendezvous: Rendezvous, where: RendezvousPlace, before: PreviousStart | None = None) -> RendezvousResult:
    waiting, attempts = WaitReporter(rendezvous, ""), 0
    while True:
        waiting.what = f"for {where.name}, where the hosts meet"
        connection = _connected(rendezvous, where.find, waiting)
        try:
            return _request_join_at(rendezvous, connection, where, before, waiting)
        except HostLeftError:
            connection.close()
            attempts += not connection.authenticated
            if before is None and (connection.authenticated or attempts > _REFUSALS):
                raise
            time.sleep(0.0 if connection.authenticated else AGAIN)
        except BaseException as error:
            if isinstance(error, StopRequestedError):
                connection.send({"kind": "stop"})
            connection.close()
            raise


def _connected(rendezvous: Rendezvous, find: Callable[[], tuple[str, int] | None], waiting: WaitReporter) -> Connection:
    while True:
        place = find()
        connection = connect(rendezvous, place, waiting, HELLO) if place is not None else None
        if connection is not None:
            return connection
        waiting.look([])
        time.sleep(AGAIN)


def connect(rendezvous: Rendezvous, place: tuple[str, int], waiting: WaitReporter, timeout: float) -> Connection | None:
    """Returns a connection to the launcher at a place; None, with the reason in `waiting`, if there is none yet."""
    try:
        connection = socket.create_connection(place, timeout=timeout)
        secret = rendezvous.read_secret()
        if secret is not None:
            return Connection(connection, secret)
    except OSError as error:
        waiting.why = f": {(error.strerror or str(error)).lower()}"
        waiting.help = _NOBODY if error.errno == errno.ECONNREFUSED else _NO_WAY
        return None
    connection.close()
    waiting.unseen(rendezvous.secret.path)
    return None


def join_request(rendezvous: Rendezvous, before: PreviousStart | None) -> Message:
    last_start = asdict(before) if before is not None else {}
    return {"kind": "join_request", "host": rendezvous.host, "facts": dict(rendezvous.facts), **last_start}


def _request_join_at(
    rendezvous: Rendezvous,
    connection: Connection,
    where: RendezvousPlace,
    before: PreviousStart | None,
    waiting: WaitReporter,
) -> RendezvousResult:
    """Sends a join request to the coordinator, and returns what it answers when all have come. Raises RendezvousError,
    and HostLeftError if it leaves before.
    """
    fault = rendezvous.fault[: MOST // 8]  # a letter takes 6 bytes at most
    connection.send({**join_request(rendezvous, before), "place": rendezvous.place, "fault": fault})
    waiting.what, waiting.why, waiting.help = f"for the other hosts at {where.name}", "", ""
    heard, since = False, time.monotonic()
    while True:
        readable([connection], AGAIN)
        messages = connection.receive()
        for n, message in enumerate(messages):
            result = join_reply(rendezvous, message, connection, messages[n + 1 :])
            if result is not None:
                return result
        heard = heard or bool(messages) or connection.authenticated
        if before is None and connection.strange and connection.why == NO_SECRET:
            raise RendezvousError(other_secret(rendezvous, where.name))
        if before is None and (connection.strange or (connection.closed and where.taken and not heard)):
            raise RendezvousError(_other_program(rendezvous, where))
        if connection.closed:
            raise HostLeftError(
                f"the connection to {where.name} ended: it left before all hosts had come, or they are enough"
            )
        if not heard and rendezvous.endpoint is None and time.monotonic() - since > _HEARD:
            if not rendezvous.again:
                raise RendezvousError(_other_program(rendezvous, where))
            waiting.why = f", which does not answer: {_SILENT}"
        waiting.look([])


def other_secret(rendezvous: Rendezvous, name: str) -> str:
    """Returns the message of a host that knows another secret than the one at this place."""
    source = rendezvous.secret.path or (f"that of {TOKEN}" if rendezvous.secret.token else "none")
    return (
        f"the launcher at {name} does not know the secret of this run as {rendezvous.host} does, which has {source}\n"
        f"help: `export {TOKEN}=…`, the same on all hosts; or a folder that all share, which --out names"
    )


def _other_program(rendezvous: Rendezvous, where: RendezvousPlace) -> str:
    told = f"{where.name}, where the hosts are to meet, does not answer {rendezvous.host} as dslc does: {_SILENT}"
    host = where.name.rpartition(":")[0]
    if rendezvous.endpoint is not None:
        return told
    return f"{told}\nhelp: on all hosts another port, as `--rendezvous {host}:29401`"


def join_reply(
    rendezvous: Rendezvous, message: Message, connection: Connection, early: Sequence[Message]
) -> RendezvousResult | None:
    """Returns what a coordinator's join reply says; `early` has what arrived after it. None for another message. Raises
    RendezvousError for a refusal, and StopRequestedError.
    """
    if message["kind"] == "refused":
        raise refusal_error(rendezvous, message)
    if message["kind"] == "stopped":
        raise StopRequestedError
    if message["kind"] != "join_reply":
        return None
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
        connections={0: connection},
        store=(str(address), int(port)),
        start=int(message["start"]),
        changes=int(message.get("changes", 0)),
        addresses=[str(each) for each in addresses],
        early=[(0, each) for each in early],
    )
