"""How the ranks of one node find each other: a store that no other user of the machine can reach.

Model: a rank tells its peers where it listens, and reads where they do, in a store. Torch's own rendezvous keeps it
behind a TCP port that it opens on every interface, asks nobody for a password, and unpickles what it finds there. Here
it is a file without a name, in memory, that the launcher makes before it forks and that the ranks inherit (Linux; a
file in a folder that only this user can enter elsewhere). Torch's agent, which counts the nodes by a rendezvous of its
own, gets one that knows of this node alone, in its own memory.

Contract: nothing listens for the store, and nothing that comes out of it is unpickled. It is gone when the launcher and
the ranks are, however they end.

Limits: one node. What ranks send each other goes over gloo's sockets on the loopback interface, and over NCCL's.
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
    """A path by which this process and those that it forks open one empty file, and other users cannot."""
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
    """The store that the ranks share, by the path that `shared_file` gave."""
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
        # Ranks do not look for a store at an address; agents have to be told one.
        return RendezvousInfo(
            HashStore(), rank=0, world_size=1, bootstrap_store_info=RendezvousStoreInfo("localhost", 0)
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Does nothing: no other node could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._id

    def shutdown(self) -> bool:
        return True
