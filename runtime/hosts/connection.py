"""Messages between the launchers of several hosts: JSON over TCP, authenticated by the secret of the run.

Model: each message is a JSON object in a frame of authentication.py. Reading and sending never wait, so that a launcher
can wait for its ranks and its connections at once: what the other side does not take is sent at the next read. A
message that is sent before the other side has proved that it knows the secret waits for the proof. The systems of both
hosts watch the connection (TCP keepalive): it ends `SILENCE` seconds after the other host was heard from last.

Contract: nothing is parsed before it is authenticated, and nothing that is read is unpickled or run. An unknown client
costs as many bytes as a greeting and a proof have. A message of more than `MOST` bytes, or of no kind that messages.py
knows, ends the connection. So does an error of the system, or a side that has read nothing for `PATIENCE` seconds.
`receive` then returns what had arrived, and `closed` is true.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Iterable
from typing import Protocol

from dslc.runtime.hosts.authentication import GREETING, HEADER, MOST, AuthenticationError, Session, check_greeting
from dslc.runtime.hosts.messages import Message, MessageError, parse_message

PORT = 29_400  # of a rendezvous that names none, as torchrun's
PATIENCE = 10.0  # seconds in which the other side has to read something
SILENCE = 10  # seconds after which a host that does not answer is lost
_PROBE = 2  # seconds between two probes of a connection on which nothing is sent
_SIOCGIFADDR = 0x8915  # netdevice(7)


class Selectable(Protocol):
    """A socket, a `Connection`, or what else has a descriptor."""

    def fileno(self) -> int: ...


def readable(connections: Iterable[int | Selectable], seconds: float) -> set[int]:
    """Waits up to `seconds` until something arrives, and returns the descriptors that have something to read. `select`
    takes no descriptor above 1,023, and a coordinator of many hosts has some above.
    """
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(math.ceil(seconds * 1000))}


def is_connected(socket_: socket.socket) -> bool:
    """True once a connection that does not wait is made, or has failed."""
    poll = select.poll()
    poll.register(socket_, select.POLLOUT)
    return bool(poll.poll(0))


class Connection:
    """A connection to another launcher: this launcher has called it, or `accepts` its call."""

    def __init__(self, connection: socket.socket, secret: bytes = b"", *, accepts: bool = False) -> None:
        self._socket, self._session = connection, Session(secret, accepts=accepts)
        self._waiting = bytearray()  # has arrived
        self._leaving = bytearray(self._session.greeting)  # is sent as the other side reads
        self._queue: list[bytes] = []  # contents for which the proof of the other side is awaited
        self._stalled = 0.0  # since when the other side reads nothing
        self.closed = False
        self.strange = False  # it says what no launcher of this run says
        self.why = "its connection ended"  # once it is closed
        connection.setblocking(False)
        _watch(connection)
        self._send()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def authenticated(self) -> bool:
        return self._session.is_authenticated

    @property
    def pending(self) -> bool:
        """True as long as something that was sent has not left."""
        return bool(self._leaving or self._queue)

    @property
    def local_address(self) -> str:
        address: str = self._socket.getsockname()[0]
        return address

    @property
    def remote_address(self) -> str:
        """The address of the other host, or "" if it is gone."""
        with contextlib.suppress(OSError):
            address: str = self._socket.getpeername()[0]
            return address
        return ""

    def send(self, message: Message) -> None:
        """Sends a message, as the other side reads; the loss of the connection shows in `closed`."""
        content = json.dumps(message).encode()
        assert len(content) <= MOST
        if self.authenticated:
            self._leaving += self._session.seal(content)
        else:
            self._queue.append(content)
        self._send()

    def receive(self) -> list[Message]:
        """Returns the messages that have arrived, in order, and sends what has not left yet."""
        self._receive()
        messages: list[Message] = []
        try:
            if not self._session.is_greeted:
                self._greet()
            while self._session.is_greeted and (content := self._session.open(self._waiting)) is not None:
                del self._waiting[: HEADER + len(content)]
                if content:
                    messages.append(parse_message(content))
                for queued_message in self._queue:
                    self._leaving += self._session.seal(queued_message)
                self._queue = []
        except (AuthenticationError, MessageError) as error:
            self.closed = self.strange = True
            self.why = str(error)
        self._send()
        return messages

    def _greet(self) -> None:
        check_greeting(bytes(self._waiting[:GREETING]))
        if len(self._waiting) >= GREETING:
            self._leaving += self._session.receive_greeting(bytes(self._waiting[:GREETING]))
            del self._waiting[:GREETING]

    def _receive(self) -> None:
        limit = HEADER + MOST if self.authenticated else GREETING + HEADER  # of an unknown client no more is held
        try:
            while len(self._waiting) < limit:
                content = self._socket.recv(min(1 << 16, limit - len(self._waiting)))
                if not content:
                    self.closed = True
                    return
                self._waiting += content
        except BlockingIOError:
            return
        except OSError as error:
            self.closed = True
            if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
                self.why = f"it did not answer for {SILENCE} s"

    def _send(self) -> None:
        """Sends what the other side takes without waiting."""
        try:
            while self._leaving and not self.closed:
                del self._leaving[: self._socket.send(self._leaving[: 1 << 16])]
                self._stalled = 0.0
        except BlockingIOError:
            self._stalled = self._stalled or time.monotonic()
            if time.monotonic() - self._stalled > PATIENCE:
                self.closed, self.why = True, f"it has read nothing for {PATIENCE:g} s"
        except OSError:
            self.closed = True

    def close(self) -> None:
        self._socket.close()
        self.closed = True


def _watch(connection: socket.socket) -> None:
    """Has the system find out that the other host is gone: https://man7.org/linux/man-pages/man7/tcp.7.html."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _PROBE),
        ("TCP_KEEPINTVL", _PROBE),
        ("TCP_KEEPCNT", SILENCE // _PROBE - 1),
        ("TCP_USER_TIMEOUT", 1000 * SILENCE),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def parse_endpoint(text: str) -> tuple[str, int]:
    """Returns host and port of `HOST[:PORT]`; an IPv6 address stands in brackets before a port. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        host, port = text, str(PORT)
    host = host.strip("[]")
    if not host or not _is_named(host) or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"`{text}` is not HOST or HOST:PORT")
    return host, int(port)


def _is_named(host: str) -> bool:
    """True for a name, and an address: where there are colons, one of IPv6."""
    if ":" in host:
        try:
            socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        except OSError:
            return False
    return True


def listen(address: str, port: int = 0) -> socket.socket:
    """Returns a socket that listens at one address of this host, and at no other. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def interface_of(address: str) -> str:
    """Returns the name of the interface that has an IPv4 address, such as `eth0`; "" if that is not known."""
    if sys.platform != "linux":
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(udp_socket, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return ""
