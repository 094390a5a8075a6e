"""The connections that come to a socket that listens, until the launcher behind each has said who it is.

Contract: an unknown client costs only a socket, for `HELLO` seconds at most. There are at most `PENDING`: a connection
that has sent nothing for `GRACE` seconds is dropped for the next one, which the system keeps meanwhile. Nothing waits
for them, and of hosts that come all at once none is dropped.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from dslc.runtime.hosts.connection import Connection, readable
from dslc.runtime.hosts.messages import Message

HELLO = 10.0  # seconds that a connection has to say who it is
GRACE = 0.5  # the same, if others wait
PENDING = 32  # connections that have not said who they are


class JoinRequests:
    """Those who come to the socket; `secret` is the run's. `refusal` says who was turned away last, and why."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self.listening, self._secret = listener, secret
        self._pending: dict[Connection, float] = {}  # since when, the oldest first
        self.refusal = ""
        listener.setblocking(False)

    @property
    def handles(self) -> list[int]:
        listener_handles = [] if self._is_full() else [self.listening.fileno()]
        return [*listener_handles, *(connection.fileno() for connection in self._pending)]

    def poll(self, kinds: Sequence[str] = ("join_request",)) -> list[tuple[Connection, list[Message]]]:
        """Returns the connections that have begun with a message of these kinds, with all that they have said; drops
        those that say anything else, or nothing for too long.
        """
        self._accept()
        now, answered = time.monotonic(), []
        for connection, since in list(self._pending.items()):
            messages = connection.receive()
            if messages and messages[0]["kind"] in kinds:
                del self._pending[connection]
                answered.append((connection, messages))
            elif messages or connection.closed or now - since > HELLO:
                self._drop(connection)
        return answered

    def _accept(self) -> None:
        for _ in range(PENDING):  # one after another, as fast as they come, would keep the launcher here
            if not readable([self.listening], 0):
                return
            if self._is_full():
                return
            if len(self._pending) >= PENDING:
                self._drop(next(iter(self._pending)))
            try:
                connection = self.listening.accept()[0]
            except OSError:  # it is gone already, or no file can be opened any more
                if self._pending:
                    self._drop(next(iter(self._pending)))
                return
            with contextlib.suppress(OSError):  # it is gone already
                self._pending[Connection(connection, self._secret, accepts=True)] = time.monotonic()

    def _is_full(self) -> bool:
        """True if nobody can be let in now: all who are pending have just come."""
        oldest = next(iter(self._pending.values()), 0.0)
        return len(self._pending) >= PENDING and time.monotonic() - oldest < GRACE

    def _drop(self, connection: Connection) -> None:
        if connection.strange:
            self.refusal = f"{connection.remote_address or 'somebody'} was turned away: {connection.why}"
        del self._pending[connection]
        connection.close()

    def close(self) -> None:
        """Closes the connections; the socket that listens is its owner's."""
        for connection in list(self._pending):
            self._drop(connection)
