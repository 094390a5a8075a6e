"""The hosts of an elastic training: they come and go, and those that are there train.

Model: docs/rendezvous.md has the states. The coordinator has a `JoinQueue`, which is open to the end: a host that comes
waits there until the next meeting. At a meeting the coordinator takes as many hosts as the job can train on, hosts of
the last start first. The first meeting begins `LAST_CALL` seconds after the last arrival; a later one as soon as the
hosts of the last start are back, and without a host that is not back within `BACK` seconds.

The rendezvous may name several places: the first host of these that is there keeps. Each opens a join queue at its own
place when nobody answers at the places before it for a while, and gives way to an earlier one. When the coordinator is
lost, the next host in order opens one, if it can lock the run directory (`claim`): the lock keeps two groups, which a
network has parted, from both going on. A coordinator whose join queue is not at the rendezvous looks for a host that
waits there in vain, and sends it on. One of a first start that finds the run directory locked waits for the lock, with
the hosts that came to it.

Contract: `meet` and `meet_again` return what this launcher then is, with the join queue if it keeps.

Limits: of several places, names that nobody knows are waited for, as a cluster may get to know them. On a file system
without locks two groups may both go on.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dslc.runtime.hosts.connection import Connection, is_connected, listen, parse_endpoint, readable
from dslc.runtime.hosts.join_requests import HELLO, JoinRequests
from dslc.runtime.hosts.messages import Message
from dslc.runtime.hosts.rendezvous import Rendezvous, StopRequestedError, WaitReporter
from dslc.runtime.hosts.rendezvous_address import RendezvousError, address_of
from dslc.runtime.hosts.rendezvous_protocol import (
    AGAIN,
    BACK,
    HostLeftError,
    PreviousStart,
    RendezvousResult,
    accept_hosts,
    connect,
    has_same_facts,
    join_reply,
    join_request,
    last_start,
    names_of,
)

LAST_CALL = 3.0  # seconds after the last arrival in which a first start waits for more
SETTLE = 1.0  # seconds after the last arrival before a training is stopped for those who came
_TURN = 2.0  # seconds after which the next host in order opens a join queue
_LATER = 10.0  # the same for a first start, to which hosts come one by one
_REACH = 2.0  # seconds that connecting to a host may take
_CALL = 1.0  # seconds between two looks for hosts at the other places of the rendezvous
_CALLS = 8  # places that are looked at together

_STOP_IT = "`dslc stop` with that folder ends it; `--out` names another folder for another training"

Place = tuple[str, int]


class TrainingOverError(Exception):
    """The training has ended after `steps` steps, or was `stopped` after them, without this host; `host` knows more."""

    def __init__(self, steps: int = 0, host: str = "", *, was_stopped: bool = False) -> None:
        verb = "was stopped" if was_stopped else "has ended"
        step_text, host_text = f", after {steps} steps," if steps else "", f"; {host} has what it made" if host else ""
        super().__init__(f"the training {verb}{step_text} without this host{host_text}")
        self.steps, self.host, self.stopped = steps, host, was_stopped


class _Elsewhere(Exception):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.place = place


def largest(counts: Sequence[int], hosts: int) -> int:
    """Returns the largest of the counts of nodes for which there are hosts; 0 if there is none."""
    return max((count for count in counts if count <= hosts), default=0)


def named_in(rendezvous: str) -> list[Place]:
    """Returns the names and ports of `HOST[:PORT]`, or of several with commas between. Raises RendezvousError."""
    try:
        return [parse_endpoint(entry.strip()) for entry in rendezvous.split(",")]
    except ValueError as error:
        raise RendezvousError(f"the rendezvous {error}") from error


def _place(name: str, port: int) -> Place | None:
    """Returns an address; None if nobody knows the name, or no way leads there."""
    try:
        return address_of(name), port
    except RendezvousError:
        return None


def _resolvable_addresses(places: Sequence[Place]) -> Iterator[Place]:
    """Yields the addresses of these names, each when it is needed. Names that nobody knows are left out."""
    return (place for place_name in places if (place := _place(*place_name)) is not None)


# ---------------------------------------------------------------------------------------------------- the coordinator


class JoinQueue:
    """Where hosts come to: `arrived` are those that wait, each with its join request."""

    def __init__(self, rendezvous: Rendezvous, listener: socket.socket) -> None:
        self._rendezvous, self._secret = rendezvous, rendezvous.create_secret()
        self._requests = JoinRequests(listener, self._secret)
        self.place: Place = listener.getsockname()[:2]
        self.arrived: list[tuple[Connection, Message]] = []
        self.last = time.monotonic()  # when somebody arrived
        self.fresh = True  # no training was kept here yet
        self.busy = ""  # while ranks train: what a host that comes is told to wait for
        self._calls: dict[socket.socket, tuple[Place, float]] = {}
        self._reached: dict[Connection, tuple[Place, float]] = {}  # calls that were answered
        self._called, self._round = 0.0, 0
        self._own: int | None = None  # this place among those named, when it was looked for

    @property
    def handles(self) -> list[int]:
        return [*self._requests.handles, *(connection.fileno() for connection in (*self._connections, *self._reached))]

    @property
    def refusal(self) -> str:
        return self._requests.refusal

    @property
    def _connections(self) -> list[Connection]:
        return [connection for connection, _ in self.arrived]

    def wait(self, seconds: float) -> None:
        readable(self.handles, seconds)

    def look(self) -> None:
        """Lets in who has come. Raises _Elsewhere if a coordinator calls from another place."""
        for connection, (message, *_) in self._requests.poll(("join_request", "elsewhere")):
            self._receive(connection, message)
        for waiting_host in list(self.arrived):
            connection, join_request = waiting_host
            stops = any(message.get("kind") == "stop" for message in connection.receive())
            if stops and join_request.get("start") and not self.busy:
                raise StopRequestedError  # one that trained; another one that is asked to stop just leaves
            if connection.closed:
                self.arrived.remove(waiting_host)

    def _receive(self, connection: Connection, message: Message) -> None:
        if message["kind"] == "elsewhere":
            connection.close()
            place = _redirected(self._rendezvous, message)
            if self.fresh and place is not None:
                raise _Elsewhere(place)
        elif has_same_facts(self._rendezvous, connection, message):
            self.arrived.append((connection, message))
            self.last = time.monotonic()
            if self.busy:
                connection.send({"kind": "wait", "why": self.busy})

    def call(self) -> None:
        """Looks for hosts at the other places of the rendezvous: redirects a host that waits there as the coordinator
        of nothing to the training that is kept here. Raises _Elsewhere if nothing is kept here either, and a host waits
        at a place that is named before this one.
        """
        now = time.monotonic()
        for client_socket, (place, since) in list(self._calls.items()):
            if not (is_connected(client_socket) or now - since > _REACH):
                continue
            del self._calls[client_socket]
            if client_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 and now - since <= _REACH:
                self._answered(client_socket, place)
            else:
                client_socket.close()
        for connection, (place, since) in list(self._reached.items()):
            connection.receive()
            if connection.closed or not connection.pending or now - since > _REACH:
                del self._reached[connection]
                connection.close()
            if connection.authenticated and self.fresh:
                raise _Elsewhere(place)
        if now - self._called < _CALL or self._calls or self._reached:
            return
        self._called = now
        for address, port in self._next_places():
            client_socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            client_socket.setblocking(False)
            if client_socket.connect_ex((address, port)) in (0, errno.EINPROGRESS):
                self._calls[client_socket] = (address, port), now
            else:
                client_socket.close()

    def _answered(self, client_socket: socket.socket, place: Place) -> None:
        try:
            connection = Connection(client_socket, self._secret)
        except OSError:  # it is gone already
            client_socket.close()
            return
        self._reached[connection] = place, time.monotonic()
        if not self.fresh:
            connection.send({"kind": "elsewhere", "place": self.place})

    def _next_places(self) -> list[Place]:
        """Returns the places to look at now: some of the named places each time, as each must be looked up."""
        named_places = named_in(self._rendezvous.address)
        if self._own is None:
            self._own = next(
                (n for n, named_place in enumerate(named_places) if _place(*named_place) == self.place),
                len(named_places),
            )
        named_places = named_places[: self._own] + ([] if self.fresh else named_places[self._own + 1 :])
        begin = self._round if self._round < len(named_places) else 0
        self._round = begin + _CALLS
        return list(_resolvable_addresses(named_places[begin : begin + _CALLS]))

    def tell(self, kind: str, **fields: object) -> None:
        for connection in self._connections:
            connection.send({"kind": kind, **fields})

    def close(self) -> None:
        self._requests.close()
        for open_socket in (self._requests.listening, *self._calls):
            open_socket.close()
        for connection in (*self._connections, *self._reached):
            connection.close()
        self.arrived, self._calls, self._reached = [], {}, {}


def _wait_and_select(
    rendezvous: Rendezvous, join_queue: JoinQueue, previous_start: PreviousStart | None, expected_nodes: set[int]
) -> RendezvousResult:
    """Waits for hosts and takes those that the job can train on. `expected_nodes`: nodes of the last start that may
    come back.
    """
    wait_reporter, began = WaitReporter(rendezvous, f"for hosts at {rendezvous.address}"), time.monotonic()
    join_queue.busy = ""
    join_queue.last = began
    try:
        while True:
            join_queue.look()
            hosts = 1 + len(join_queue.arrived)
            returned_nodes = {_node(join_request, previous_start) for _, join_request in join_queue.arrived}
            seconds = time.monotonic() - max(began, join_queue.last)
            patience = LAST_CALL if previous_start is None else 0.0 if expected_nodes <= returned_nodes else BACK
            if hosts >= rendezvous.counts[-1] or (largest(rendezvous.counts, hosts) and seconds >= patience):
                holder = rendezvous.holder() if join_queue.fresh else ""
                if not holder:
                    return _select_hosts(rendezvous, join_queue, previous_start)
                wait_reporter.turn_to(f"for the training in its run directory, which {holder} keeps", _STOP_IT)
            join_queue.call()
            wait_reporter.why = f"; {join_queue.refusal}" if join_queue.refusal else ""
            wait_reporter.look([str(join_request["host"]) for _, join_request in join_queue.arrived])
            join_queue.wait(AGAIN)
    except _Elsewhere as error:
        join_queue.tell("elsewhere", place=error.place)
        join_queue.close()
        raise
    except StopRequestedError:
        join_queue.tell("stopped")
        raise


def _node(join_request: Message, previous_start: PreviousStart | None) -> int:
    """Returns the node that a host had in the last start; -1 if it was not of it."""
    is_same_start = previous_start is not None and join_request.get("start") == previous_start.start
    return int(join_request.get("node") or -1) if is_same_start else -1


def _select_hosts(
    rendezvous: Rendezvous, join_queue: JoinQueue, previous_start: PreviousStart | None
) -> RendezvousResult:
    start, folder = last_start(join_queue.arrived)
    changes = max((int(m.get("changes") or 0) for _, m in join_queue.arrived), default=0)
    if previous_start is not None:
        start, folder, changes = (
            max(start, previous_start.start),
            previous_start.folder,
            max(changes, previous_start.changes),
        )
    nodes = [_node(join_request, previous_start) for _, join_request in join_queue.arrived]
    order = sorted(range(len(nodes)), key=lambda n: (nodes[n] < 0, nodes[n]))
    count = largest(rendezvous.counts, 1 + len(order)) - 1
    accepted_hosts = [join_queue.arrived[n] for n in order[:count]]
    join_queue.arrived, join_queue.fresh = [join_queue.arrived[n] for n in order[count:]], False
    hosts = [rendezvous.host, *(str(join_request["host"]) for _, join_request in accepted_hosts)]
    names = " and ".join(names_of(hosts, ranks=False))
    join_queue.busy = f"the training goes on with {names}; this host waits for a place"
    join_queue.tell("wait", why=join_queue.busy)
    address = join_queue.place[0]
    addresses = [address, *(connection.remote_address for connection, _ in accepted_hosts)]
    return accept_hosts(accepted_hosts, hosts, address, start + 1, folder, changes, addresses)


# -------------------------------------------------------------------------------------------------------- other hosts


def _join(
    rendezvous: Rendezvous,
    first_places: Sequence[Place],
    previous_start: PreviousStart | None,
    heir: Callable[[], JoinQueue | None],
) -> RendezvousResult | JoinQueue:
    """Looks for a join queue at these places, and then at the places of the rendezvous, and returns what the
    coordinator answers; or the join queue that `heir` has opened.
    """
    wait_reporter, named_places = WaitReporter(rendezvous, ""), named_in(rendezvous.address)
    while True:
        tried_places: list[Place] = []
        for place in itertools.chain(first_places, _resolvable_addresses(named_places)):
            if place in tried_places:
                continue
            tried_places.append(place)
            connection = connect(rendezvous, place, wait_reporter, _REACH)
            if connection is None:
                continue
            try:
                return _request_join(rendezvous, connection, previous_start, wait_reporter)
            except HostLeftError:
                connection.close()
                wait_reporter.patient = False
            except _Elsewhere as error:
                connection.close()
                first_places = [error.place, *(next_place for next_place in first_places if next_place != error.place)]
                break
            except BaseException as error:
                if isinstance(error, StopRequestedError):
                    connection.send({"kind": "stop"})
                connection.close()
                raise
        else:
            join_queue = heir()
            if join_queue is not None:
                return join_queue
            time.sleep(AGAIN)
        wait_reporter.what = (
            f"for a host at {' or '.join(dict.fromkeys(place[0] for place in tried_places)) or rendezvous.address}"
        )
        wait_reporter.why = wait_reporter.why if tried_places else ": no such name is known, or no way leads there"
        wait_reporter.look([])


def _redirected(rendezvous: Rendezvous, message: Message) -> Place | None:
    """Returns the place to which a launcher is sent on; None for an unnamed one, if nothing proves who sends."""
    address, port = message["place"]
    place = str(address), int(port)
    is_trusted = not rendezvous.secret.is_empty or place in _resolvable_addresses(named_in(rendezvous.address))
    return place if is_trusted else None


def _request_join(
    rendezvous: Rendezvous, connection: Connection, previous_start: PreviousStart | None, wait_reporter: WaitReporter
) -> RendezvousResult:
    """Sends a join request to a coordinator and returns its answer. Raises HostLeftError, TrainingOverError,
    _Elsewhere.
    """
    connection.send(join_request(rendezvous, previous_start))
    wait_reporter.what, wait_reporter.why, wait_reporter.help = "for the other hosts", "", ""
    since = time.monotonic()
    while True:
        readable([connection], AGAIN)
        messages = connection.receive()
        for n, message in enumerate(messages):
            result = join_reply(rendezvous, message, connection, messages[n + 1 :])
            if result is not None:
                return result
            match message["kind"]:
                case "over":
                    raise TrainingOverError(
                        int(message["steps"]), str(message["host"]), was_stopped=bool(message["stopped"])
                    )
                case "elsewhere":
                    place = _redirected(rendezvous, message)
                    if place is None:
                        raise HostLeftError("it sends this host to an unknown place")
                    raise _Elsewhere(place)
                case "wait":
                    wait_reporter.patient = True
                    rendezvous.say(str(message["why"]))
        if connection.closed or (not connection.authenticated and time.monotonic() - since > HELLO):
            wait_reporter.why = f", where one was met: {connection.why}" if connection.strange else ""
            raise HostLeftError("the host that keeps the training left")
        wait_reporter.look([])


# ------------------------------------------------------------------------------------------------------------ meeting


@dataclass(frozen=True, kw_only=True)
class PreviousMembership:
    """A launcher's place in the last start; the nodes that it has seen leave, and where the others are."""

    before: PreviousStart
    join_queue: JoinQueue | None
    lost: frozenset[int]
    addresses: Sequence[str]
    here: str  # this host's own address


def meet(rendezvous: Rendezvous) -> tuple[RendezvousResult, JoinQueue | None]:
    """Meets for the first start. The first host of the rendezvous that is there keeps, if nobody else does."""
    named_places, began = named_in(rendezvous.address), time.monotonic()
    if len(named_places) == 1 and not rendezvous.patient:
        address_of(named_places[0][0])

    def heir() -> JoinQueue | None:
        """Opens a join queue if it is this host's turn, at its own place."""
        for n, named_place in enumerate(named_places):
            if n and time.monotonic() - began < _LATER * n:
                break
            place = _place(*named_place)
            join_queue = _opened(rendezvous, place) if place is not None else None
            if join_queue is not None:
                return join_queue
        return None

    return coordinate_first_start(rendezvous, heir() or _join(rendezvous, [], None, heir), heir)


def coordinate_first_start(
    rendezvous: Rendezvous, outcome: RendezvousResult | JoinQueue, heir: Callable[[], JoinQueue | None]
) -> tuple[RendezvousResult, JoinQueue | None]:
    """Waits for hosts at a join queue that this host has opened, until they have met there or elsewhere."""
    while isinstance(outcome, JoinQueue):
        try:
            with _closed_on_error(outcome):
                return _wait_and_select(rendezvous, outcome, None, set()), outcome
        except _Elsewhere as error:
            outcome = _join(rendezvous, [error.place], None, heir)
    return outcome, None


def _opened(rendezvous: Rendezvous, place: Place) -> JoinQueue | None:
    """Returns a join queue at a place; None if that is not one of this host, or taken. Raises RendezvousError."""
    try:
        return JoinQueue(rendezvous, listen(*place))
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            reason = f"{rendezvous.host} cannot listen at {rendezvous.address}: {error.strerror}"
            raise RendezvousError(reason) from error
        return None


def meet_again(rendezvous: Rendezvous, membership: PreviousMembership) -> tuple[RendezvousResult, JoinQueue | None]:
    previous_start, port = membership.before, named_in(rendezvous.address)[0][1]
    nodes = range(len(membership.addresses))
    if membership.join_queue is not None:
        present_nodes = {node for node in nodes if node and node not in membership.lost}
        return _wait_and_select(rendezvous, membership.join_queue, previous_start, present_nodes), membership.join_queue
    other_nodes = [node for node in nodes if node != previous_start.node]
    places = [(membership.addresses[node], port) for node in other_nodes]
    began = time.monotonic()

    def heir() -> JoinQueue | None:
        """Opens a join queue if it is this host's turn, at its own address, and the run directory is free."""
        if time.monotonic() - began < _TURN * (previous_start.node - 1):
            return None
        try:
            listener = listen(membership.here, port)
        except OSError:
            return None
        if rendezvous.claim(previous_start.folder):
            join_queue = JoinQueue(rendezvous, listener)
            join_queue.fresh = False
            return join_queue
        listener.close()
        return None

    outcome = _join(rendezvous, places, previous_start, heir)
    if isinstance(outcome, RendezvousResult):
        return outcome, None
    with _closed_on_error(outcome):
        return _wait_and_select(rendezvous, outcome, previous_start, {node for node in other_nodes if node}), outcome


@contextlib.contextmanager
def _closed_on_error(join_queue: JoinQueue) -> Iterator[None]:
    try:
        yield
    except BaseException:
        join_queue.close()
        raise
