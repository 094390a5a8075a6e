"""Lets the ranks of one node find each other, through a store that no other user of the machine can reach.

Model: a rank writes its addresses to a store and reads those of its peers. Torch's own rendezvous serves the store at a
TCP port on every interface, without a password, and unpickles its contents. Here it is a file without a name, in
memory, that the launcher makes before it forks and that the ranks inherit (on Linux; elsewhere a file in a folder that
only this user can enter). Torch's agent counts the nodes by a rendezvous of its own; it gets one that knows this node
alone, in its own memory.

Contract: nothing listens for the store, and nothing in it is unpickled. It disappears with the launcher and the ranks,
however they end.

Limits: one node. The ranks' data goes over gloo's sockets on the loopback interface, and over NCCL's.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator

from torch.distributed import FileStore, HashStore, Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo


@contextlib.contextmanager
def shared_file() -> Iterator[str]:
    """Yields a path at which this process and those that it forks open one empty file, and other users cannot."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("dslc-store")
        try:
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="dslc-") as folder:
            yield os.path.join(folder, "store")


def store_at(path: str) -> Store:
    """Returns the store that the ranks share, at the path from `shared_file`."""
    return FileStore(path, -1)  # -1: the last rank that leaves does not remove it


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
