"""Reads and writes files in folders that other users can write to: run directories, checkpoints, data.

Model: a forged file is a device, a pipe, a link, or text without end. Reading takes regular files alone, a bounded
number of bytes, and JSON whose whole numbers fit 64 bits. Writing follows no link: it replaces the link itself, and
appends to regular files only.

Contract: every fault is an OSError or a ValueError, which callers report or pass over. No call waits for a writer or a
reader.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO, TextIO

from dslc.dsl.files import TooLarge, naming, open_file, read_bytes, reveal_os_error

__all__ = [
    "TooLarge",
    "atomic_write",
    "create_file",
    "naming",
    "open_file",
    "open_to_append",
    "parse_json",
    "read_bytes",
    "read_json",
    "read_lines",
    "read_private",
    "read_text",
    "recreate_file",
    "replacing",
    "reveal_os_error",
    "write_private",
]

LINE_LIMIT = 1 << 20  # bytes of a line of metrics.jsonl
_INTEGER_LIMIT = 1 << 63
_PRIVATE_LEAST, _PRIVATE_LIMIT = 16, 4096  # bytes of a private file


def read_text(path: str, limit: int) -> str:
    """Returns the text of a regular file. Raises OSError, TooLarge above `limit` bytes, ValueError if not UTF-8."""
    return read_bytes(path, limit).decode()


def read_json(path: str, limit: int) -> Any:
    """Returns the data in a file of JSON. Raises OSError, and ValueError if it cannot be read."""
    return parse_json(read_text(path, limit))


def parse_json(text: str) -> Any:
    """Returns the data in a text of JSON. Raises ValueError, also for deep nesting and for numbers beyond 64 bits."""
    try:
        return json.loads(text, parse_int=_bounded_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _bounded_integer(digits: str) -> int:
    if len(digits) > 20 or abs(number := int(digits)) > _INTEGER_LIMIT:
        raise ValueError(f"a number of {len(digits)} digits")
    return number


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the complete lines of a file. Raises ValueError at a line of more than `LINE_LIMIT` bytes."""
    while line := file.readline(LINE_LIMIT + 1):
        if len(line) > LINE_LIMIT:
            raise ValueError(f"a line has more than {LINE_LIMIT:,} bytes")
        if line.endswith(b"\n"):
            yield line


def create_file(path: str) -> int:
    """Creates a file and returns its descriptor. Raises FileExistsError if anything has that name, also a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def recreate_file(path: str) -> int:
    """Creates a file in place of what has that name, and returns its descriptor. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return create_file(path)


def open_to_append(path: str, *, truncate: bool = False) -> int:
    """Opens a regular file, which is created if it is not there, and returns its descriptor. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    special = OSError(errno.EINVAL, "it is a device, a pipe or a link, not a file", path)
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        raise special if error.errno in (errno.ENXIO, errno.ELOOP) else error from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise special
    if truncate:
        os.ftruncate(descriptor, 0)
    return descriptor


@contextlib.contextmanager
def atomic_write(path: str) -> Iterator[str]:
    """Yields the path of a file beside `path`, which takes its place when the context ends, or is removed if that
    fails. Another process sees the old file or the new one. Raises OSError, with the file's name.
    """
    part = f"{path}.part"
    try:
        with naming(path):
            yield part
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise


@contextlib.contextmanager
def replacing(path: str, *, newline: str | None = None) -> Iterator[TextIO]:
    """Opens a new file that takes the place of `path` when the context ends. Raises OSError."""
    with atomic_write(path) as part, open(recreate_file(part), "w", encoding="utf-8", newline=newline) as file:
        yield file


def write_private(path: str, text: str, *, replace: bool) -> None:
    """Writes a file that this user alone can read and write, at once. One that is there stays, or is replaced. Raises
    OSError.
    """
    new = f"{path}.{os.urandom(4).hex()}"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with naming(path), os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        if replace:
            os.replace(new, path)
            return
        try:
            os.link(new, path)
        except FileExistsError:
            return
        except OSError:  # the file system has no links
            if not os.path.lexists(path):
                os.replace(new, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(new)


def read_private(path: str) -> bytes | None:
    """Returns the content of a file that this user alone can read and write; None if it is not there. Raises OSError,
    and PermissionError if other users could have written it, or it is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it is not a file that this user alone can read and write", path)
        content = file.read(_PRIVATE_LIMIT)
    if len(content) < _PRIVATE_LEAST:
        raise PermissionError(errno.EINVAL, "it is cut short", path)
    return content
