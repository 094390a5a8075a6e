"""Those who say nothing, or read nothing, at a socket of a launcher: what they cost, and for how long."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import ExitStack

import pytest
from test_authentication import SECRET, is_closed

from dslc.runtime.hosts import connection as connection_module
from dslc.runtime.hosts import join_requests
from dslc.runtime.hosts.authentication import GREETING, HEADER, MOST, Session
from dslc.runtime.hosts.connection import Connection, listen, readable
from dslc.runtime.hosts.join_requests import PENDING


@pytest.mark.parametrize(("more", "files"), [(8, 200), (0, 3)], ids=["too many", "no file is left"])
def test_of_those_who_say_nothing_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch, more: int, files: int) -> None:
    """Also when no file can be opened any more; and after a while none of them is left."""
    monkeypatch.setattr(join_requests, "GRACE", 0.0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listen("127.0.0.1") as listening, ExitStack() as around:
        requests = join_requests.JoinRequests(listening, SECRET.token)
        address = listening.getsockname()
        idle = [around.enter_context(socket.create_connection(address)) for _ in range(PENDING // 2 + more)]
        idle += [around.enter_context(socket.create_connection(address)) for _ in range(PENDING // 2)]
        around.callback(requests.close)
        os.close(free := os.dup(0))  # the lowest number that is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + files, limits[1]))
        try:
            for _ in idle:
                assert requests.poll() == [] and len(requests.handles) <= PENDING + 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert all(map(is_closed, idle[: max(more, 1)]))
        monkeypatch.setattr(join_requests, "HELLO", 0.0)
        for _ in idle:
            requests.poll()
        assert len(requests.handles) == 1 and all(map(is_closed, idle))


def test_a_stranger_costs_as_many_bytes_as_a_greeting_and_a_proof() -> None:
    with listen("127.0.0.1") as listening, socket.create_connection(listening.getsockname()) as caller:
        connection = Connection(listening.accept()[0], SECRET.token, accepts=True)
        caller.sendall(Session(b"", accepts=False).greeting + bytes(1 << 16))
        readable([connection], 10)
        assert connection.receive() == [] and connection.strange
        assert len(connection._waiting) <= GREETING + HEADER
        connection.close()


def test_a_launcher_that_reads_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not take waits without keeping the other launcher."""
    with listen("127.0.0.1") as listening:
        one = Connection(socket.create_connection(listening.getsockname()), SECRET.token)
        other = Connection(listening.accept()[0], SECRET.token, accepts=True)
        while not (one.authenticated and other.authenticated):
            one.receive(), other.receive()
        while not one.pending:
            one.send({"kind": "wait", "why": "x" * (MOST // 2)})
        one.send({"kind": "heard"})
        assert not one.closed
        monkeypatch.setattr(connection_module, "PATIENCE", 0.0)
        one.send({"kind": "heard"})
        assert one.closed and one.why == "it has read nothing for 0 s"
        one.close()
        other.close()
