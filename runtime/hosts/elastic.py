"""The hosts of an elastic training: they come and go, and those that are there train.

Model: the keeper has a `JoinQueue`, which is open to the end: a host that comes says hello and waits there until the
next meeting. At a meeting the keeper takes as many hosts as the job can train on, hosts of the last start first; the
rest wait at the gate. The first meeting begins `LAST_CALL` seconds after the last arrival; a later one as soon as the
hosts of the last start are back, and without one that is not within `BACK` seconds.

Nothing is special about the first host. The rendezvous may name several places: the first host of these that is there
keeps. Each opens a gate at its own place when nobody answers at the places before it for a while. A host that has begun
to keep a first start gives way to an earlier one. When the keeper is lost, each of the others looks for a gate at the
addresses of all, which it knows from the last welcome; the next in order opens one, if it can lock the run directory
(`claim`): the lock is what keeps two groups, which a network has parted, from both going on. A keeper whose gate is not
at the rendezvous looks for a host that waits there in vain, and sends it on. A keeper that was lost and came back may
wait there so. A keeper of a first start that finds the run directory locked waits for that, with the hosts that came to
it.

Contract: `meet` and `meet_again` return what this launcher then is, with the gate if it keeps.

Limits: a host that comes finds the training if something answers at the rendezvous, or at one of several that it is
given. Of several, names that nobody knows are waited for, as a cluster may get to know them. On a file system without
locks two groups may both go on.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from dslc.runtime.hosts.connection import Connection, endpoint, is_connected, listen, readable
from dslc.runtime.hosts.join_requests import HELLO, JoinRequests
from dslc.runtime.hosts.messages import Message
from dslc.runtime.hosts.rendezvous_address import RendezvousError, address_of
from dslc.runtime.hosts.rendezvous_protocol import (
    AGAIN,
    BACK,
    HostLeftError,
    PreviousStart,
    Rendezvous,
    RendezvousResult,
    StopRequestedError,
    WaitReporter,
    has_same_facts,
    names_of,
    refusal_error,
    welcome,
)

LAST_CALL = 3.0  # seconds after the last arrival in which a first start waits for more
SETTLE = 1.0  # seconds after the last arrival before a training is stopped for those who came
_TURN = 2.0  # seconds after which the next host in order opens a gate
_LATER = 10.0  # the same for a first start, to which hosts come one by one
_REACH = 2.0  # seconds that connecting to a host may take
_CALL = 1.0  # seconds between two looks for hosts at the other places of the rendezvous
_CALLS = 8  # places that are looked at together

_STOP_IT = "`dslc stop` with that folder ends it; `--out` names another folder for another training"

Place = tuple[str, int]


class TrainingOverError(Exception):
    """The training has ended after `steps` steps, or was `stopped` after them, and this host had no part in the end of
    it; `host` knows more. Without these nobody has said so.
    """

    def __init__(self, steps: int = 0, host: str = "", *, stopped: bool = False) -> None:
        has = "was stopped" if stopped else "has ended"
        after, knows = f", after {steps} steps," if steps else "", f"; {host} has what it made" if host else ""
        super().__init__(f"the training {has}{after} without this host{knows}")
        self.steps, self.host, self.stopped = steps, host, stopped


class _Elsewhere(Exception):
    """The training is kept at another place."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.place = place


def largest(counts: Sequence[int], hosts: int) -> int:
    """Returns the largest of the counts of nodes for which there are hosts; 0 if there is none."""
    return max((count for count in counts if count <= hosts), default=0)


def named_in(rendezvous: str) -> list[Place]:
    """Returns the names and ports of `HOST[:PORT]`, or of several with commas between. Raises RendezvousError."""
    try:
        return [endpoint(each.strip()) for each in rendezvous.split(",")]
    except ValueError as error:
        raise RendezvousError(f"the rendezvous {error}") from error


def _place(name: str, port: int) -> Place | None:
    """Returns an address; None if nobody knows the name, or no way leads there."""
    try:
        return address_of(name), port
    except RendezvousError:
        return None


def _resolvable_addresses(named: Sequence[Place]) -> Iterator[Place]:
    """Yields the addresses of these names, each when it is needed. Names that nobody knows are left out."""
    return (place for each in named if (place := _place(*each)) is not None)


# --------------------------------------------------------------------------------------------------------- the keeper


class JoinQueue:
    """Where hosts come to: `arrived` are those that wait, each with its hello."""

    def __init__(self, meeting: Rendezvous, listening: socket.socket) -> None:
        self._meeting, self._secret = meeting, meeting.create_secret()
        self._requests = JoinRequests(listening, self._secret)
        self.place: Place = listening.getsockname()[:2]
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
        """The descriptors to wait for: somebody comes, or says something."""
        return [*self._requests.handles, *(wire.fileno() for wire in (*self._wires, *self._reached))]

    @property
    def refusal(self) -> str:
        """Who was turned away last, and why."""
        return self._requests.refusal

    @property
    def _wires(self) -> list[Connection]:
        return [wire for wire, _ in self.arrived]

    def wait(self, seconds: float) -> None:
        readable(self.handles, seconds)

    def look(self) -> None:
        """Lets in who has come. Raises _Elsewhere if a keeper calls from another place."""
        for wire, (first, *_) in self._requests.poll(("hello", "elsewhere")):
            self._hear(wire, first)
        for each in list(self.arrived):
            wire, hello = each
            stops = any(message.get("kind") == "stop" for message in wire.receive())
            if stops and hello.get("start") and not self.busy:
                raise StopRequestedError  # one that trained; another one that is asked to stop just leaves
            if wire.closed:
                self.arrived.remove(each)

    def _hear(self, wire: Connection, first: Message) -> None:
        if first["kind"] == "elsewhere":
            wire.close()
            place = _redirected(self._meeting, first)
            if self.fresh and place is not None:
                raise _Elsewhere(place)
        elif has_same_facts(self._meeting, wire, first):
            self.arrived.append((wire, first))
            self.last = time.monotonic()
            if self.busy:
                wire.send({"kind": "wait", "why": self.busy})

    def call(self) -> None:
        """Looks for hosts at the other places of the rendezvous: redirects a host that waits there as the keeper of
        nothing to the training that is kept here. Raises _Elsewhere if nothing is kept here either, and a host waits at
        a place that is named before this one.
        """
        now = time.monotonic()
        for calling, (place, since) in list(self._calls.items()):
            if not (is_connected(calling) or now - since > _REACH):
                continue
            del self._calls[calling]
            if calling.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 and now - since <= _REACH:
                self._answered(calling, place)
            else:
                calling.close()
        for wire, (place, since) in list(self._reached.items()):
            wire.receive()
            if wire.closed or not wire.pending or now - since > _REACH:
                del self._reached[wire]
                wire.close()
            if wire.authenticated and self.fresh:
                raise _Elsewhere(place)
        if now - self._called < _CALL or self._calls or self._reached:
            return
        self._called = now
        for address, port in self._next_places():
            calling = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            calling.setblocking(False)
            if calling.connect_ex((address, port)) in (0, errno.EINPROGRESS):
                self._calls[calling] = (address, port), now
            else:
                calling.close()

    def _answered(self, calling: socket.socket, place: Place) -> None:
        try:
            wire = Connection(calling, self._secret)
        except OSError:  # it is gone already
            calling.close()
            return
        self._reached[wire] = place, time.monotonic()
        if not self.fresh:
            wire.send({"kind": "elsewhere", "place": self.place})

    def _next_places(self) -> list[Place]:
        """Returns the places to look at now: some of the named places each time, as each must be looked up."""
        named = named_in(self._meeting.rendezvous)
        if self._own is None:
            self._own = next((n for n, each in enumerate(named) if _place(*each) == self.place), len(named))
        named = named[: self._own] + ([] if self.fresh else named[self._own + 1 :])
        begin = self._round if self._round < len(named) else 0
        self._round = begin + _CALLS
        return list(_resolvable_addresses(named[begin : begin + _CALLS]))

    def tell(self, kind: str, **more: object) -> None:
        """Sends a message to those who wait."""
        for wire in self._wires:
            wire.send({"kind": kind, **more})

    def close(self) -> None:
        self._requests.close()
        for connection in (self._requests.listening, *self._calls):
            connection.close()
        for wire in (*self._wires, *self._reached):
            wire.close()
        self.arrived, self._calls, self._reached = [], {}, {}


def _keep(meeting: Rendezvous, gate: JoinQueue, before: PreviousStart | None, awaited: set[int]) -> RendezvousResult:
    """Waits for hosts and takes those that the job can train on. `awaited`: the nodes of the last start that are
    expected back.
    """
    waiting, began, gate.busy = WaitReporter(meeting, f"for hosts at {meeting.rendezvous}"), time.monotonic(), ""
    gate.last = began
    try:
        while True:
            gate.look()
            hosts = 1 + len(gate.arrived)
            back = {_node(hello, before) for _, hello in gate.arrived}
            seconds = time.monotonic() - max(began, gate.last)
            patience = LAST_CALL if before is None else 0.0 if awaited <= back else BACK
            if hosts >= meeting.counts[-1] or (largest(meeting.counts, hosts) and seconds >= patience):
                holder = meeting.holder() if gate.fresh else ""
                if not holder:
                    return _select_hosts(meeting, gate, before)
                waiting.turn_to(f"for the training in its run directory, which {holder} keeps", _STOP_IT)
            gate.call()
            waiting.why = f"; {gate.refusal}" if gate.refusal else ""
            waiting.look([str(hello["host"]) for _, hello in gate.arrived])
            gate.wait(AGAIN)
    except _Elsewhere as error:
        gate.tell("elsewhere", place=error.place)
        gate.close()
        raise
    except StopRequestedError:
        gate.tell("stopped")
        raise


def _node(hello: Message, before: PreviousStart | None) -> int:
    """Returns the node that a host had in the last start; -1 if it was not of it."""
    same = before is not None and hello.get("start") == before.start
    return int(hello.get("node") or -1) if same else -1


def _select_hosts(meeting: Rendezvous, gate: JoinQueue, before: PreviousStart | None) -> RendezvousResult:
    # If this keeper is a new one, the others may know more than it does.
    last = max(((int(m.get("start") or 0), str(m.get("folder") or "")) for _, m in gate.arrived), default=(0, ""))
    changes = max((int(m.get("changes") or 0) for _, m in gate.arrived), default=0)
    start, folder = last if last[0] else (0, "")
    if before is not None:
        start, folder, changes = max(start, before.start), before.folder, max(changes, before.changes)
    nodes = [_node(hello, before) for _, hello in gate.arrived]
    order = sorted(range(len(nodes)), key=lambda n: (nodes[n] < 0, nodes[n]))
    taken = largest(meeting.counts, 1 + len(order)) - 1
    welcomed = [gate.arrived[n] for n in order[:taken]]
    gate.arrived, gate.fresh = [gate.arrived[n] for n in order[taken:]], False
    hosts = [meeting.host, *(str(hello["host"]) for _, hello in welcomed)]
    gate.busy = f"the training goes on with {' and '.join(names_of(hosts, ranks=False))}; this host waits for a place"
    gate.tell("wait", why=gate.busy)
    listening = listen(gate.place[0])
    store = gate.place[0], int(listening.getsockname()[1])
    addresses = [gate.place[0], *(wire.remote_address for wire, _ in welcomed)]
    for node, (wire, _) in enumerate(welcomed, 1):
        said = {"hosts": hosts, "store": store, "start": start + 1, "changes": changes, "addresses": addresses}
        wire.send({"kind": "welcome", "node": node, **said})
    return RendezvousResult(
        node=0,
        machines=hosts,
        wires=dict(enumerate((wire for wire, _ in welcomed), 1)),
        store=store,
        start=start + 1,
        changes=changes,
        addresses=addresses,
        folder=folder,
        listening=listening,
    )


# -------------------------------------------------------------------------------------------------------- other hosts


def _join(
    meeting: Rendezvous, first: Sequence[Place], before: PreviousStart | None, heir: Callable[[], JoinQueue | None]
) -> RendezvousResult | JoinQueue:
    """Looks for a gate at these places, and then at the places of the rendezvous, and returns what the keeper answers;
    or the gate that `heir` has opened.
    """
    waiting, named = WaitReporter(meeting, ""), named_in(meeting.rendezvous)
    while True:
        tried: list[Place] = []
        for place in itertools.chain(first, _resolvable_addresses(named)):
            if place in tried:
                continue
            tried.append(place)
            wire = _reached(meeting, place, waiting)
            if wire is None:
                continue
            try:
                return _request_join(meeting, wire, before, waiting)
            except HostLeftError:
                wire.close()
                waiting.patient = False
            except _Elsewhere as error:
                wire.close()
                first = [error.place, *(each for each in first if each != error.place)]
                break
            except BaseException as error:
                if isinstance(error, StopRequestedError):
                    wire.send({"kind": "stop"})
                wire.close()
                raise
        else:
            gate = heir()
            if gate is not None:
                return gate
            time.sleep(AGAIN)
        waiting.what = f"for a host at {' or '.join(dict.fromkeys(place[0] for place in tried)) or meeting.rendezvous}"
        waiting.why = waiting.why if tried else ": no such name is known, or no way leads there"
        waiting.look([])


def _reached(meeting: Rendezvous, place: Place, waiting: WaitReporter) -> Connection | None:
    try:
        connection = socket.create_connection(place, timeout=_REACH)
        secret = meeting.read_secret()
        if secret is not None:
            return Connection(connection, secret)
    except OSError as error:
        waiting.why = f": {(error.strerror or str(error)).lower()}"
        return None
    connection.close()
    waiting.unseen(meeting.secret.path)
    return None


def _redirected(meeting: Rendezvous, message: Message) -> Place | None:
    """Returns the place to which a launcher is sent on; None, if nothing proves who sends it there, for one that the
    rendezvous does not name.
    """
    address, port = message["place"]
    place = str(address), int(port)
    return (
        place if not meeting.secret.is_empty or place in _resolvable_addresses(named_in(meeting.rendezvous)) else None
    )


def _request_join(
    meeting: Rendezvous, wire: Connection, before: PreviousStart | None, waiting: WaitReporter
) -> RendezvousResult:
    """Says hello to a keeper and returns its answer. Raises HostLeftError if it leaves, and what else it may say."""
    wire.send(
        {"kind": "hello", "host": meeting.host, "facts": dict(meeting.facts), **(asdict(before) if before else {})}
    )
    waiting.what, waiting.why = "for the other hosts", ""
    since = time.monotonic()
    while True:
        readable([wire], AGAIN)
        messages = wire.receive()
        for n, message in enumerate(messages):
            match message.get("kind"):
                case "refused":
                    raise refusal_error(meeting, message)
                case "stopped":
                    raise StopRequestedError
                case "over":
                    raise TrainingOverError(
                        int(message["steps"]), str(message["host"]), stopped=bool(message["stopped"])
                    )
                case "elsewhere":
                    place = _redirected(meeting, message)
                    raise (
                        _Elsewhere(place)
                        if place is not None
                        else HostLeftError("it sends this host to an unknown place")
                    )
                case "wait":
                    waiting.patient = True
                    meeting.say(str(message["why"]))
                case "welcome":
                    return welcome(message, wire, messages[n + 1 :])
        if wire.closed or (not wire.authenticated and time.monotonic() - since > HELLO):
            waiting.why = f", where one was met: {wire.why}" if wire.strange else ""
            raise HostLeftError("the host that keeps the training left")
        waiting.look([])


# ------------------------------------------------------------------------------------------------------------ meeting


@dataclass(frozen=True, kw_only=True)
class PreviousMembership:
    """A launcher's place in the last start; the nodes that it has seen leave, and where the others are."""

    before: PreviousStart
    gate: JoinQueue | None
    lost: frozenset[int]
    addresses: Sequence[str]
    here: str  # this host's own address


def meet(meeting: Rendezvous) -> tuple[RendezvousResult, JoinQueue | None]:
    """Meets for the first start. The first host of the rendezvous that is there keeps, if nobody else does."""
    named, began = named_in(meeting.rendezvous), time.monotonic()
    if len(named) == 1 and not meeting.patient:
        address_of(named[0][0])

    def heir() -> JoinQueue | None:
        """Opens a gate if it is this host's turn, at its own place."""
        for n, each in enumerate(named):
            if n and time.monotonic() - began < _LATER * n:
                break
            place = _place(*each)
            gate = _opened(meeting, place) if place is not None else None
            if gate is not None:
                return gate
        return None

    return keep_first(meeting, heir() or _join(meeting, [], None, heir), heir)


def keep_first(
    meeting: Rendezvous, met: RendezvousResult | JoinQueue, heir: Callable[[], JoinQueue | None]
) -> tuple[RendezvousResult, JoinQueue | None]:
    """Waits for hosts at a gate that this host has opened, until they have met there, or at another place."""
    while isinstance(met, JoinQueue):
        try:
            with _closed_on_error(met):
                return _keep(meeting, met, None, set()), met
        except _Elsewhere as error:
            met = _join(meeting, [error.place], None, heir)
    return met, None


def _opened(meeting: Rendezvous, place: Place) -> JoinQueue | None:
    """Returns a gate at a place; None if that is not one of this host, or taken. Raises RendezvousError."""
    try:
        return JoinQueue(meeting, listen(*place))
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise RendezvousError(f"{meeting.host} cannot listen at {meeting.rendezvous}: {error.strerror}") from error
        return None


def meet_again(meeting: Rendezvous, was: PreviousMembership) -> tuple[RendezvousResult, JoinQueue | None]:
    """Meets for another start: with the hosts that are there."""
    before, port = was.before, named_in(meeting.rendezvous)[0][1]
    nodes = range(len(was.addresses))
    if was.gate is not None:
        there = {node for node in nodes if node and node not in was.lost}
        return _keep(meeting, was.gate, before, there), was.gate
    others = [node for node in nodes if node != before.node]
    places = [(was.addresses[node], port) for node in others]
    began = time.monotonic()

    def heir() -> JoinQueue | None:
        """Opens a gate if it is this host's turn, at its own address, and the run directory is free."""
        if time.monotonic() - began < _TURN * (before.node - 1):
            return None
        try:
            listening = listen(was.here, port)
        except OSError:
            return None
        if meeting.claim(before.folder):
            gate = JoinQueue(meeting, listening)
            gate.fresh = False
            return gate
        listening.close()
        return None

    joined = _join(meeting, places, before, heir)
    if isinstance(joined, RendezvousResult):
        return joined, None
    with _closed_on_error(joined):
        return _keep(meeting, joined, before, {node for node in others if node}), joined


@contextlib.contextmanager
def _closed_on_error(gate: JoinQueue) -> Iterator[None]:
    try:
        yield
    except BaseException:
        gate.close()
        raise
