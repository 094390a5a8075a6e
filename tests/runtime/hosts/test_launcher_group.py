"""Launchers that meet: over real connections, each in a thread of this process."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslc.runtime.hosts import rendezvous_protocol
from dslc.runtime.hosts.authentication import MOST
from dslc.runtime.hosts.connection import PORT, Connection, interface_of, listen, parse_endpoint, readable
from dslc.runtime.hosts.launcher_group import LauncherGroup, meet, require_same_value, shared
from dslc.runtime.hosts.messages import Message
from dslc.runtime.hosts.rendezvous import Rendezvous, StopRequestedError
from dslc.runtime.hosts.rendezvous_address import FileEndpoint, RendezvousError, address_of
from dslc.runtime.hosts.rendezvous_protocol import HostLeftError, RendezvousPlace, _as_many, wait_for_hosts
from dslc.runtime.hosts.run_secret import RunSecret
from dslc.runtime.launchers.torchrun import StoreEndpoint

Met = Callable[..., list[Future[LauncherGroup]]]


@pytest.fixture
def port() -> int:
    with listen("127.0.0.1") as found:
        number: int = found.getsockname()[1]
        return number


@pytest.fixture
def met(port: int) -> Iterator[Met]:
    """Yields the function that lets hosts with these facts meet, and returns what each of them got."""
    made: list[Future[LauncherGroup]] = []

    def met(*facts: dict[str, str], timeout: float = 20) -> list[Future[LauncherGroup]]:
        for n, each in enumerate(facts):
            rendezvous = Rendezvous(f"127.0.0.1:{port}", len(facts), each, timeout, host=f"host{n}")
            made.append(pool.submit(meet, rendezvous))
        return made

    with ThreadPoolExecutor(8) as pool:
        yield met
    for each in made:
        if each.exception() is None:
            each.result().close()


def test_hosts_meet_whatever_the_numbers_of_their_descriptors(met: Met) -> None:
    """As at a coordinator of more than a thousand hosts."""
    held = [os.open(os.devnull, os.O_RDONLY)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 1200), before[1]))
    try:
        while held[-1] < 1050:
            held.append(os.dup(held[0]))
        companies = [each.result() for each in met({"a": "1"}, {"a": "1"}, {"a": "1"})]
        assert min(connection.fileno() for each in companies for connection in each.connections) > 1024
        assert sorted(each.node for each in companies) == [0, 1, 2]
        for each in companies:
            each.tell("release")
        assert all(each.wait_for("release", 20).keys() == each._connections.keys() for each in companies)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_hosts_meet_in_any_order_and_know_each_other(met: Met) -> None:
    companies = [each.result() for each in met({"a": "1"}, {"a": "1"}, {"a": "1"})]
    assert sorted(each.node for each in companies) == [0, 1, 2]
    assert len({each.hosts for each in companies}) == len({each.store for each in companies}) == 1
    assert len(set(companies[0].hosts)) == 3 and [each.ranks for each in companies if each.is_coordinator] == [range(1)]
    assert [each.is_coordinator for each in companies].count(True) == 1
    coordinator = next(each for each in companies if each.is_coordinator)
    assert coordinator.listening is not None and coordinator.listening.getsockname() == coordinator.store


def test_of_hosts_that_come_at_once_as_many_are_taken_as_the_job_takes(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as listening:
        rendezvous = Rendezvous(f"127.0.0.1:{port}", 2, {}, 20, host="coordinator")
        callers = [Connection(socket.create_connection(("127.0.0.1", port))) for _ in range(3)]
        for n, connection in enumerate(callers):
            connection.send({"kind": "join_request", "host": f"host{n}", "facts": {}})
        strangers = [
            (Connection(listening.accept()[0], accepts=True), {"kind": "join_request", "host": f"host{n}", "facts": {}})
            for n in range(3)
        ]
        join_requests: list[Message] = []
        while len(join_requests) < 3:
            join_requests += [message for connection, _ in strangers for message in connection.receive()]
            assert not [message for each in callers for message in each.receive()]
        (taken,) = _as_many(rendezvous, list(strangers))
        assert taken[1]["host"] == "host0" and [connection.closed for connection, _ in strangers] == [False, True, True]
        heard: list[Message] = []
        while not heard:
            heard = callers[2].receive()
    assert heard[0]["kind"] == "refused" and "host2 comes too late: the job takes 2" in heard[0]["why"]
    assert "trains with coordinator and host0" in heard[0]["why"]
    for connection in (*callers, taken[0]):
        connection.close()


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_host_that_is_lost_before_the_first_start_may_come_back(
    port: int, tmp_path: Path, lost: int, elastic: bool
) -> None:
    """It is killed when all have met, and typed again. Without `again` the others would end."""

    def coming(n: int) -> Rendezvous:
        counts = (3,) if elastic else ()
        return Rendezvous(f"127.0.0.1:{port}", 3, {}, 20, host=f"host{n}", again=True, counts=counts)

    def gathered(group: LauncherGroup, dies: bool) -> LauncherGroup:
        if dies:
            group.close()
            group = meet(coming(9))
        until, work = time.monotonic() + 20, lambda: shared(group, str(tmp_path), 20)
        group.folder, blind = group.gather(work, 1, until, lambda: False, has_met=True)
        assert group.folder == str(tmp_path) and blind == []
        return group

    with ThreadPoolExecutor(3) as pool:
        first = [each.result() for each in [pool.submit(meet, coming(n)) for n in range(3)]]
        made = [pool.submit(gathered, each, each.node == lost) for each in first]
        companies = [each.result() for each in made]
    assert sorted(each.node for each in companies) == [0, 1, 2] and {each.start for each in companies} == {1}
    assert len({each.machines for each in companies}) == 1 and "host9" in companies[0].machines
    for each in companies:
        each.close()


def test_what_differs_is_named_on_every_host(met: Met) -> None:
    told = [str(each.exception()) for each in met({"a": "1", "the plan": "x"}, {"a": "2", "the plan": "y"})]
    assert all("the hosts differ in a: " in each for each in told)
    coordinator = next(each for each in told if " has 1" in each and " has 2" in each)
    (other,) = [each for each in told if each is not coordinator]
    assert (" has 1" in other) != (" has 2" in other), "nobody learns the value of another host"


def test_a_fact_that_one_host_lacks_differs(met: Met) -> None:
    told = [str(each.exception()) for each in met({}, {"the file net.py": "10 bytes"})]
    assert any("has nothing" in each for each in told) and all("the file net.py" in each for each in told)


def test_nobody_waits_for_ever(port: int) -> None:
    said: list[str] = []
    with pytest.raises(RendezvousError, match=r"waited 0.1 s .* the job takes 2"):
        meet(Rendezvous(f"127.0.0.1:{port}", 2, {}, 0.1, said.append))


def test_strangers_are_no_hosts(port: int, met: Met) -> None:
    def disturb() -> None:
        for content in (b"GET / HTTP/1.0\r\n\r\n", struct.pack("!I", MOST + 1), struct.pack("!I", 2) + b"[]"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(content)
                assert stranger.recv(1) == b""  # it is put out

    with ThreadPoolExecutor(1) as pool:
        coordinator = pool.submit(meet, Rendezvous(f"127.0.0.1:{port}", 2, {}, 20, host="coordinator"))
        waiting = threading.Thread(target=disturb)
        while not waiting.ident:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                waiting.start()
            except ConnectionRefusedError:
                continue
        waiting.join()
        other = meet(Rendezvous(f"127.0.0.1:{port}", 2, {}, 20, host="other"))
        assert coordinator.result().hosts == other.hosts == ("coordinator", "other")
        coordinator.result().close()
        other.close()


@pytest.mark.parametrize(
    "changed",
    [{"node": 0}, {"node": 2}, {"hosts": []}, {"addresses": ["127.0.0.1"]}],
    ids=lambda each: next(iter(each)),
)
def test_a_welcome_with_a_place_that_is_none_is_refused(changed: Message) -> None:
    message = {"kind": "join_reply", "node": 1, "hosts": ["a", "b"], "store": ["127.0.0.1", 9], "start": 1} | changed
    with listen("127.0.0.1") as listening:
        connection = Connection(socket.create_connection(listening.getsockname()))
        with pytest.raises(RendezvousError, match="sent a welcome with a place that is none"):
            rendezvous_protocol.join_reply(Rendezvous("", 2, {}, 20), message, connection, [])
        connection.close()


def test_a_name_that_does_not_resolve_is_said_at_once() -> None:
    with pytest.raises(RendezvousError, match=r"`no..such`, does not resolve on .* \(no host can have such a name\)"):
        address_of("no..such")
    with pytest.raises(RendezvousError, match=r"`no-such-host.invalid`, does not resolve"):
        meet(Rendezvous("no-such-host.invalid", 2, {}, 600))


def test_another_program_at_the_port_is_said(port: int) -> None:
    with listen("127.0.0.1", port) as other, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(meet, Rendezvous(f"127.0.0.1:{port}", 2, {}, 20))
        other.accept()[0].close()
        assert "another program listens there" in str(joining.exception())


def test_a_folder_of_all_is_found_out(met: Met, tmp_path: Path) -> None:
    companies = [each.result() for each in met({}, {})]
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(shared, each, str(tmp_path) if each.is_coordinator else "", 20) for each in companies]
    assert [each.result() for each in found] == [(str(tmp_path), [])] * 2
    assert not list(tmp_path.iterdir())


def test_a_value_that_differs_is_known_to_its_own_host_alone(met: Met) -> None:
    companies = [each.result() for each in met({}, {})]
    with ThreadPoolExecutor(2) as pool:
        compared = [pool.submit(require_same_value, each, "a", f"value{each.node}", 20) for each in companies]
        told = [str(each.exception()) for each in compared]
    for group, text in zip(companies, told, strict=True):
        assert "the hosts differ in a: " in text and text.endswith(f"; {group.hosts[group.node]} has value{group.node}")
        assert f"value{1 - group.node}" not in text


def test_a_host_that_leaves_is_lost(met: Met) -> None:
    one, other = (each.result() for each in met({}, {}))
    other.tell("release")
    other.close()
    assert one.wait_for("release", 20) == {other.node: {"kind": "release"}}
    with pytest.raises(RendezvousError, match=rf"{other.hosts[other.node]} left: its connection ended"):
        one.wait_for("heard", 20)


# ----------------------------------------------------------------------------------------------------- meeting again


@pytest.fixture
def three(port: int) -> Iterator[list[LauncherGroup]]:
    """Yields three launchers that have met and may meet again, in the order of their nodes."""
    with ThreadPoolExecutor(3) as pool:
        met = [pool.submit(meet, coming(port, f"host{n}")) for n in range(3)]
    companies = sorted((each.result() for each in met), key=lambda each: each.node)
    yield companies
    for each in companies:
        each.close()


def coming(port: int, host: str, facts: str = "1", timeout: float = 20) -> Rendezvous:
    return Rendezvous(f"127.0.0.1:{port}", 3, {"a": facts}, timeout, host=host, again=True)


def again(each: LauncherGroup, start: int = 2, seconds: float = 20, stopped: bool = False) -> LauncherGroup:
    each.folder = "run"
    each.meet_again(start, time.monotonic() + seconds, lambda: stopped)
    return each


def test_hosts_meet_again_and_keep_their_nodes(three: list[LauncherGroup]) -> None:
    hosts, store = three[0].hosts, three[0].store
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(again, reversed(three)))
    assert [each.node for each in three] == [0, 1, 2] and {each.start for each in three} == {2}
    assert {each.hosts for each in three} == {hosts}
    assert three[0].store != store, "the store has a port of its own each time"


def test_a_new_launcher_takes_the_place_of_a_lost_one(port: int, three: list[LauncherGroup]) -> None:
    three[1].close()
    hear(three[0], lambda: three[0].lost)
    with ThreadPoolExecutor(3) as pool:
        new, *_ = pool.submit(meet, coming(port, "new")), *(pool.submit(again, three[n]) for n in (0, 2))
    assert (new.result().node, three[2].node, new.result().start) == (1, 2, 2)
    assert three[0].hosts == (three[0].hosts[0], "new", three[2].hosts[2])
    new.result().close()


def test_a_launcher_with_other_files_is_refused_alone(port: int, three: list[LauncherGroup]) -> None:
    three[1].close()
    hear(three[0], lambda: three[0].lost)
    with ThreadPoolExecutor(4) as pool:
        rest = [pool.submit(again, three[n]) for n in (0, 2)]
        wrong = pool.submit(meet, coming(port, "wrong", facts="2"))
        assert "the hosts differ in a: " in str(wrong.exception())
        new = pool.submit(meet, coming(port, "new"))
        assert [each.result().start for each in (new, *rest)] == [2, 2, 2]
    new.result().close()


def test_a_new_coordinator_learns_where_the_training_stands(port: int, three: list[LauncherGroup]) -> None:
    three[0].close()
    with ThreadPoolExecutor(3) as pool:
        new, *rest = pool.submit(meet, coming(port, "new")), *(pool.submit(again, three[n]) for n in (1, 2))
        assert [each.result().node for each in (new, *rest)] == [0, 1, 2]
    assert (new.result().start, new.result().folder) == (2, "run")
    new.result().close()


def test_who_does_not_come_back_is_waited_for_only_so_long(three: list[LauncherGroup]) -> None:
    three[1].close()
    with ThreadPoolExecutor(2) as pool:
        rest = [pool.submit(again, three[n], seconds=0.5) for n in (0, 2)]
    told = [each.exception() for each in rest]
    assert all(isinstance(each, RendezvousError) for each in told), told


def hear(coordinator: LauncherGroup, holds: Callable[[], object]) -> None:
    """Has the coordinator listen, as it does while ranks train, until something holds."""
    while not holds():
        readable(coordinator.handles, 0.1)
        coordinator.hear()


def test_a_host_too_many_leaves_when_none_is_lost(
    port: int, three: list[LauncherGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_protocol, "SILENCE", 0.1)
    with ThreadPoolExecutor(1) as pool:
        new = pool.submit(meet, coming(port, "new"))
        hear(three[0], new.done)
    hosts = " and ".join(three[0].hosts)
    assert f"new comes too late: the job takes 3 (`devices.nodes`), and trains with {hosts}" in str(new.exception())


def test_a_host_too_many_waits_until_it_is_known_that_none_is_lost(port: int, three: list[LauncherGroup]) -> None:
    with ThreadPoolExecutor(3) as pool:
        new = pool.submit(meet, coming(port, "new"))
        hear(three[0], lambda: waits(three[0]))
        three[1].close()
        hear(three[0], lambda: three[0].lost)
        rest = [pool.submit(again, three[n]) for n in (0, 2)]
    assert [each.result().node for each in (new, *rest)] == [1, 0, 2]
    new.result().close()


def test_a_host_too_many_takes_no_place_of_one_that_comes_back() -> None:
    with listen("127.0.0.1") as listening, ThreadPoolExecutor(1) as pool:
        rendezvous = Rendezvous("", 2, {}, 20, host="coordinator", again=True)
        place = RendezvousPlace("", lambda: None, listening)
        kept = pool.submit(wait_for_hosts, rendezvous, place, 2, None, frozenset({1}))
        new, back = (Connection(socket.create_connection(listening.getsockname())) for _ in range(2))
        new.send({"kind": "join_request", "host": "new", "facts": {}})
        heard = answers(new, 1)
        back.send({"kind": "join_request", "host": "back", "facts": {}, "node": 1, "start": 1})
        of_back = answers(back, 1)
        met = kept.result()
        assert met.machines == ["coordinator", "back"]
        assert [*of_back, *answers(back, 2 - len(of_back))][1]["kind"] == "join_reply"
        assert "new comes too late: the job takes 2" in [*heard, *answers(new, 2 - len(heard))][1]["why"]
    assert met.listening is not None
    for each in (new, back, met.listening, met.connections[1]):
        each.close()


def answers(connection: Connection, count: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        readable([connection], 1)
        found += connection.receive()
    return found


def waits(coordinator: LauncherGroup) -> bool:
    """True if a host waits at the coordinator for a place."""
    assert coordinator._late is not None
    return bool(coordinator._late._arrived)


@pytest.mark.parametrize("asked", [0, 2])
def test_a_request_to_stop_ends_the_wait_on_all_hosts(three: list[LauncherGroup], asked: int) -> None:
    three[1].close()
    with ThreadPoolExecutor(2) as pool:
        rest = [pool.submit(again, three[n], stopped=n == asked) for n in (0, 2)]
    assert [type(each.exception()) for each in rest] == [StopRequestedError, StopRequestedError]


# --------------------------------------------------------------------------------- processes that mpirun has started


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[LauncherGroup]]:
    """Yields three launchers that have met at an endpoint, in the order of their places."""

    def at_door(place: int) -> LauncherGroup:
        endpoint = FileEndpoint(str(tmp_path / "door"), one_host=True)
        return meet(Rendezvous("", 3, {}, 20, endpoint=endpoint, place=place, by="mpirun"))

    with ThreadPoolExecutor(3) as pool:
        companies = list(pool.map(at_door, range(3)))
    yield companies
    for each in companies:
        each.close()


def test_processes_of_mpirun_keep_their_connections(processes: list[LauncherGroup]) -> None:
    store = processes[0].store
    processes[1].tell("failed", seen=None)  # of the start before
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(again, reversed(processes)))
    assert [each.node for each in processes] == [0, 1, 2] and {each.start for each in processes} == {2}
    assert len({each.store for each in processes}) == 1 and processes[0].store != store
    assert processes[0].hear() == []


@pytest.mark.parametrize("lost", [0, 1])
def test_nobody_waits_for_a_process_that_mpirun_does_not_start_again(processes: list[LauncherGroup], lost: int) -> None:
    processes[lost].close()
    rest = [each for each in processes if each.node != lost]

    def gathered(each: LauncherGroup) -> None:
        try:
            each.gather(lambda: None, 2, time.monotonic() + 3600, lambda: False)
        finally:
            each.close()  # as its process does when it ends

    with ThreadPoolExecutor(2) as pool:
        told = [pool.submit(gathered, each).exception() for each in rest]
    assert [type(each) for each in told] == [HostLeftError, HostLeftError]
    assert f"rank {lost}" in str(told[0]) and "left: its connection ended" in str(told[0])
    assert [each.speaks for each in rest] == [True, False]


def test_a_process_is_silent_that_learns_late_of_an_end_which_the_coordinator_has_reported(
    processes: list[LauncherGroup],
) -> None:
    first, second = processes[:2]
    first.tell("end", cause={}, again=False, change=False)
    first.let_end()
    first.close()
    while not second.lost:
        readable(second.connections, 1.0)
        assert {message["kind"] for _, message in second.hear()} <= {"end"}
    assert not second.speaks


@pytest.mark.parametrize("asked", [0, 2])
def test_a_request_to_stop_ends_the_restart_of_all_processes(processes: list[LauncherGroup], asked: int) -> None:
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(again, each, stopped=each.node == asked) for each in processes]
    assert [type(each.exception()) for each in ends] == [StopRequestedError] * 3


# ------------------------------------------------------------------------------------------------------------- messages


def test_messages_arrive_whole_and_in_order() -> None:
    here, there = _pair()
    for n in range(100):
        here.send({"kind": "over", "steps": n, "host": "", "stopped": True})
        here.send({"kind": "wait", "why": "x" * n * 1000})
    found: list[Message] = []
    while len(found) < 200:
        found += there.receive()
        assert here.receive() == []
    assert [len(message["why"]) for message in found[1::2]] == [1000 * n for n in range(100)]
    assert [message["steps"] for message in found[::2]] == list(range(100)) and not there.closed
    here.close()
    while not there.closed:
        assert there.receive() == []


def _pair() -> tuple[Connection, Connection]:
    with listen("127.0.0.1") as listening:
        one = socket.create_connection(listening.getsockname())
        return Connection(one), Connection(listening.accept()[0], accepts=True)


@given(st.integers(1, 65_535))
def test_an_endpoint_is_read(number: int) -> None:
    assert parse_endpoint(f"host1:{number}") == ("host1", number)
    assert parse_endpoint(f"[fd00::1]:{number}") == ("fd00::1", number)
    assert parse_endpoint("fd00::1") == ("fd00::1", PORT)
    assert parse_endpoint("10.0.0.1") == ("10.0.0.1", PORT)


@pytest.mark.parametrize("text", ["", ":1", "host:", "host:0", "host:65536", "host:x"])
def test_no_endpoint(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST or HOST:PORT"):
        parse_endpoint(text)


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""


@pytest.mark.parametrize("one_host", [True, False])
def test_torchruns_store_hands_the_secret_over(one_host: bool) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, other, elsewhere = (
        StoreEndpoint("127.0.0.1", store.port, key, one_host=one_host) for key in ("run/1", "run/1", "run/2")
    )
    assert other.find() is None and other.secret == b""
    with first.open() as listening:
        assert other.find() == listening.getsockname() and elsewhere.find() is None
    ours, theirs, strange = (Rendezvous("", 2, {}, 1, endpoint=endpoint) for endpoint in (first, other, elsewhere))
    assert ours.create_secret() == theirs.read_secret() == first.secret and len(first.secret) == 64
    assert strange.read_secret() != first.secret
    token = RunSecret(token=b"a token of all the hosts")
    assert Rendezvous("", 2, {}, 1, endpoint=other, secret=token).read_secret() == token.token
    store.set("run/1", "[]")
    with pytest.raises(RendezvousError, match="another value of run/1 than a launcher writes"):
        other.find()
