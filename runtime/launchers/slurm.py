"""SLURM's srun: its variables, and the first host of a step as the place where its tasks meet.

Model: a task stands for a node, and forks the ranks of that node, or it is a rank. The port follows from the job and
the step, so that two of them on one host do not disturb each other.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace

from dslc.runtime.hosts.rendezvous_address import FixedEndpoint, RendezvousError, address_of
from dslc.runtime.launchers.world import Launcher, World, read_world

_SIGN = "SLURM_STEP_NUM_TASKS"  # not set in a batch script itself
SUBMITTED = "DSLC_SUBMITTED"  # which the script of `dslc submit` sets, to the run directory; it starts srun again
_NAMES = {
    "rank": "SLURM_PROCID",
    "size": _SIGN,
    "local_rank": "SLURM_LOCALID",
    "nodes": "SLURM_STEP_NUM_NODES",
    "attempt": "SLURM_RESTART_COUNT",
}
_PORTS = range(20_000, 30_000)  # below those that systems give out by themselves
_PATIENCE = 30.0  # seconds that `scontrol` may take


def _read_place(environ: Mapping[str, str]) -> World | None:
    if _SIGN not in environ:
        return None
    world = read_world(environ, "slurm", "srun", _NAMES)
    run = f"slurm {environ.get('SLURM_JOB_ID', '')}"
    again, host = SUBMITTED not in environ, environ.get("SLURMD_NODENAME", "")
    return replace(world, of_nodes=True, run=run, again=again, host=host)


def _join(world: World, environ: Mapping[str, str], beside: str) -> FixedEndpoint:
    job, step = (int(re.sub(r"\D", "", environ.get(f"SLURM_{name}_ID", "")) or 0) for name in ("JOB", "STEP"))
    port = _PORTS[(31 * job + step) % len(_PORTS)]
    if world.nodes == 1:
        return FixedEndpoint("127.0.0.1", port)
    first = first_host(environ.get("SLURM_STEP_NODELIST", ""))
    try:
        address_of(first)
    except RendezvousError:
        first = _address_in_slurm(first) or first
    return FixedEndpoint(first, port)


def first_host(nodes: str) -> str:
    """Returns the first host of a list as SLURM writes it: `n7` of `n[7-9,12],m1`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


def _address_in_slurm(node: str) -> str:
    """Returns the address that SLURM's configuration has for a node; "" if that is not to be found out."""
    try:
        command = ["scontrol", "show", "node", node, "--oneliner"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\bNodeAddr=(\S+)", told)
    return found[1] if found else ""


LAUNCHER = Launcher(
    word="slurm", sign=_SIGN, start="srun --nodes {nodes} --ntasks-per-node 1", read=_read_place, join=_join
)
