"""Proves to both ends of a connection that the other end knows the secret of the run, and protects each message.

Model: each end sends a greeting, a fresh challenge of 32 bytes; the end that connects sends first. Both derive one key
for each direction from the secret, both challenges and the roles of the ends. Each frame carries an HMAC (SHA-256) over
its number and its content. The first frame is empty and is the proof: an end sends nothing else, and parses nothing,
before it has verified the proof.

Contract: a recorded frame verifies in no other connection, at no other place in its connection, and not in the other
direction. Nobody learns the secret, or a digest of it alone, from a frame. An empty secret gives the same protocol and
proves nothing.

Limits: messages are not encrypted, and a program that forwards all of them between two launchers can cut them off. A
token of few characters can be found out by trying, from one recorded greeting and proof.
"""

from __future__ import annotations

import hmac
import secrets
import struct

NO_SECRET = "it does not know the secret of this run"
MOST = 1 << 20  # bytes of a message
_MAGIC = b"dslc hosts 1\n"
_CHALLENGE = 32
_DIGEST = 32
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
GREETING = len(_MAGIC) + _CHALLENGE  # bytes
HEADER = _LENGTH.size + _DIGEST  # bytes of a frame before its content


class AuthenticationError(Exception):
    """The other end of a connection is not a launcher of this run; the text says why."""


class Session:
    """One end of an authenticated connection: the end that `accepts` it, or the end that connects."""

    def __init__(self, secret: bytes, *, accepts: bool) -> None:
        self._secret, self._accepts = secret, accepts
        self._challenge = secrets.token_bytes(_CHALLENGE)
        self._keys: tuple[bytes, bytes] | None = None  # to send with, and to receive with
        self._sent = self._received = 0
        self.greeting = b"" if accepts else _MAGIC + self._challenge  # what is sent unasked

    @property
    def is_greeted(self) -> bool:
        return self._keys is not None

    @property
    def is_authenticated(self) -> bool:
        return self._received > 0

    def receive_greeting(self, content: bytes) -> bytes:
        """Returns what to send after the greeting of the other end: the proof, and before it a greeting, if this end
        has sent none. Raises AuthenticationError.
        """
        check_greeting(content)
        challenges = [self._challenge, content[len(_MAGIC) :]]
        if self._accepts:
            challenges.reverse()
        key = hmac.digest(self._secret, _MAGIC + b"".join(challenges), "sha256")
        directions = hmac.digest(key, b"connects", "sha256"), hmac.digest(key, b"accepts", "sha256")
        self._keys = (directions[1], directions[0]) if self._accepts else directions
        return (_MAGIC + self._challenge if self._accepts else b"") + self.seal(b"")

    def seal(self, content: bytes) -> bytes:
        assert self._keys is not None and len(content) <= MOST
        digest = _digest(self._keys[0], self._sent, content)
        self._sent += 1
        return _LENGTH.pack(len(content)) + digest + content

    def open(self, buffer: bytes | bytearray) -> bytes | None:
        """Returns the content of the frame at the beginning of these bytes; None if it has not arrived whole. Raises
        AuthenticationError.
        """
        if len(buffer) < HEADER:
            return None
        (length,) = _LENGTH.unpack_from(buffer)
        if length > (MOST if self.is_authenticated else 0):
            raise AuthenticationError(f"it announces a message of {length:,} bytes")
        if len(buffer) < HEADER + length:
            return None
        assert self._keys is not None
        content = bytes(buffer[HEADER : HEADER + length])
        if not hmac.compare_digest(
            bytes(buffer[_LENGTH.size : HEADER]), _digest(self._keys[1], self._received, content)
        ):
            raise AuthenticationError("a message of it was changed on its way" if self.is_authenticated else NO_SECRET)
        self._received += 1
        return content


def check_greeting(content: bytes) -> None:
    """Raises AuthenticationError if bytes do not begin as the greeting of a launcher does."""
    if content[: len(_MAGIC)] != _MAGIC[: len(content)]:
        raise AuthenticationError("it does not speak as dslc does")


def _digest(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + content, "sha256")
