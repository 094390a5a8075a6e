"""Kubernetes: an indexed Job, a pod for each node, which meet at the name that a headless Service gives to the first.

Model: Kubernetes sets `JOB_COMPLETION_INDEX`, and the manifest of `dslc submit` the number of pods and the name of the
first, which resolves when its pod has started. The pods of an elastic job have no such number, and are no world: their
command names all of them as the rendezvous of hosts that come and go (hosts/elastic.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dslc.runtime.hosts.rendezvous_address import FixedEndpoint, RendezvousError
from dslc.runtime.launchers.world import Launcher, World, read_world

NODES, FIRST = "DSLC_NODES", "DSLC_FIRST_HOST"  # which the manifest sets
_SIGN = "JOB_COMPLETION_INDEX"
_NAMES = {"rank": _SIGN, "size": NODES, "nodes": NODES}
_PORT = 29_400


class _ServiceEndpoint(FixedEndpoint):
    """An endpoint at a name that a cluster's DNS does not know yet where the pod has not started."""

    def find(self) -> tuple[str, int] | None:  # type: ignore[override]  # as the protocol has it
        try:
            return super().find()
        except RendezvousError:
            return None


def _read_place(environ: Mapping[str, str]) -> World | None:
    """Returns the place of this pod, or None if it is not one of a training: a Job of many jobs has indices too."""
    if _SIGN not in environ or NODES not in environ:
        return None
    world = read_world(environ, "kubernetes", "Kubernetes", _NAMES, everywhere=False)
    return replace(world, of_nodes=True, host=environ.get("HOSTNAME", ""))


def _join(world: World, environ: Mapping[str, str], beside: str) -> FixedEndpoint:
    if FIRST not in environ:
        raise RendezvousError(f"{FIRST} is not set: it names the pod of index 0, as the manifest of `dslc submit` does")
    return _ServiceEndpoint(environ[FIRST], _PORT)


LAUNCHER = Launcher(word="kubernetes", sign=_SIGN, start="", read=_read_place, join=_join)
