"""Messages between the launchers of several hosts: plain JSON over TCP.

Model: a `Wire` is one connection. A message is a JSON object, behind its length in 4 bytes. Reading never waits, so
that a launcher can wait for its ranks and its wires at once; sending waits for the other side, `PATIENCE` at most.

The systems of both hosts watch the connection (TCP keepalive), also while a launcher is busy: it ends `SILENCE` seconds
after the other host was heard from last.

Contract: nothing that is read is unpickled or run. A message of more than `MOST` bytes, or one that is no object, ends
the connection, as does an error of the system: `read` then returns what had arrived, and `closed` is true.

Limits: nobody is asked for a password (docs/security.md).
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
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]

PORT = 29_400  # of a rendezvous that names none, as torchrun's
MOST = 1 << 20  # bytes of a message
PATIENCE = 10.0  # seconds that sending may take
SILENCE = 10  # seconds after which a host that does not answer is lost
_PROBE = 2  # seconds between two probes of a connection on which nothing is sent
_SIOCGIFADDR = 0x8915  # netdevice(7)
_LENGTH = struct.Struct("!I")


class Connection(Protocol):
    """A socket, a `Wire`, or what else has a descriptor."""

    def fileno(self) -> int: ...


def readable(connections: Iterable[int | Connection], seconds: float) -> set[int]:
    """Waits so long until something arrives, and returns the descriptors of those where it has. By `poll`: `select`
    takes no descriptor above 1,023, of which a keeper of so many hosts has some.
    """
    poll = select.poll()
    for each in connections:
        poll.register(each, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(math.ceil(seconds * 1000))}


def is_connected(calling: socket.socket) -> bool:
    """True once a connection that does not wait is made, or has failed."""
    poll = select.poll()
    poll.register(calling, select.POLLOUT)
    return bool(poll.poll(0))


class Wire:
    """A connection to another launcher."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._waiting = connection, b""
        self.closed = False
        self.strange = False  # it says what no launcher says
        self.why = "its connection ended"  # once it is closed
        _watch(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def here(self) -> str:
        """The address of this host on the connection."""
        address: str = self._socket.getsockname()[0]
        return address

    @property
    def there(self) -> str:
        """The address of the other host, or "" if it is gone."""
        with contextlib.suppress(OSError):
            address: str = self._socket.getpeername()[0]
            return address
        return ""

    def send(self, message: Message) -> None:
        """Sends a message; the loss of the connection shows in `closed`."""
        content = json.dumps(message).encode()
        assert len(content) <= MOST
        try:
            self._socket.settimeout(PATIENCE)
            self._socket.sendall(_LENGTH.pack(len(content)) + content)
        except OSError:
            self.closed = True

    def read(self) -> list[Message]:
        """Returns the messages that have arrived, in order."""
        self._receive()
        found: list[Message] = []
        while len(self._waiting) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._waiting)
            end = _LENGTH.size + length
            if length > MOST:
                self.closed = self.strange = True
                break
            if len(self._waiting) < end:
                break
            content, self._waiting = self._waiting[_LENGTH.size : end], self._waiting[end:]
            try:
                message = json.loads(content)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.closed = self.strange = True
                break
            found.append(message)
        return found

    def _receive(self) -> None:
        try:
            self._socket.setblocking(False)
            while len(self._waiting) <= MOST + _LENGTH.size:
                content = self._socket.recv(1 << 16)
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

    def close(self) -> None:
        """Closes the connection; what was sent still arrives."""
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


def endpoint(text: str) -> tuple[str, int]:
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


def no_endpoint(rendezvous: str) -> str:
    """Returns the first of several `HOST[:PORT]`, with commas between, that is none; "" if all are."""
    for each in rendezvous.split(","):
        try:
            endpoint(each.strip())
        except ValueError:
            return each.strip()
    return ""


def listen(address: str, port: int = 0) -> socket.socket:
    """Returns a socket that listens at one address of this host, and at no other. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(128)
    except OSError:
        listening.close()
        raise
    return listening


def interface_of(address: str) -> str:
    """Returns the name of the interface that has an IPv4 address, such as `eth0`; "" if that is not known."""
    if sys.platform != "linux":
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                told = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
                if socket.inet_ntoa(told[20:24]) == address:
                    return name
    return ""
