"""Where launchers meet that know their places: the first launcher opens an endpoint, and the other launchers look for
it.

A endpoint is a socket at one address. How the other launchers learn the address depends on who has started them
(runtime/launchers): `FixedEndpoint` is at an address that all are given, `FileEndpoint` at one that stands in a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from typing import Protocol

from dslc.compiler.facts.untrusted_files import read_private, write_private
from dslc.runtime.hosts.connection import listen

LOCAL = ("localhost", "127.0.0.1", "::1")
_ELSEWHERE = "192.0.2.1", 9  # an address that no host has (RFC 5737): the way there leads through the network


class RendezvousError(Exception):
    """The hosts did not come together; the text says why, and what to do."""


class Endpoint(Protocol):
    """`name` says in messages where it is. `secret` is handed over with the address, once it is open or found; or
    empty.
    """

    name: str
    secret: bytes

    def open(self) -> socket.socket:
        """Returns the socket at which the first launcher listens. Raises RendezvousError and OSError."""

    def find(self) -> tuple[str, int] | None:
        """Returns the address of that socket, for the other launchers; None if it is unknown yet. Raises
        RendezvousError.
        """

    def close(self) -> None:
        """Removes what shows the endpoint; called by all when they have met, or not."""


class FixedEndpoint:
    """An endpoint at an address that all are given. `one_host`: all are on one host, which must have the address."""

    def __init__(self, host: str, port: int, *, one_host: bool = False) -> None:
        self._host, self._port, self._one_host = host, port, one_host
        self.name, self.secret = f"{host}:{port}", b""

    def open(self) -> socket.socket:
        return listen(address_of(self._host), self._port)

    def find(self) -> tuple[str, int]:
        address = address_of(self._host)
        if self._one_host:
            try:
                listen(address).close()
            except OSError as error:
                raise RendezvousError(
                    f"{self.name} is no address of {socket.gethostname()}: {error.strerror}"
                ) from error
        return address, self._port

    def close(self) -> None:
        """A no-op."""


class FileEndpoint:
    """An endpoint whose address the first writes to a private file that all see, with the secret of the run.
    `one_host`: all are on one.
    """

    def __init__(self, path: str, *, one_host: bool) -> None:
        self._path, self._one_host = path, one_host
        self._made: list[str] = []  # what `close` removes
        self.name, self.secret = f"the address in {path}", b""

    def open(self) -> socket.socket:
        listener = listen("127.0.0.1" if self._one_host else _address_here())
        folder = os.path.dirname(self._path)
        if not os.path.isdir(folder):
            os.makedirs(folder, exist_ok=True)
            self._made.append(folder)
        secret = secrets.token_hex(32)
        write_private(self._path, json.dumps([*listener.getsockname()[:2], secret]), replace=True)
        self.secret = secret.encode()
        self._made.append(self._path)
        return listener

    def find(self) -> tuple[str, int] | None:
        try:
            content = read_private(self._path)
            if content is None:
                return None
            address, port, secret = json.loads(content)
            self.secret = str(secret).encode()
            return str(address), int(port)
        except (ValueError, TypeError, RecursionError):
            return None
        except OSError as error:
            raise RendezvousError(f"{self.name} cannot be used: {error.strerror}") from error

    def close(self) -> None:
        """Removes the file, and its folder if it was made for it and nothing else is there."""
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                os.rmdir(path) if os.path.isdir(path) else os.remove(path)


def _address_here() -> str:
    """Returns the address of this host by which other hosts know it. Raises RendezvousError."""
    name = socket.gethostname()
    with contextlib.suppress(RendezvousError):
        return address_of(name)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp_socket, contextlib.suppress(OSError):
        udp_socket.connect(_ELSEWHERE)  # sends nothing
        local_address: str = udp_socket.getsockname()[0]
        return local_address
    raise RendezvousError(f"the address of {name}, where rank 0 is, is not known there: give it by --rendezvous HOST")


def address_of(name: str) -> str:
    try:
        candidates = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter for a part of a name that is empty or too long
        reason = error.strerror if isinstance(error, OSError) else "no host can have such a name"
        raise RendezvousError(
            f"the name of the rendezvous, `{name}`, does not resolve on {socket.gethostname()} ({reason}): "
            "give the first host's name or address as this host knows it"
        ) from error
    address: str = sorted(candidates, key=lambda candidate: candidate[0] != socket.AF_INET)[0][4][0]  # type: ignore[assignment]
    _reachable(address, name)
    return address


def address_toward(name: str) -> str:
    """Returns the address of this host on the way to another host, or to itself. Raises RendezvousError."""
    remote_address = address_of(name)
    family = socket.AF_INET6 if ":" in remote_address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as udp_socket:
        try:
            udp_socket.connect((remote_address, 9))  # sends nothing
        except OSError as error:
            raise RendezvousError(f"no way leads from {socket.gethostname()} to {name}: {error.strerror}") from error
        local_address: str = udp_socket.getsockname()[0]
    return local_address


def _reachable(address: str, name: str) -> None:
    if address.startswith("127.") and name not in LOCAL and not name.startswith("127."):
        raise RendezvousError(
            f"`{name}` is {address} on {socket.gethostname()}, which no other host can reach (see /etc/hosts): give "
            "its address on the network in place of the name"
        )
