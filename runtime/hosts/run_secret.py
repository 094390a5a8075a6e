"""The secret of a run, by which its launchers know each other: a token that they are given, or a private file.

Contract: a secret stands in no command line, no job and no message. Its file has mode 0600, belongs to the user of the
run, and is no link.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from dslc.compiler.facts.untrusted_files import read_private, write_private
from dslc.runtime.hosts.rendezvous_address import RendezvousError

TOKEN = "DSLC_RUN_TOKEN"  # the variable of the environment
SECRET_FILE = ".dslc-secret"
_SHORTEST = 16  # characters of a token


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
        if self.token or not self.path:
            return self.token
        self.prepare()
        write_private(self.path, secrets.token_hex(32), replace=False)
        secret = self.load()
        if secret is None:
            raise RendezvousError(f"{self.path}, the secret of this run, was removed")
        return secret

    def load(self) -> bytes | None:
        """Returns the secret; None if its file is not seen here. Raises RendezvousError if other users can read it."""
        if self.token or not self.path:
            return self.token
        with contextlib.suppress(OSError):
            os.listdir(os.path.dirname(self.path))  # NFS then looks for files that others have made
        try:
            content = read_private(self.path)
        except OSError as error:
            raise RendezvousError(
                f"{self.path}, the secret of this run, cannot be used: {error.strerror}\n"
                f"help: remove it, and it is made again; on a file system without modes, set {TOKEN} on all hosts"
            ) from error
        return content


def token_in(text: str) -> bytes:
    if 0 < len(text) < _SHORTEST:
        raise RendezvousError(
            f"{TOKEN} has {len(text)} characters, which can be guessed: {_SHORTEST} are the least\n"
            f"help: `export {TOKEN}=$(openssl rand -hex 32)`, the same on all hosts"
        )
    return text.encode(errors="surrogateescape")
