"""The standard streams of a process, which may be closed, full, or of an encoding that lacks letters."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO

from dslc.runtime.process.records import naming

NAMES = {"stdout": "standard output", "stderr": "standard error"}


class _Stream(io.FileIO):
    """Says which it is where it cannot be written to."""

    def __init__(self, descriptor: int, called: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._called = called

    def write(self, content: Any, /) -> int:  # of what type has no name before Python 3.12
        with naming(self._called):
            return super().write(content)


def prepare() -> None:
    """Lets the standard streams take whatever is written: a closed one leads nowhere, a letter that cannot be encoded
    is a question mark. The OSError of one that cannot be written to has its name of `NAMES` for a file name."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free; or it would be that of some file of ours
    for descriptor, (name, called) in enumerate(NAMES.items(), 1):
        own = getattr(sys, name)
        if own is None or (type(own) is io.TextIOWrapper and own is getattr(sys, f"__{name}__")):
            setattr(sys, name, _over(own, descriptor, called))


def _over(own: io.TextIOWrapper | None, descriptor: int, called: str) -> TextIO:
    raw = io.BufferedWriter(_Stream(descriptor, called))
    if own is None:
        return io.TextIOWrapper(raw, "utf-8", "replace")
    return io.TextIOWrapper(
        raw,
        own.encoding,
        "replace",
        line_buffering=own.line_buffering or descriptor == 2,  # what Python does to it without saying so
        write_through=own.write_through,
    )


def readable(name: str) -> str:
    """A name as it may be shown: what would steer the terminal is written as Python writes it."""
    return name if name.isprintable() else repr(name)[1:-1]


def drop(stream: TextIO) -> None:
    """Sends what a stream could not take, and all that follows, nowhere. Nothing where it is no file."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
