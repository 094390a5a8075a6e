"""torchrun: its variables, and its store, in which rank 0 leaves the address where its peers find it.

Model: torchrun's agent serves a store at MASTER_ADDR:MASTER_PORT. Its values are bytes, which are parsed here, never
unpickled. Where no agent shares its store (`TORCHELASTIC_USE_AGENT_STORE=False`) the port is rank 0's, and the
processes meet at it.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dslc.runtime.hosts.connection import listen
from dslc.runtime.hosts.rendezvous_address import FixedEndpoint, RendezvousError, address_toward
from dslc.runtime.launchers.world import Launcher, World, read_world

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_NAMES = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "nodes": "GROUP_WORLD_SIZE",
    "attempt": "TORCHELASTIC_RESTART_COUNT",
}
_PATIENCE = datetime.timedelta(seconds=30)  # that torchrun's store, which is there already, has to answer


def _read_place(environ: Mapping[str, str]) -> World | None:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    world = read_world(environ, "torchrun", "torchrun", _NAMES, everywhere=True)
    run = environ["TORCHELASTIC_RUN_ID"]
    return replace(world, run=run if run != "none" else f"{socket.gethostname()} {os.getppid()}")


def _join(world: World, environ: Mapping[str, str], beside: str) -> FixedEndpoint | StoreEndpoint:
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise RendezvousError("MASTER_ADDR and MASTER_PORT, which torchrun sets, do not say where rank 0 is")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return FixedEndpoint(address, int(port))
    key = f"dslc/{environ['TORCHELASTIC_RUN_ID']}/{world.attempt}"
    return StoreEndpoint(address, int(port), key, one_host=world.nodes == 1)


class StoreEndpoint:
    """A port of rank 0's; the other ranks find its address in torchrun's store."""

    def __init__(self, address: str, port: int, key: str, *, one_host: bool) -> None:
        self._where, self._key, self._one_host = (address, port), key, one_host
        self._store: TCPStore | None = None
        self.secret = b""  # who can read the store can read it
        self.name = f"{address}:{port}, where torchrun keeps its store"

    def open(self) -> socket.socket:
        listening = listen("127.0.0.1" if self._one_host else address_toward(self._where[0]))
        secret = secrets.token_hex(32)
        self._opened().set(self._key, json.dumps([*listening.getsockname()[:2], secret]))
        self.secret = secret.encode()
        return listening

    def find(self) -> tuple[str, int] | None:
        store = self._opened()
        if not store.check([self._key]):
            return None
        try:
            address, port, secret = json.loads(store.get(self._key))
            self.secret = str(secret).encode()
            return str(address), int(port)
        except (ValueError, TypeError, RecursionError):
            raise RendezvousError(f"{self.name}, has another value of {self._key} than a launcher writes") from None

    def close(self) -> None:
        self._store = None

    def _opened(self) -> TCPStore:
        if self._store is None:
            from torch.distributed import DistError, TCPStore

            try:
                self._store = TCPStore(*self._where, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
            except (DistError, RuntimeError) as error:
                raise RendezvousError(f"{self.name}, does not answer: {error}") from None
        return self._store


LAUNCHER = Launcher(
    word="torchrun",
    sign="TORCHELASTIC_RUN_ID",
    start="torchrun --nnodes {nodes} --nproc-per-node {processes} -m",
    read=_read_place,
    join=_join,
    ends_others=True,
)
