"""Where launchers meet that know their places: the first opens a door, and the others look for it.

A door is a socket at one address. How the others learn the address depends on who has started them
(runtime/launchers); `FixedDoor` is at an address that all are given.
"""

from __future__ import annotations

import socket
from typing import Protocol

from dslc.runtime.hosts.wire import listen

LOCAL = ("localhost", "127.0.0.1", "::1")


class NotMet(Exception):
    """The hosts did not come together; the text says why, and what to do."""


class Door(Protocol):
    """`name` says in messages where it is."""

    name: str

    def open(self) -> socket.socket:
        """Returns the socket at which the first launcher listens. Raises NotMet and OSError."""

    def find(self) -> tuple[str, int] | None:
        """Returns the address of that socket, for the others; None if it is not known yet. Raises NotMet."""

    def close(self) -> None:
        """Removes what shows the door; called by all when they have met, or not."""


class FixedDoor:
    """A door at an address that all are given."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self.name = f"{host}:{port}"

    def open(self) -> socket.socket:
        """Listens at the address, which is one of this host. Raises NotMet and OSError."""
        return listen(address_of(self._host), self._port)

    def find(self) -> tuple[str, int]:
        """Returns the address. Raises NotMet."""
        return address_of(self._host), self._port

    def close(self) -> None:
        """A no-op."""


def address_of(name: str) -> str:
    """Returns the address of a host, as this host knows it. Raises NotMet."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NotMet(
            f"the name of the rendezvous, `{name}`, does not resolve on {socket.gethostname()} ({error.strerror}): "
            "give the first host's name or address as this host knows it"
        ) from error
    address: str = sorted(found, key=lambda each: each[0] != socket.AF_INET)[0][4][0]  # type: ignore[assignment]
    _reachable(address, name)
    return address


def address_toward(name: str) -> str:
    """Returns the address of this host on the way to another one, or to itself. Raises NotMet."""
    there = address_of(name)
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((there, 9))  # sends nothing
        except OSError as error:
            raise NotMet(f"no way leads from {socket.gethostname()} to {name}: {error.strerror}") from error
        here: str = asking.getsockname()[0]
    return here


def _reachable(address: str, name: str) -> None:
    if address.startswith("127.") and name not in LOCAL and not name.startswith("127."):
        raise NotMet(
            f"`{name}` is {address} on {socket.gethostname()}, which no other host can reach (see /etc/hosts): give "
            "its address on the network in place of the name"
        )
