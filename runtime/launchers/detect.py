"""The launchers of others that are known: one line for each."""

from __future__ import annotations

from collections.abc import Mapping

from dslc.runtime.launchers import kubernetes, mpi, slurm, torchrun
from dslc.runtime.launchers.world import Launcher, World

LAUNCHERS: dict[str, Launcher] = {
    each.word: each for each in (torchrun.LAUNCHER, mpi.LAUNCHER, slurm.LAUNCHER, kubernetes.LAUNCHER)
}


def worlds(environ: Mapping[str, str]) -> dict[str, World]:
    """Returns the places that this process has by its variables, by the job's word for the launcher. The launcher that
    has started it itself comes before those that have started the launcher.
    """
    found = {word: launcher.read(environ) for word, launcher in LAUNCHERS.items()}
    return {word: world for word, world in found.items() if world is not None}
