"""The user's cache, `$XDG_CACHE_HOME/dslc` or `~/.cache/dslc`: the grammar as Lark compiled it, and what networks were
found to be (`probe/trace_cache.py`).

Lark saves a grammar as a pickle, and anyone who can write a pickle can run code as its reader. So the folder is made
for the user alone (0700), and is not used if anyone else could write to it, or replace it. A file is written whole or
not at all, and begins with a checksum. Nothing fails because of the cache: if it cannot be used, all is made each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import zlib
from collections.abc import Iterator

CHECKSUM = 4  # bytes at the beginning of a file


def path_of(made_from: str) -> str | None:
    """Returns the path of the grammar compiled from this text; None if no folder can be trusted."""
    place = folder()
    digest = hashlib.sha256(made_from.encode()).hexdigest()[:16]
    return os.path.join(place, f"plt-{digest}.lark") if place else None


def read_checked(path: str) -> bytes | None:
    """Returns the cached data; None if there is none, or it is damaged."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    return data[CHECKSUM:] if data[:CHECKSUM] == _checksum(data[CHECKSUM:]) else None


def write(path: str, data: bytes) -> None:
    """Writes the data after their checksum, as `replace` does."""
    replace(path, _checksum(data) + data)


def replace(path: str, data: bytes) -> None:
    """Writes a file, if the folder allows it: another process sees the old file or the new one, never half."""
    part = f"{path}.{os.getpid()}"
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return
    with contextlib.suppress(OSError):
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(CHECKSUM, "little")


def folder() -> str | None:
    """Returns the user's own folder, and makes it if it is missing; None if it cannot be trusted."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # as in the XDG base directory specification
        home = os.path.join(os.path.expanduser("~"), ".cache")
    place = os.path.join(home, "dslc")
    if not os.path.isabs(place):
        return None
    try:
        os.makedirs(home, mode=0o700, exist_ok=True)
        if not os.path.lexists(place):
            os.mkdir(place, 0o700)
        return place if _is_private(place) else None
    except OSError:
        return None


def _is_private(folder: str) -> bool:
    """True if nobody else (but root) can write to the folder, or rename it or a folder above it."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        return False
    if not hasattr(os, "getuid"):
        return True  # on Windows a user's folder is private
    user = os.getuid()
    if status.st_uid != user or status.st_mode & 0o022:
        return False
    return all(_keeps_names(above, user) for path in (folder, os.path.realpath(folder)) for above in _above(path))


def _keeps_names(folder: str, user: int) -> bool:
    """True if only the user and root can rename the user's entries in the folder, as in a sticky one (/tmp)."""
    status = os.stat(folder)
    return status.st_uid in (0, user) and (not status.st_mode & 0o022 or bool(status.st_mode & stat.S_ISVTX))


def _above(path: str) -> Iterator[str]:
    while (above := os.path.dirname(path)) != path:
        yield above
        path = above
