"""Strangers, forged launchers and changed messages: nothing that has no proof is read, ends or delays a launcher."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import resource
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from instruments.strangers import malformed_message, stranger

from dslc.runtime.hosts import elastic, join_requests, rendezvous, rendezvous_protocol
from dslc.runtime.hosts.authentication import GREETING, HEADER, MOST, AuthenticationError, Session
from dslc.runtime.hosts.connection import Connection, listen, readable
from dslc.runtime.hosts.coordination import HostGroup, LauncherState
from dslc.runtime.hosts.elastic import JoinQueue, TrainingOverError
from dslc.runtime.hosts.join_requests import PENDING
from dslc.runtime.hosts.launcher_group import LauncherGroup, meet, shared
from dslc.runtime.hosts.messages import DEEPEST, KINDS, Message, MessageError, parse_message
from dslc.runtime.hosts.rendezvous import Rendezvous, StopRequestedError
from dslc.runtime.hosts.rendezvous_address import FileEndpoint, RendezvousError
from dslc.runtime.hosts.rendezvous_protocol import RendezvousPlace, join
from dslc.runtime.hosts.run_secret import RunSecret, token_in
from dslc.runtime.process.failure import Failure
from dslc.runtime.process.stop import RunControl

SECRET = RunSecret(token=b"the secret of this run")
HELLO: Message = {"kind": "join_request", "host": "member", "facts": {"a": "1"}}


@pytest.fixture
def port() -> int:
    with listen("127.0.0.1") as listening:
        number: int = listening.getsockname()[1]
        return number


def greeted(here: bytes = b"secret", there: bytes = b"secret") -> tuple[Session, Session, bytes, bytes]:
    """Returns two ends that have greeted each other, and the proof that each has sent."""
    one, other = Session(here, accepts=False), Session(there, accepts=True)
    answer = other.receive_greeting(one.greeting)
    return one, other, one.receive_greeting(answer[:GREETING]), answer[GREETING:]


def connected() -> tuple[Session, Session]:
    """Returns two ends that have proved to each other that they know the secret."""
    one, other, of_one, of_other = greeted()
    assert one.open(of_other) == b"" == other.open(of_one)
    assert one.is_authenticated and other.is_authenticated
    return one, other


# ---------------------------------------------------------------------------------------------------------- one frame


@pytest.mark.parametrize("secrets", [(b"a", b"b"), (b"", b"b"), (b"a", b"")])
def test_another_secret_is_no_proof(secrets: tuple[bytes, bytes]) -> None:
    one, other, of_one, of_other = greeted(*secrets)
    for end, proof in ((one, of_other), (other, of_one)):
        with pytest.raises(AuthenticationError, match="does not know the secret"):
            end.open(proof)
        assert not end.is_authenticated


def test_a_frame_is_taken_once_in_its_order_and_its_direction() -> None:
    one, other = connected()
    first, second = one.seal(b"first"), one.seal(b"second")
    with pytest.raises(AuthenticationError):
        other.open(second)
    assert other.open(first) == b"first"
    for frame in (first, other.seal(b"reflected")):
        with pytest.raises(AuthenticationError):
            other.open(frame)
    assert other.open(second) == b"second"
    with pytest.raises(AuthenticationError):
        one.open(one.seal(b"mine"))  # it comes back


@pytest.mark.parametrize("accepts", [True, False])
def test_a_frame_that_comes_back_is_not_taken(accepts: bool) -> None:
    """Also where it has the number that is awaited."""
    end = connected()[accepts]
    with pytest.raises(AuthenticationError):
        end.open(end.seal(b"mine"))


@pytest.mark.parametrize("accepts", [True, False])
def test_what_was_recorded_of_one_end_is_no_proof_later(accepts: bool) -> None:
    """The end that is asked again has a fresh challenge."""
    connects, other = Session(b"secret", accepts=False), Session(b"secret", accepts=True)
    answer = other.receive_greeting(connects.greeting)
    recorded = answer if not accepts else connects.greeting + connects.receive_greeting(answer[:GREETING])
    later = Session(b"secret", accepts=accepts)
    later.receive_greeting(recorded[:GREETING])
    with pytest.raises(AuthenticationError, match="does not know the secret"):
        later.open(recorded[GREETING:])


def test_a_frame_of_another_connection_is_not_taken() -> None:
    (one, _), (_, other) = connected(), connected()
    with pytest.raises(AuthenticationError):
        other.open(one.seal(b"replayed"))


def test_a_launcher_that_is_made_to_talk_with_itself_proves_nothing() -> None:
    """Both connections are accepted by it, and each gets the challenge of the other."""
    first, second = Session(b"secret", accepts=True), Session(b"secret", accepts=True)
    of_first = first.receive_greeting(Session(b"", accepts=False).greeting)
    of_second = second.receive_greeting(of_first[:GREETING])
    with pytest.raises(AuthenticationError):
        second.open(of_first[GREETING:])
    with pytest.raises(AuthenticationError):
        first.open(of_second[GREETING:])


@pytest.mark.parametrize("place", range(0, HEADER + 7, 6))
def test_a_frame_of_which_a_byte_is_changed_is_not_taken(place: int) -> None:
    one, other = connected()
    frame = bytearray(one.seal(b"content"))
    frame[place] ^= 1
    with suppress(AuthenticationError):
        assert other.open(frame) is None, "only a length may have grown, of which the rest is awaited"


def test_a_frame_that_is_cut_short_is_awaited_and_one_too_large_is_not() -> None:
    one, other = connected()
    frame = one.seal(b"content")
    assert all(other.open(frame[:end]) is None for end in range(len(frame)))
    assert other.open(frame) == b"content"
    with pytest.raises(AuthenticationError, match="announces a message of"):
        other.open((MOST + 1).to_bytes(4, "big") + bytes(HEADER))
    new = greeted()[1]
    with pytest.raises(AuthenticationError, match="announces a message of 1 bytes"):
        new.open((1).to_bytes(4, "big") + bytes(HEADER))  # before the proof nothing may have a content


# -------------------------------------------------------------------------------------------------------- one message


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 400_000,
        b'{"kind": "hello", "facts": ' + b'{"a": ' * 400_000,
        json.dumps({"kind": "failed", "seen": {"a": [[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]}}).encode(),
        b'{"kind": "wait", "why": ' + b"9" * 500_000 + b"}",
        b'{"kind": "wait", "why": "' + b'\\"' * 400_000,
        '{"kind": "heard"}'.encode("utf-16"),
        b'{"kind": "heard", "more": 1}',
        b'{"kind": ["heard"]}',
        b'{"kind": "failed"}',
        b'{"kind": "hold", "step": true}',
        b'{"kind": "hold", "step": -1}',
        b'{"kind": "hold", "step": 99999999999999999999}',
        b'{"kind": "unheard"}',
        b"\xff",
        b"null",
    ],
    ids=range(15),
)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    with pytest.raises(MessageError):
        parse_message(content)


def test_brackets_in_a_text_are_not_nested() -> None:
    message = {"kind": "wait", "why": '[{"' * 10 * DEEPEST}
    assert parse_message(json.dumps(message).encode()) == message


# ---------------------------------------------------------------------------------------------------- unknown clients


def coming(port: int, host: str, nodes: int = 2, *, counts: tuple[int, ...] = (), timeout: float = 20) -> Rendezvous:
    facts = {"a": "1"}
    return Rendezvous(f"127.0.0.1:{port}", nodes, facts, timeout, host=host, counts=counts, again=True, secret=SECRET)


def reach(port: int) -> socket.socket:
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize("counts", [(), (2,)], ids=["fixed", "elastic"])
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(n, marks=pytest.mark.long) for n in range(5, 200))])
def test_strangers_neither_end_nor_delay_a_meeting(port: int, seed: int, counts: tuple[int, ...]) -> None:
    """Before the hosts have met, and while they train."""
    draw = random.Random(seed)
    with ThreadPoolExecutor(2) as pool, ExitStack() as around:
        coordinator = pool.submit(meet, coming(port, "coordinator", counts=counts))
        around.enter_context(reach(port))
        strangers = [around.enter_context(stranger(draw, port)) for _ in range(20)]
        other = meet(coming(port, "other", counts=counts))
        group = coordinator.result()
        assert group.machines == other.machines == ("coordinator", "other")
        strangers += [around.enter_context(stranger(draw, port)) for _ in range(20)]
        other.tell("release")
        messages: list[tuple[int, Message]] = []
        while not messages:
            readable(group.handles, 0.1)
            messages += group.hear()
        assert messages == [(1, {"kind": "release"})] and not group.lost
        group.close()
        other.close()


def test_connections_without_end_cost_a_bounded_number_of_files(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six hundred that say nothing, in a process that may open a few more files than it has."""
    monkeypatch.setattr(join_requests, "GRACE", 0.01)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ThreadPoolExecutor(1) as pool, ExitStack() as around:
        coordinator = pool.submit(meet, coming(port, "coordinator"))
        around.enter_context(reach(port))
        idle = [around.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(600)]
        open_files = {int(name) for name in os.listdir("/proc/self/fd")}
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_files) + PENDING + 16, limits[1]))
        try:
            other = meet(coming(port, "other"))
            assert coordinator.result().machines == ("coordinator", "other")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert sum(is_closed(each) for each in idle) >= len(idle) - PENDING
        for each in (coordinator.result(), other):
            each.close()


def test_of_many_hosts_that_come_at_once_none_is_dropped() -> None:
    """Three times as many as may be pending, as when a cluster starts all of them."""
    count = 3 * PENDING
    with listen("127.0.0.1") as listening, ThreadPoolExecutor(1) as pool, ExitStack() as around:
        address = listening.getsockname()
        connections = [Connection(socket.create_connection(address), SECRET.token) for _ in range(count)]
        for connection in connections:
            around.callback(connection.close)
            connection.send(HELLO)
        coordinator = pool.submit(
            rendezvous_protocol.wait_for_hosts,
            coming(0, "coordinator", 1 + count),
            RendezvousPlace("", lambda: None, listening),
        )
        kinds: list[str] = []
        while kinds.count("join_reply") < count:
            readable(connections, 0.1)
            kinds += [message["kind"] for connection in connections for message in connection.receive()]
            assert not any(connection.closed for connection in connections)
        met = coordinator.result()
        assert met.listening is not None and len(met.connections) == count
        met.listening.close()
        for connection in met.connections.values():
            connection.close()


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_launcher_without_the_secret_is_told_and_the_others_meet(port: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        coordinator = pool.submit(meet, coming(port, "coordinator"))
        reach(port).close()
        for secret in (RunSecret(), RunSecret(token=b"the secret of another run")):
            with pytest.raises(RendezvousError, match=r"does not know the secret of this run.*\n.*DSLC_RUN_TOKEN"):
                meet(replace(coming(port, "stranger"), secret=secret))
        other = meet(coming(port, "other"))
        assert coordinator.result().machines == ("coordinator", "other")
        for each in (coordinator.result(), other):
            each.close()


@pytest.mark.parametrize("counts", [(), (2,)], ids=["fixed", "elastic"])
def test_a_host_that_does_not_see_the_secret_says_so(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    """And the others meet."""
    monkeypatch.setattr(rendezvous, "_UNSEEN", 0.1)
    (tmp_path / "other").mkdir()

    def host(name: str, folder: Path) -> Rendezvous:
        return replace(coming(port, name, counts=counts), secret=in_folder(folder))

    with ThreadPoolExecutor(1) as pool:
        coordinator = pool.submit(meet, host("coordinator", tmp_path))
        reach(port).close()
        unseen = (
            rf"apart waited .* whose secret {tmp_path}/other/.dslc-secret is not seen here\n.*DSLC_RUN_TOKEN on all"
        )
        with pytest.raises(RendezvousError, match=unseen):
            meet(host("apart", tmp_path / "other"))
        other = meet(host("other", tmp_path))
        assert coordinator.result().machines == ("coordinator", "other")
        for each in (coordinator.result(), other):
            each.close()


# ------------------------------------------------------------------------------------ forged members and coordinators


def forged(port: int, draw: random.Random, join_request: bool = True) -> Connection:
    """Returns the connection of a member that knows the secret, and says what no launcher says."""
    connection = Connection(reach(port), SECRET.token)
    if join_request:
        connection.send(HELLO)
    while not connection.authenticated and not connection.closed:
        readable([connection], 1)
        connection.receive()
    return connection


LONG = [*range(10), *(pytest.param(n, marks=pytest.mark.long) for n in range(10, 300))]


@pytest.mark.parametrize("seed", LONG)
def test_a_member_that_says_nonsense_is_lost_with_the_reason(port: int, seed: int) -> None:
    draw = random.Random(seed)
    with ThreadPoolExecutor(1) as pool:
        coordinator = pool.submit(meet, coming(port, "coordinator"))
        member = forged(port, draw)
        group = coordinator.result()
        board = RunControl(1)
        together = HostGroup(group, board, 100, lambda step: step, lambda failure, *_: (False, failure))
        together.look()
        for _ in range(20):
            with suppress(AssertionError):  # it is longer than any message
                member.send(malformed_message(draw))
        for _ in range(20):
            readable(group.handles, 0.01)
            together.look()
        member.close()
        together.failed(None)  # as this launcher does when its ranks have ended
        while together.look() is not LauncherState.FAILED:
            readable(group.handles, 0.01)
        assert together.cause is not None and together.cause.message
        group.close()


@pytest.mark.parametrize("seed", LONG)
def test_a_coordinator_that_says_nonsense_ends_in_a_message(seed: int) -> None:
    draw = random.Random(seed)
    with listen("127.0.0.1") as listening, ThreadPoolExecutor(1) as pool:
        port = listening.getsockname()[1]
        host = replace(coming(port, "host", counts=(2,) if seed % 2 else (), timeout=1), again=False)
        joined: Future[object] = (
            pool.submit(elastic.meet, host)
            if host.counts
            else pool.submit(join, host, RendezvousPlace("the coordinator", lambda: ("127.0.0.1", port)))
        )
        while not joined.done():
            if not readable([listening], 0.1):
                continue
            connection = Connection(listening.accept()[0], SECRET.token, accepts=True)
            while not connection.receive() and not connection.closed:
                readable([connection], 1)
            for _ in range(5):
                connection.send(malformed_message(draw))
            connection.close()
        error = joined.exception()
        assert error is None or isinstance(error, RendezvousError | StopRequestedError | TrainingOverError), error
        if error is None:
            close(joined.result())


def close(met: object) -> None:
    for each in met if isinstance(met, tuple) else (met,):
        for connection in getattr(each, "connections", {}).values():
            connection.close()


def test_a_coordinator_without_the_secret_learns_nothing() -> None:
    """It gets a greeting and a proof, and not one byte more; no host believes what it says."""
    refusal = json.dumps({"kind": "refused", "why": "go away"}).encode()
    with listen("127.0.0.1") as listening, ThreadPoolExecutor(1) as pool:
        port = listening.getsockname()[1]
        host = replace(coming(port, "host"), facts={"the file job.plt": "cafe0123"})
        joined = pool.submit(join, host, RendezvousPlace("the coordinator", lambda: ("127.0.0.1", port)))
        session, heard = Session(b"", accepts=True), b""
        with listening.accept()[0] as connection, suppress(ConnectionResetError):
            while len(heard) < GREETING:
                heard += connection.recv(1 << 16)
            answer = session.receive_greeting(heard[:GREETING])
            connection.sendall(answer[:GREETING])
            while len(heard) < GREETING + HEADER:
                heard += connection.recv(1 << 16)
            connection.sendall(answer[GREETING:] + session.seal(refusal))
            while content := connection.recv(1 << 16):
                heard += content
        assert len(heard) == GREETING + HEADER and b"cafe0123" not in heard
        assert "does not know the secret" in str(joined.exception()) and "go away" not in str(joined.exception())


@pytest.mark.parametrize("secret", [RunSecret(), SECRET], ids=["open", "secret"])
def test_only_who_knows_a_secret_sends_a_host_to_a_place_that_nobody_named(port: int, secret: RunSecret) -> None:
    waits = replace(coming(port, "host", counts=(1, 2)), secret=secret)
    join_queue = JoinQueue(waits, listen("127.0.0.1", port))
    caller = Connection(socket.create_connection(("127.0.0.1", port)), secret.token)
    caller.send({"kind": "elsewhere", "place": ["127.0.0.9", port]})
    try:
        with pytest.raises(elastic._Elsewhere) if secret is SECRET else nullcontext():
            while not caller.closed:
                caller.receive()
                join_queue.look()
    finally:
        join_queue.close()
        caller.close()


# ----------------------------------------------------------------------------------------- facts, folders and secrets


def test_a_refusal_names_the_fact_and_no_value(port: int) -> None:
    logged: list[str] = []
    with listen("127.0.0.1", port) as listening, ThreadPoolExecutor(1) as pool:
        facts = {"the file job.plt": "280 bytes, cafe0123"}
        rendezvous = replace(coming(port, "coordinator"), facts=facts, say=logged.append)
        place = RendezvousPlace("", lambda: None, listening)
        coordinator = pool.submit(rendezvous_protocol.wait_for_hosts, rendezvous, place, 2)
        connection = Connection(reach(port), SECRET.token)
        connection.send({**HELLO, "facts": {"the file job.plt": "1 bytes, 00000000"}})
        heard: list[Message] = []
        while not connection.closed:
            readable([connection], 1)
            heard += connection.receive()
        refusal = heard[-1]
        assert refusal["kind"] == "refused" and "the hosts differ in the file job.plt" in refusal["why"]
        assert "cafe0123" not in json.dumps(heard), "the value stays on its host"
        assert any("cafe0123" in line for line in logged)
        other = Connection(reach(port), SECRET.token)
        other.send({**HELLO, "facts": facts})
        while not coordinator.done():
            readable([other], 0.1)
            other.receive()
        met = coordinator.result()
        assert met.listening is not None
        met.listening.close()
        for each in (connection, other, *met.connections.values()):
            each.close()


@pytest.fixture
def pair(port: int) -> Iterator[list[LauncherGroup]]:
    with ThreadPoolExecutor(2) as pool:
        companies = [each.result() for each in [pool.submit(meet, coming(port, f"host{n}")) for n in range(2)]]
    yield sorted(companies, key=lambda group: group.node)
    for each in companies:
        each.close()


@pytest.mark.parametrize("kind", ["settle", "hold", "leave", "release", "part", "end", "done"])
def test_a_message_that_is_not_for_a_launcher_costs_who_sent_it(pair: list[LauncherGroup], kind: str) -> None:
    """A member cannot end the training as the coordinator does, nor the coordinator be done as a member."""
    here, there = reversed(pair) if kind == "done" else pair
    board = RunControl(1)
    together = HostGroup(here, board, 100, lambda step: step, lambda failure, *_: (False, failure))
    sent: Message = {"of": "lost", "step": 1, "timed": False, "end": "", "again": True, "change": False}
    sent["cause"] = dataclasses.asdict(Failure(rank=0, step=1, kind="error", message="", host="", time=0.0))
    there.tell(kind, **{name.rstrip("?"): sent[name.rstrip("?")] for name in KINDS[kind]})
    there.tell("stop")
    for _ in range(100):
        readable(here.handles, 0.1)
        together.look()
        if here.lost:
            break
    assert here.lost == {there.node: f"its message `{kind}` cannot be taken: it is not for this launcher"}
    assert not together.again and (together.cause is None or "cannot be taken" in together.cause.message)


def test_the_fault_of_a_stranger_ends_no_meeting(port: int) -> None:
    """Processes of one launcher tell their faults; hosts that come by themselves have theirs for themselves."""
    with ThreadPoolExecutor(1) as pool:
        coordinator = pool.submit(meet, coming(port, "coordinator"))
        reach(port).close()
        other = meet(replace(coming(port, "other"), fault="all must end"))
        assert coordinator.result().machines == ("coordinator", "other")
        for each in (coordinator.result(), other):
            each.close()


@pytest.mark.parametrize(
    "file",
    [
        *("secret.txt", "../secret.txt", "/etc/hostname", ".dslc-0123456789abcdef", ".dslc-00000000000000ff"),
        "inner/.dslc-0123456789abcdef",
    ],
)
def test_a_coordinator_cannot_ask_what_is_on_another_host(pair: list[LauncherGroup], tmp_path: Path, file: str) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    os.mkfifo(tmp_path / ".dslc-0123456789abcdef")
    (tmp_path / ".dslc-00000000000000ff").symlink_to("/etc/hostname")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / ".dslc-0123456789abcdef").write_text("secret")
    coordinator, other = pair
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(shared, other, "", 20)
        coordinator.tell("folder", folder=str(tmp_path), file=file, start=1)
        answer = coordinator.wait_for("sees", 20)[1]
        assert answer["content"] == ""
        coordinator.tell("blind", nodes=[1, 1 << 40])
        assert seen.result() == (str(tmp_path), [1])


def no_links(source: str, target: str) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), target)


def in_folder(folder: Path) -> RunSecret:
    return RunSecret(path=str(folder / ".dslc-secret"))


@pytest.mark.parametrize("links", [True, False])
def test_a_secret_is_a_file_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """Also where the file system has no links, from the second launcher on."""
    if not links:
        monkeypatch.setattr(os, "link", no_links)
        in_folder(tmp_path).create()
    source = in_folder(tmp_path)
    assert (source.load() is None) == links
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: source.create(), range(8)))
    assert found == {source.load()} and len(found.pop()) == 64
    assert stat.S_IMODE(os.stat(source.path).st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [".dslc-secret"]


def test_a_secret_that_others_can_read_or_choose_is_not_taken(tmp_path: Path) -> None:
    def is_readable(path: Path) -> None:
        path.chmod(0o644)

    def is_short(path: Path) -> None:
        path.write_text("short")

    def is_a_fifo(path: Path) -> None:
        path.unlink()
        os.mkfifo(path, 0o600)

    def is_a_folder(path: Path) -> None:
        path.unlink()
        path.mkdir()

    def is_a_link(path: Path) -> None:
        path.rename(tmp_path / "theirs")
        path.symlink_to(tmp_path / "theirs")

    def is_of_another(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 12345, -1)
        else:
            path.chmod(0o660)

    spoilt = (is_readable, is_short, is_a_fifo, is_a_folder, is_a_link, is_of_another)
    for n, spoil in enumerate(spoilt):
        folder = tmp_path / str(n)
        folder.mkdir()
        source = in_folder(folder)
        source.create()
        spoil(Path(source.path))
        with pytest.raises(RendezvousError, match="the secret of this run"):
            source.load()


def test_a_token_that_can_be_guessed_is_refused() -> None:
    assert token_in("") == b"" and token_in("0123456789abcdef") == b"0123456789abcdef"
    with pytest.raises(RendezvousError, match=r"DSLC_RUN_TOKEN has 6 characters.*\n.*openssl"):
        token_in("secret")
    assert "secret" not in repr(SECRET)


def test_a_door_hands_the_secret_over_in_a_private_file(tmp_path: Path) -> None:
    first, other = (FileEndpoint(str(tmp_path / "door"), one_host=True) for _ in range(2))
    assert other.find() is None
    with first.open() as listening:
        assert other.find() == listening.getsockname() and other.secret == first.secret != b""
        assert stat.S_IMODE((tmp_path / "door").stat().st_mode) == 0o600
        (tmp_path / "door").chmod(0o666)
        with pytest.raises(RendezvousError, match="this user alone"):
            other.find()
    first.close()
    assert not list(tmp_path.iterdir())
