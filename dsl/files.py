"""Reads untrusted files: only regular ones, and never more of one than the bound. Writes files that the user names.

A device, a pipe or a folder is refused before a byte is read, so that none keeps its reader waiting; a file whose
stated size is too small (`/proc`) is read to the bound and no further.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO


class TooLarge(OSError):
    """The file has more bytes than the reader's bound."""


def read_bytes(path: str, most: int, *, piped: bool = False) -> bytes:
    """Returns the bytes of a regular file; with `piped`, also of `/dev/stdin` or `/dev/fd/63` given to the command.

    Raises OSError if it cannot be read, TooLarge if it has more than `most` bytes.
    """
    with open_file(path, piped=piped) as file:
        found: bytes | None = file.read(most + 1)
    if found is None:  # a file that would keep its reader waiting
        raise OSError(errno.EAGAIN, "reading it would wait for another process", path)
    if len(found) > most:
        raise TooLarge(errno.EFBIG, f"it has more than {most:,} bytes", path)
    return found


def open_file(path: str, *, piped: bool = False) -> BinaryIO:
    """Opens a regular file for reading. Raises OSError."""
    handed = piped and path.startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/"))
    # Opening a pipe without a writer would wait for one.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if handed else os.O_NONBLOCK))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or (handed and stat.S_ISFIFO(mode)):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "it is a device or a pipe, not a file", path)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Adds the file's name to an OSError: on a full disk the system gives none for a file that is open."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


@contextlib.contextmanager
def reveal_os_error() -> Iterator[None]:
    """Raises the OSError of a `torch.save` into an open file, as of a full disk. After a failed write torch still ends
    its archive, and raises "unexpected pos 704 vs 598" in place of the reason.
    """
    try:
        yield
    except RuntimeError as error:
        reason = error.__context__
        while reason is not None and not isinstance(reason, OSError):
            reason = reason.__context__
        if reason is None:
            raise
        raise reason from None


def write_file(path: str, content: str | bytes) -> None:
    """Writes a file that the user names, which may be a device or a pipe. Raises OSError, with the file's name."""
    with naming(path), open(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def overwrite(path: str, text: str) -> None:
    """Writes beside the file and renames, so that a crash never leaves half of it. Follows a link to its target, and
    keeps mode, owner and group. Raises OSError, with the file's name.
    """
    target = os.path.realpath(path)
    before = os.stat(target)
    beside = f"{target}.{os.getpid()}.tmp"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with naming(path), os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        after = os.stat(beside)
        if (before.st_uid, before.st_gid) != (after.st_uid, after.st_gid):
            os.chown(beside, before.st_uid, before.st_gid)
        os.chmod(beside, stat.S_IMODE(before.st_mode))
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise
