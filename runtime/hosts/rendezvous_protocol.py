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
    """A launcher's report on the previous start that it took part in."""

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
    rendezvous_place: RendezvousPlace,
    start: int = 1,
    late_joiners: LateJoiners | None = None,
    expected_nodes: frozenset[int] = frozenset(),
) -> RendezvousResult:
    """Waits for all hosts. `start`: of the ranks; after the first a host that differs is refused alone.
    `late_joiners` has the hosts that have come already; `expected_nodes` are the nodes of the last start that were
    not lost.
    """
    assert rendezvous_place.listening is not None
    name = rendezvous_place.name if rendezvous.endpoint is not None else rendezvous.address
    wait_reporter = WaitReporter(rendezvous, f"for the hosts at {name}")
    requests = (
        late_joiners.requests
        if late_joiners is not None
        else JoinRequests(rendezvous_place.listening, rendezvous.create_secret())
    )
    arrivals = late_joiners.hand_over() if late_joiners is not None else []
    began = time.monotonic()
    try:
        while len(arrivals) + 1 < rendezvous.nodes or (
            time.monotonic() < began + BACK
            and not expected_nodes <= {join_request.get("node") for _, join_request in arrivals}
        ):
            wait_reporter.why = f"; {requests.refusal}" if requests.refusal else ""
            wait_reporter.look([str(message["host"]) for _, message in arrivals])
            readable([*requests.handles, *(connection.fileno() for connection, _ in arrivals)], AGAIN)
            joiners = _accept_join_requests(requests)
            arrivals += [joiner for joiner in joiners if start == 1 or has_same_facts(rendezvous, *joiner)]
            arrivals = [(connection, message) for connection, message in arrivals if not _has_left(connection)]
        if rendezvous.endpoint is None:
            arrivals = _as_many(rendezvous, arrivals)
        return _complete_rendezvous(rendezvous, arrivals, rendezvous_place.listening.getsockname()[0], start)
    except BaseException as error:
        for connection, _ in arrivals:
            if isinstance(error, StopRequestedError):
                connection.send({"kind": "stopped"})
            connection.close()
        if isinstance(error, StopRequestedError):
            _tell_who_comes(requests, rendezvous.nodes - 1 - len(arrivals))
        raise
    finally:
        requests.close()


def _as_many(rendezvous: Rendezvous, arrivals: list[tuple[Connection, Message]]) -> list[tuple[Connection, Message]]:
    """Returns as many hosts as the job takes, hosts of the last start first, and refuses the rest."""
    arrivals = sorted(arrivals, key=lambda arrival: arrival[1].get("node") is None)
    accepted_hosts, refused_hosts = arrivals[: rendezvous.nodes - 1], arrivals[rendezvous.nodes - 1 :]
    hosts = names_of([rendezvous.host, *(str(join_request["host"]) for _, join_request in accepted_hosts)], ranks=False)
    for connection, join_request in refused_hosts:
        refuse(connection, _too_late(rendezvous, join_request, hosts))
    return accepted_hosts


def _too_late(rendezvous: Rendezvous, join_request: Message, hosts: Sequence[str]) -> str:
    return (
        f"{join_request['host']} comes too late: the job takes {rendezvous.takes} (`devices.nodes`), and trains with "
        f"{' and '.join(hosts)}\n"
        f"help: the same command once on each host; `--set devices.nodes={len(hosts) + 1}` on all is for one more"
    )


def _tell_who_comes(requests: JoinRequests, limit: int) -> None:
    """Tells the hosts that come late that all stop, for a while: they would wait for this one to come back."""
    until = time.monotonic() + PARTING
    while limit > 0 and (seconds_left := until - time.monotonic()) > 0:
        readable(requests.handles, seconds_left)
        for connection, _ in requests.poll():
            connection.send({"kind": "stopped"})
            connection.close()
            limit -= 1


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


def refuse(connection: Connection, reason: str, fact: str = "") -> None:
    connection.send({"kind": "refused", "why": reason[:_LONGEST], "fact": fact})
    connection.close()


@dataclass(frozen=True, kw_only=True)
class LauncherMismatch:
    here: str
    there: str
    fact: str = ""


def _complete_rendezvous(
    rendezvous: Rendezvous, arrivals: list[tuple[Connection, Message]], address: str, start: int
) -> RendezvousResult:
    if rendezvous.endpoint is not None:
        arrivals.sort(key=lambda arrival: _place(arrival[1]))
    else:
        arrivals = _in_order(arrivals)
    hosts = [rendezvous.host, *(str(message["host"]) for _, message in arrivals)]
    mismatch = _fault(rendezvous, [message for _, message in arrivals], hosts)
    if mismatch is not None:
        for connection, _ in arrivals:
            refuse(connection, mismatch.there, mismatch.fact)
        raise RendezvousError(mismatch.here)
    last_number, folder = last_start(arrivals)
    return accept_hosts(arrivals, hosts, address, max(start, last_number + 1), folder)


def last_start(arrivals: Sequence[tuple[Connection, Message]]) -> tuple[int, str]:
    """Returns the number of the last start and its run directory, by the hosts that took part in it and may know more
    than a new coordinator; 0 and "" if none did.
    """
    starts = ((int(m.get("start") or 0), str(m.get("folder") or "")) for _, m in arrivals)
    last_number, folder = max(starts, default=(0, ""))
    return last_number, folder if last_number else ""


def accept_hosts(
    arrivals: Sequence[tuple[Connection, Message]],
    hosts: Sequence[str],
    address: str,
    start: int,
    folder: str,
    changes: int = 0,
    addresses: Sequence[str] = (),
) -> RendezvousResult:
    """Opens the store's port, and sends each host its node, in the order in which they are given."""
    listener = listen(address)
    store = address, int(listener.getsockname()[1])
    reply_fields = {"hosts": hosts, "store": store, "start": start, "changes": changes, "addresses": addresses}
    connections = dict(enumerate((connection for connection, _ in arrivals), 1))
    for node, connection in connections.items():
        connection.send({"kind": "join_reply", "node": node, **reply_fields})
    return RendezvousResult(
        node=0,
        machines=hosts,
        connections=connections,
        store=store,
        start=start,
        folder=folder,
        changes=changes,
        addresses=addresses,
        listening=listener,
    )


def _in_order(arrivals: list[tuple[Connection, Message]]) -> list[tuple[Connection, Message]]:
    """Returns the hosts in the order of their nodes: those that had one keep it, the others take what is free."""
    nodes: dict[int, tuple[Connection, Message]] = {}
    for arrival in arrivals:
        node = arrival[1].get("node")
        if node is not None and 0 < node <= len(arrivals):
            nodes.setdefault(node, arrival)
    free_nodes = (node for node in range(1, len(arrivals) + 1) if node not in nodes)
    placed_connections = [arrival[0] for arrival in nodes.values()]
    nodes |= dict(
        zip(free_nodes, [arrival for arrival in arrivals if arrival[0] not in placed_connections], strict=True)
    )
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
            fault_text = fault if len(set(hosts)) == 1 else f"{host}: {fault}"
            return LauncherMismatch(here=fault_text, there=fault_text)
    places = [0, *map(_place, join_requests)]
    if rendezvous.endpoint is not None and places != list(range(len(places))):
        twice = next((place for n, place in enumerate(places) if place != n), 0)
        fault_text = f"{rendezvous.endpoint.name}: two processes have come in the place {twice}, of {len(places)}"
        return LauncherMismatch(here=fault_text, there=fault_text)
    facts = [rendezvous.facts, *(join_request["facts"] for join_request in join_requests)]
    return _difference(rendezvous, names_of(hosts, ranks=rendezvous.ranks), facts)


def names_of(hosts: Sequence[str], *, ranks: bool) -> list[str]:
    """Returns names by which a message can tell launchers apart. Several launchers may be on one host, or start one
    rank each (`ranks`).
    """
    if ranks:
        return [f"rank {n} ({name})" if len(set(hosts)) > 1 else f"rank {n}" for n, name in enumerate(hosts)]
    return [f"{name} (node {n})" if hosts.count(name) > 1 else name for n, name in enumerate(hosts)]


def _difference(
    rendezvous: Rendezvous, hosts: Sequence[str], facts: Sequence[Mapping[str, object]]
) -> LauncherMismatch | None:
    """Returns the first thing in which two hosts differ, with the remedy; None if there is none."""
    names = list(
        dict.fromkeys(name for launcher_facts in facts for name in launcher_facts if name not in _EXPLAINED_BY.values())
    )
    for name in names:
        different_node = _first_difference(name, facts)
        if different_node is None:
            continue
        cause = _EXPLAINED_BY.get(name, name)
        name, different_node = (
            (cause, cause_other)
            if (cause_other := _first_difference(cause, facts)) is not None
            else (name, different_node)
        )
        fact_texts = [str(facts[n].get(name, "nothing")) for n in (0, different_node)]
        remedy = rendezvous.remedy(name)
        help = f"\nhelp: {remedy}" if remedy else ""
        differ = f"the hosts differ in {name}"
        return LauncherMismatch(
            here=f"{differ}: {hosts[0]} has {fact_texts[0]}, and {hosts[different_node]} has {fact_texts[1]}{help}",
            there=f"{differ}: {hosts[different_node]} has not the same as {hosts[0]}{help}",
            fact=name,
        )
    return None


def refusal_error(rendezvous: Rendezvous, message: Message) -> RendezvousError:
    first_line, newline, other_lines = str(message["why"]).partition("\n")
    fact = message.get("fact", "")
    value = f"; {rendezvous.host} has {rendezvous.facts.get(fact, 'nothing')}" if fact else ""
    return RendezvousError(f"{first_line}{value}{newline}{other_lines}")


def _first_difference(name: str, facts: Sequence[Mapping[str, object]]) -> int | None:
    """Returns the first that has another fact of this name than the first of all; None if there is none."""
    fact_texts = [str(launcher_facts.get(name, "nothing")) for launcher_facts in facts]
    return next((n for n, value in enumerate(fact_texts) if value != fact_texts[0]), None)


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
            reason = self._why(join_request, hosts, now - since)
            if reason or connection.closed:
                del self._arrived[connection]
                refuse(connection, reason)

    def hand_over(self) -> list[tuple[Connection, Message]]:
        """Returns those that wait for a place to the next meeting."""
        arrivals, self._arrived = self._arrived, {}
        return [(connection, join_request) for connection, (join_request, _) in arrivals.items()]

    def _why(self, join_request: Message, hosts: Sequence[str], seconds_waited: float) -> str:
        """Returns why a host must leave; "" if it may find a place yet."""
        if _difference(self._rendezvous, ["", ""], [self._rendezvous.facts, join_request["facts"]]) is not None:
            return (
                f"another training meets at {self._rendezvous.address}, that of {' and '.join(hosts)}, and "
                f"{join_request['host']} has another job or another --out\n"
                "help: on all hosts of this job another port, as `--rendezvous HOST:29401`"
            )
        if self._rendezvous.again and (join_request.get("node") is not None or seconds_waited < SILENCE):
            return ""
        return _too_late(self._rendezvous, join_request, hosts)

    def close(self) -> None:
        self.requests.close()
        for connection in self._arrived:
            connection.close()


# ------------------------------------------------------------------------------------------------------- other hosts


def join(
    rendezvous: Rendezvous, rendezvous_place: RendezvousPlace, previous_start: PreviousStart | None = None
) -> RendezvousResult:
    wait_reporter, attempts = WaitReporter(rendezvous, ""), 0
    while True:
        wait_reporter.what = f"for {rendezvous_place.name}, where the hosts meet"
        connection = _connected(rendezvous, rendezvous_place.find, wait_reporter)
        try:
            return _request_join_at(rendezvous, connection, rendezvous_place, previous_start, wait_reporter)
        except HostLeftError:
            connection.close()
            attempts += not connection.authenticated
            if previous_start is None and (connection.authenticated or attempts > _REFUSALS):
                raise
            time.sleep(0.0 if connection.authenticated else AGAIN)
        except BaseException as error:
            if isinstance(error, StopRequestedError):
                connection.send({"kind": "stop"})
            connection.close()
            raise


def _connected(
    rendezvous: Rendezvous, find: Callable[[], tuple[str, int] | None], wait_reporter: WaitReporter
) -> Connection:
    while True:
        place = find()
        connection = connect(rendezvous, place, wait_reporter, HELLO) if place is not None else None
        if connection is not None:
            return connection
        wait_reporter.look([])
        time.sleep(AGAIN)


def connect(
    rendezvous: Rendezvous, place: tuple[str, int], wait_reporter: WaitReporter, timeout: float
) -> Connection | None:
    """Returns a connection to the launcher at a place, or None with the reason in `wait_reporter`."""
    try:
        connection = socket.create_connection(place, timeout=timeout)
        secret = rendezvous.read_secret()
        if secret is not None:
            return Connection(connection, secret)
    except OSError as error:
        wait_reporter.why = f": {(error.strerror or str(error)).lower()}"
        wait_reporter.help = _NOBODY if error.errno == errno.ECONNREFUSED else _NO_WAY
        return None
    connection.close()
    wait_reporter.unseen(rendezvous.secret.path)
    return None


def join_request(rendezvous: Rendezvous, previous_start: PreviousStart | None) -> Message:
    last_start = asdict(previous_start) if previous_start is not None else {}
    return {"kind": "join_request", "host": rendezvous.host, "facts": dict(rendezvous.facts), **last_start}


def _request_join_at(
    rendezvous: Rendezvous,
    connection: Connection,
    rendezvous_place: RendezvousPlace,
    previous_start: PreviousStart | None,
    wait_reporter: WaitReporter,
) -> RendezvousResult:
    """Sends a join request to the coordinator, and returns what it answers when all have come. Raises RendezvousError,
    and HostLeftError if it leaves before.
    """
    fault = rendezvous.fault[: MOST // 8]  # a letter takes 6 bytes at most
    connection.send({**join_request(rendezvous, previous_start), "place": rendezvous.place, "fault": fault})
    wait_reporter.what, wait_reporter.why, wait_reporter.help = (
        f"for the other hosts at {rendezvous_place.name}",
        "",
        "",
    )
    has_answered, since = False, time.monotonic()
    while True:
        readable([connection], AGAIN)
        messages = connection.receive()
        for n, message in enumerate(messages):
            result = join_reply(rendezvous, message, connection, messages[n + 1 :])
            if result is not None:
                return result
        has_answered = has_answered or bool(messages) or connection.authenticated
        if previous_start is None and connection.strange and connection.why == NO_SECRET:
            raise RendezvousError(other_secret(rendezvous, rendezvous_place.name))
        if previous_start is None and (
            connection.strange or (connection.closed and rendezvous_place.taken and not has_answered)
        ):
            raise RendezvousError(_other_program(rendezvous, rendezvous_place))
        if connection.closed:
            raise HostLeftError(
                f"the connection to {rendezvous_place.name} ended: "
                "it left before all hosts had come, or they are enough"
            )
        if not has_answered and rendezvous.endpoint is None and time.monotonic() - since > _HEARD:
            if not rendezvous.again:
                raise RendezvousError(_other_program(rendezvous, rendezvous_place))
            wait_reporter.why = f", which does not answer: {_SILENT}"
        wait_reporter.look([])


def other_secret(rendezvous: Rendezvous, name: str) -> str:
    """Returns the message of a host that knows another secret than the one at this place."""
    source = rendezvous.secret.path or (f"that of {TOKEN}" if rendezvous.secret.token else "none")
    return (
        f"the launcher at {name} does not know the secret of this run as {rendezvous.host} does, which has {source}\n"
        f"help: `export {TOKEN}=…`, the same on all hosts; or a folder that all share, which --out names"
    )


def _other_program(rendezvous: Rendezvous, rendezvous_place: RendezvousPlace) -> str:
    name = rendezvous_place.name
    reason = f"{name}, where the hosts are to meet, does not answer {rendezvous.host} as dslc does: {_SILENT}"
    host = name.rpartition(":")[0]
    if rendezvous.endpoint is not None:
        return reason
    return f"{reason}\nhelp: on all hosts another port, as `--rendezvous {host}:29401`"


def join_reply(
    rendezvous: Rendezvous, message: Message, connection: Connection, early_messages: Sequence[Message]
) -> RendezvousResult | None:
    """Returns what a coordinator's join reply says; None for another message. `early_messages` arrived after it. Raises
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
        addresses=[str(host_address) for host_address in addresses],
        early=[(0, early_message) for early_message in early_messages],
    )
