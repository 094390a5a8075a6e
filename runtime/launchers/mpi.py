"""mpirun of Open MPI and of MPICH: their variables, and the file in which rank 0 leaves its address.

Model: neither launcher says where rank 0 is. Its process listens at an address of its own host and writes it to a file
beside the run directory, which all hosts see; the file of an earlier run is replaced, and an address that does not
answer is looked up again. Nothing here needs MPI itself.

When a process ends with an error, mpirun ends all other processes: Open MPI within two seconds, MPICH at once. Of ranks
that fail, which are forked from these processes, it hears nothing.

MPICH names no run. Its proxy, which has started this process, was told by its command line where mpirun listens, which
no two runs have alike. Where that cannot be read, two runs of one job that begin in one folder at once could meet.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace

from dslc.runtime.hosts.rendezvous_address import FileEndpoint
from dslc.runtime.launchers.world import Launcher, World, read_world

_OPEN_MPI = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_HYDRA = {"rank": "PMI_RANK", "size": "PMI_SIZE", "local_rank": "MPI_LOCALRANKID", "local_size": "MPI_LOCALNRANKS"}


def _read_place(environ: Mapping[str, str]) -> World | None:
    for names in (_OPEN_MPI, _HYDRA):
        if names["rank"] in environ or names["size"] in environ:
            return replace(read_world(environ, "mpi", "mpirun", names), again=True)
    return None


def _join(world: World, environ: Mapping[str, str], beside: str) -> FileEndpoint:
    one_host = world.local_size == world.size
    run = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    if run is None:
        run = f"mpich-{_control_port() or (os.getppid() if one_host else '')}"
    return FileEndpoint(f"{beside}-{run.replace(os.sep, '_')}", one_host=one_host)


def _control_port() -> str:
    """Returns where the mpirun of MPICH listens for its proxies, HOST:PORT; "" if that is not to be found out."""
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/cmdline", encoding="utf-8") as file:
        words = file.read().split("\0")
        if "--control-port" in words[:-1]:
            return words[words.index("--control-port") + 1]
    return ""


LAUNCHER = Launcher(
    word="mpi",
    sign="OMPI_COMM_WORLD_SIZE or PMI_SIZE",
    start="mpirun -np {ranks}",
    read=_read_place,
    join=_join,
    ends_others=True,
)
