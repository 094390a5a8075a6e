"""Prepares the standard streams of a process, which may be closed, full, or in an encoding that lacks letters."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO

from dslc.compiler.facts.untrusted_files import naming

NAMES = {"stdout": "standard output", "stderr": "standard error"}


class _TerminalStream(io.FileIO):
    """A standard stream whose write errors name it."""

    def __init__(self, descriptor: int, called: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._called = called

    def write(self, content: Any, /) -> int:  # `content` is a buffer, a type without a name before Python 3.12
        with naming(self._called):
            return super().write(content)


def prepare() -> None:
    """Makes the standard streams accept all output: a closed one discards it, and a letter that cannot be encoded
    becomes a question mark. If a stream cannot be written to, the OSError has its name (of `NAMES`) as the file name.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, else one of our files would
    for descriptor, (name, called) in enumerate(NAMES.items(), 1):
        own = getattr(sys, name)
        if own is None or (type(own) is io.TextIOWrapper and own is getattr(sys, f"__{name}__")):
            setattr(sys, name, _open_text(own, descriptor, called))


def _open_text(own: io.TextIOWrapper | None, descriptor: int, called: str) -> TextIO:
    raw = io.BufferedWriter(_TerminalStream(descriptor, called))
    if own is None:
        return io.TextIOWrapper(raw, "utf-8", "replace")
    return io.TextIOWrapper(
        raw,
        own.encoding,
        "replace",
        line_buffering=own.line_buffering or descriptor == 2,  # Python's own default, set silently
        write_through=own.write_through,
    )


def readable(name: str) -> str:
    """Returns a name that is safe to print: control characters are escaped as Python does."""
    return name if name.isprintable() else repr(name)[1:-1]


def drop(stream: TextIO) -> None:
    """Discards a stream's buffer and all later output. A no-op for a stream without a file."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
