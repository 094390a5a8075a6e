"""Lets the ranks find each other: on one node through a store that no other user of the machine can reach.

Model: a rank writes its addresses to a store and reads its peers' addresses. Torch's own rendezvous serves the store at
a TCP port on every interface, without a password, and unpickles its contents. Here it is a file without a name, in
memory, that the launcher makes before it forks and that the ranks inherit (on Linux; elsewhere a file in a folder that
only this user can enter). On several nodes rank 0 serves torch's store; its launcher has opened the socket on the
interface to the other nodes alone (hosts/launcher_group.py).

Contract: on one node nothing listens for the store. Nothing in a store is unpickled. It disappears with the launcher
and the ranks, however they end.

Limits: the ranks' data goes over gloo's sockets, or NCCL's, without a password: on one node on the loopback interface.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed import FileStore, HashStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo


@dataclass(frozen=True, kw_only=True)
class RankStore:
    """The place where ranks find their store: a file that they have inherited, or a port on the first node, where rank
    0 has inherited a socket that listens. `interface` leads to the other nodes.
    """

    path: str = ""
    address: str = ""
    port: int = 0
    listening: int | None = None
    interface: str = "lo"

    def open(self, rank: int, timeout: float) -> Store:
        if self.path:
            return FileStore(self.path, -1)  # -1: the last rank that leaves does not remove it
        return TCPStore(
            self.address,
            self.port,
            is_master=rank == 0,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout),
            master_listen_fd=self.listening if rank == 0 else None,
        )


@contextlib.contextmanager
def shared_file() -> Iterator[RankStore]:
    """Yields a store that this process and those that it forks can open, and other users cannot."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("dslc-store")
        try:
            yield RankStore(path=f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="dslc-") as folder:
            yield RankStore(path=os.path.join(folder, "store"))


class OneNode(RendezvousHandler):
    """A rendezvous of one node with itself."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex

    def get_backend(self) -> str:
        return "dslc-one-node"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        # Ranks do not use this address to find the store, but agents must be given one.
        return RendezvousInfo(
            HashStore(), rank=0, world_size=1, bootstrap_store_info=RendezvousStoreInfo("localhost", 0)
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """A no-op: no other node could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._id

    def shutdown(self) -> bool:
        return True
