"""Launchers of an elastic training that come, go, and keep it: over real connections, each in a thread."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest

from dslc.runtime.hosts import elastic
from dslc.runtime.hosts.connection import Connection, listen
from dslc.runtime.hosts.elastic import JoinQueue, PreviousMembership, TrainingOverError, largest, meet_again
from dslc.runtime.hosts.launcher_group import LauncherGroup, meet
from dslc.runtime.hosts.rendezvous import Rendezvous, WaitReporter
from dslc.runtime.hosts.rendezvous_address import RendezvousError
from dslc.runtime.hosts.rendezvous_protocol import PreviousStart
from dslc.runtime.hosts.run_secret import RunSecret

SECRET = RunSecret(token=b"the secret of this run")


@pytest.fixture
def port() -> int:
    with listen("127.0.0.1") as found:
        number: int = found.getsockname()[1]
        return number


def coming(port: int, host: str, *counts: int) -> Rendezvous:
    return Rendezvous(f"127.0.0.1:{port}", counts[-1], {"a": "1"}, 120, host=host, counts=counts, secret=SECRET)


@pytest.fixture
def three(port: int) -> Iterator[list[LauncherGroup]]:
    """Yields three launchers that have met, in the order of their nodes; the job trains on 1, 2 or 3."""
    with ThreadPoolExecutor(3) as pool:
        met = [pool.submit(meet, coming(port, f"host{n}", 1, 2, 3)) for n in range(3)]
    companies = sorted((each.result() for each in met), key=lambda each: each.node)
    yield companies
    for each in companies:
        each.close()


def again(each: LauncherGroup, seconds: float = 20) -> LauncherGroup:
    each.folder = "run"
    each.meet_again(2, time.monotonic() + seconds, lambda: False)
    return each


def test_the_largest_count_for_which_there_are_hosts() -> None:
    assert [largest((2, 4), hosts) for hosts in range(6)] == [0, 0, 2, 2, 4, 4]


def test_those_who_are_left_go_on_in_their_order(three: list[LauncherGroup]) -> None:
    three[1].close()
    while 1 not in three[0].lost:
        three[0].hear()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(again, (three[2], three[0])))
    assert [(each.node, each.machines, each.start) for each in (three[0], three[2])] == [
        (0, (three[0].machines[0], three[2].machines[1]), 2),
        (1, three[0].machines, 2),
    ]


def test_the_next_in_order_keeps_when_the_coordinator_is_lost(three: list[LauncherGroup]) -> None:
    last = three[1].machines[1:]
    three[0].close()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(again, (three[2], three[1])))
    assert three[1].is_coordinator and three[1].folder == "run" and three[1].start == 2
    assert three[2].node == 1 and three[2].machines == three[1].machines == last


def test_nobody_keeps_a_training_whose_run_directory_is_locked(three: list[LauncherGroup]) -> None:
    """As by the coordinator that a network has parted from the others."""
    three[0].close()
    for each in three[1:]:
        each._rendezvous = replace(each._rendezvous, claim=lambda folder: False)
    with ThreadPoolExecutor(2) as pool:
        rest = [pool.submit(again, each, 3) for each in three[1:]]
    assert all(isinstance(each.exception(), RendezvousError) for each in rest), rest
    for each in three[1:]:
        assert each.apart
        each.let_end()  # there is nobody to wait for


def test_a_host_that_waits_at_the_rendezvous_is_sent_on(port: int) -> None:
    """The training is kept elsewhere by now: whoever keeps it there calls."""
    join_queue = JoinQueue(coming(port, "coordinator", 1, 2), listen("127.0.0.2", port))
    join_queue.busy, join_queue.fresh = "the training goes on; this host waits for a place", False
    said: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(meet, replace(coming(port, "back", 2, 3), say=said.append))
        while not join_queue.arrived:
            join_queue.wait(0.1)
            join_queue.look()
            join_queue.call()
        assert join_queue.arrived[0][1]["host"] == "back"
        join_queue.tell("over", steps=7, host="coordinator", stopped=True)
        error = waits.exception()
    assert isinstance(error, TrainingOverError) and (error.steps, error.host, error.stopped) == (7, "coordinator", True)
    assert said == [join_queue.busy]
    join_queue.close()


def test_a_late_host_proves_that_it_knows_the_secret(port: int) -> None:
    """Its facts alone, which are right, let nobody in while a training goes on."""
    keeps = coming(port, "coordinator", 1, 2)
    join_queue = JoinQueue(keeps, listen("127.0.0.1", port))
    join_queue.busy, join_queue.fresh = "the training goes on; this host waits for a place", False
    for token, arrives in ((b"", False), (b"the secret of another run", False), (SECRET.token, True)):
        late = Connection(socket.create_connection(("127.0.0.1", port)), token)
        late.send({"kind": "join_request", "host": "late", "facts": dict(keeps.facts)})
        while not (late.closed or join_queue.arrived):
            late.receive()
            join_queue.look()
        assert [request["host"] for _, request in join_queue.arrived] == ["late"] * arrives
        late.close()
    join_queue.close()


@pytest.mark.parametrize("first", ["127.0.0.1", "nowhere.invalid"], ids=["is not there", "is not known"])
def test_the_first_of_the_rendezvous_that_is_there_keeps(
    port: int, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr(elastic, "_opened", lambda _, place: only(place, "127.0.0.2"))
    named = replace(coming(port, "second", 1), address=f"{first}:{port},127.0.0.2:{port},127.0.0.3:{port}")
    monkeypatch.setattr(elastic, "_LATER", 0.2)
    met, join_queue = elastic.meet(named)
    assert join_queue is not None and join_queue.place == ("127.0.0.2", port) and met.machines == ["second"]
    join_queue.close()
    assert met.listening is not None
    met.listening.close()


def only(place: elastic.Place, address: str) -> JoinQueue | None:
    """Returns a join queue at the address of this host, of the several that this machine has."""
    return JoinQueue(coming(place[1], "", 1), listen(*place)) if place[0] == address else None


def test_who_keeps_a_first_start_gives_way_to_one_that_is_named_before(port: int) -> None:
    """The third waits with the second when the first comes, and is sent on there."""
    named = f"127.0.0.1:{port},127.0.0.2:{port}"
    with ThreadPoolExecutor(3) as pool:
        waits = replace(coming(port, "second", 3), address=named)
        join_queue = JoinQueue(waits, listen("127.0.0.2", port))
        third = pool.submit(meet, replace(coming(port, "third", 3), address=f"127.0.0.2:{port}"))
        while not join_queue.arrived:
            join_queue.wait(0.1)
            join_queue.look()
        second = pool.submit(elastic.coordinate_first_start, waits, join_queue, lambda: None)
        first = meet(replace(coming(port, "first", 3), address=named))
        met, kept = second.result()
        assert first.is_coordinator and kept is None and sorted([met.node, third.result().node]) == [1, 2]
        assert sorted(first.machines) == ["first", "second", "third"]
        met.connections[0].close()
        for each in (first, third.result()):
            each.close()


def test_a_host_that_finds_the_run_directory_locked_waits_to_be_sent_on(port: int) -> None:
    """It would be enough to train, and whoever keeps the training calls while the ranks restart, too."""
    asked, said = Event(), list[str]()

    def holder() -> str:
        asked.set()
        return "process 1 on coordinator"

    join_queue = JoinQueue(coming(port, "coordinator", 2), listen("127.0.0.2", port))
    join_queue.fresh = False
    before = PreviousStart(node=0, start=1, folder="run")
    was = PreviousMembership(
        before=before, join_queue=join_queue, lost=frozenset(), addresses=["127.0.0.2"], here="127.0.0.2"
    )
    with ThreadPoolExecutor(1) as pool:
        held = replace(coming(port, "back", 1), holder=holder, say=said.append)
        back = pool.submit(meet, held)
        assert asked.wait(20)
        met, _ = meet_again(join_queue._rendezvous, was)
        assert met.machines == ["coordinator", "back"] and back.result().node == 1
    assert said[0].startswith("waiting for the training in its run directory, which process 1 on coordinator keeps"), (
        said
    )
    for each in (back.result(), *met.connections.values(), met.listening, join_queue):
        assert each is not None
        each.close()


def test_a_host_with_other_files_is_refused_alone(port: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        coordinator = pool.submit(meet, coming(port, "coordinator", 2))
        while is_silent(port):
            pass
        with pytest.raises(
            RendezvousError, match="the hosts differ in a: other has not the same as coordinator; other has 2"
        ):
            meet(replace(coming(port, "other", 2), facts={"a": "2"}))
        right = meet(coming(port, "right", 2))
        assert coordinator.result().machines == right.machines == ("coordinator", "right")
        coordinator.result().close()
        right.close()


def is_silent(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_hosts_that_a_cluster_brings_are_waited_for_without_end(port: int) -> None:
    """Until the first start; after that for as long as for others."""
    late = replace(coming(port, "host", 2), timeout=-1)
    with pytest.raises(RendezvousError, match="waited -1 s"):
        WaitReporter(late, "").look([])
    WaitReporter(replace(late, patient=True), "").look([])
    with pytest.raises(RendezvousError):
        WaitReporter(replace(late, patient=True, until=time.monotonic() - 1), "").look([])


def test_a_first_start_looks_only_at_those_named_before_it_some_at_a_time(port: int) -> None:
    named = [f"127.0.0.{n}:{port}" for n in range(1, 25)]
    join_queue = JoinQueue(replace(coming(port, "host", 2), address=",".join(named)), listen("127.0.0.20", port))
    looked = [[place[0] for place in join_queue._next_places()] for _ in range(4)]
    assert [(each[0], each[-1], len(each)) for each in looked] == [
        ("127.0.0.1", "127.0.0.8", 8),
        ("127.0.0.9", "127.0.0.16", 8),
        ("127.0.0.17", "127.0.0.19", 3),
        ("127.0.0.1", "127.0.0.8", 8),
    ]
    join_queue.fresh = False
    assert len({place for _ in range(3) for place in join_queue._next_places()}) == 23
    join_queue.close()
