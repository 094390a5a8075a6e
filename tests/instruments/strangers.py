"""Strangers and forged launchers, drawn at random: what they send to a launcher of several hosts."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from typing import Any

from dslc.runtime.hosts.authentication import Session
from dslc.runtime.hosts.messages import KINDS

DEEP = b"[" * 400_000
_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 1 << 70, 0.5, float("nan"), "", "x", "\n", "x" * 131_072, [], {}, [[]], [None]),
    *({"a": 1}, ["host"], ["127.0.0.1", 9], ["127.0.0.1", -9], {"rank": "x"}, {"kind": "error"}),
)


def hostile_bytes(draw: random.Random) -> bytes:
    """Returns what a stranger sends, who knows the protocol and not the secret."""
    greeting = Session(b"", accepts=False).greeting
    join_request = json.dumps({"kind": "join_request", "host": "x", "facts": {}, "fault": "none"}).encode()
    kinds = (
        b"",
        draw.randbytes(draw.randrange(1, 200)),
        b"GET / HTTP/1.0\r\n\r\n",
        struct.pack("!I", len(DEEP)) + DEEP,
        struct.pack("!I", len(join_request)) + join_request,
        struct.pack("!I", 0xFFFFFFFF),
        greeting[: draw.randrange(1, len(greeting))],
        greeting,
        greeting + draw.randbytes(36),
        greeting + struct.pack("!I", 0) + draw.randbytes(32) + join_request,
        greeting + struct.pack("!I", len(DEEP)) + draw.randbytes(32) + DEEP,
        greeting + greeting,
    )
    return draw.choice(kinds)


def stranger(draw: random.Random, port: int) -> socket.socket:
    """Returns a connection of a stranger, who does not read what is answered, and may have left already."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    with contextlib.suppress(OSError):  # it may be put out before it has said all
        connection.sendall(hostile_bytes(draw))
    if draw.random() < 0.3:
        connection.close()
    return connection


def malformed_message(draw: random.Random) -> dict[str, Any]:
    """Returns a message of a forged member: of a known kind, with fields that may be missing or wrong."""
    kind = draw.choice(sorted(KINDS))
    message: dict[str, Any] = {"kind": kind}
    for name in KINDS[kind]:
        if draw.random() < 0.8:
            message[name.rstrip("?")] = draw.choice(_VALUES)
    if draw.random() < 0.1:
        message[draw.choice(("kind", "more"))] = draw.choice(_VALUES)
    return message
