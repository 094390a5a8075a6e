"""The secret of a run, by which its launchers know each other: a token that they are given, or a private file.

Contract: a secret stands in no command line, no job and no message. Its file has mode 0600, belongs to the user of the
run, and is no link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field

TOKEN = "DSLC_RUN_TOKEN"  # the variable of the environment
SECRET_FILE = ".dslc-secret"
_SHORTEST = 16  # characters of a token
_READ = 4096  # bytes of a private file, at most


class SecretError(Exception):
    """A secret that cannot be used; the text says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class RunSecret:
    """The source of a run's secret: a `token`, or a file at `path` in a folder that all hosts share, which `prepare`
    makes on the host that creates the file. With neither the secret is empty.
    """

    token: bytes = field(default=b"", repr=False)
    path: str = ""
    prepare: Callable[[], object] = lambda: None

    @property
    def is_empty(self) -> bool:
        return not self.token and not self.path

    def create(self) -> bytes:
        """Returns the secret, on the host where the others come to. Raises SecretError, and OSError."""
        if self.token or not self.path:
            return self.token
        self.prepare()
        write_private(self.path, secrets.token_hex(32), replace=False)
        secret = self.load()
        if secret is None:
            raise SecretError(f"{self.path}, the secret of this run, was removed")
        return secret

    def load(self) -> bytes | None:
        """Returns the secret; None if its file is not seen here. Raises SecretError if other users can read it."""
        if self.token or not self.path:
            return self.token
        with contextlib.suppress(OSError):
            os.listdir(os.path.dirname(self.path))  # NFS then looks for files that others have made
        try:
            content = read_private(self.path)
        except OSError as error:
            raise SecretError(
                f"{self.path}, the secret of this run, cannot be used: {error.strerror}\n"
                f"help: remove it, and it is made again; on a file system without modes, set {TOKEN} on all hosts"
            ) from error
        return content


def token_in(text: str) -> bytes:
    """Returns the secret that a user gives by the environment. Raises SecretError."""
    if 0 < len(text) < _SHORTEST:
        raise SecretError(
            f"{TOKEN} has {len(text)} characters, which can be guessed: {_SHORTEST} are the least\n"
            f"help: `export {TOKEN}=$(openssl rand -hex 32)`, the same on all hosts"
        )
    return text.encode(errors="surrogateescape")


def write_private(path: str, text: str, *, replace: bool) -> None:
    """Writes a file that this user alone can read and write, at once. One that is there stays, or is replaced. Raises
    OSError.
    """
    new = f"{path}.{secrets.token_hex(4)}"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
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
        content = file.read(_READ)
    if len(content) < _SHORTEST:
        raise PermissionError(errno.EINVAL, "it is cut short", path)
    return content
