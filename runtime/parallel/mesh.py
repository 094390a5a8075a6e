"""The ranks as a mesh of axes, and the groups of ranks along them.

Model: rank = ((p * data + d) * context + c) * tensor + t, as the program's places say. One DeviceMesh of these four
axes is the root of every other: that of `fully_shard` is replicas x shards, cut from the flattened (data, context) of a
rank's pipeline and tensor coordinate, as ranks that share a sequence hold the same parameters and see other tokens.

Contract: all ranks make the mesh, and ask for the same groups in the same order, as making one is a collective. A sum
over all ranks counts each value once: `leads` is true on one of the ranks that compute the same from the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dslc.compiler.ir.axes import AXES, coordinates
from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.trace.private_torch import flattened, unflattened

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MADE: dict[tuple[int, ...], Mesh] = {}  # the meshes of this process, by the sizes of the axes: groups are never closed


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's place on the axes. `root` is None if the data axis is the only one."""

    sizes: Mapping[str, int]
    coordinates: Mapping[str, int]
    root: DeviceMesh | None
    _groups: dict[tuple[str, ...], dist.ProcessGroup | None] = field(default_factory=dict, repr=False)

    @property
    def leads(self) -> bool:
        """True if this rank is the first of those that compute the same: the ranks of a tensor axis."""
        return self.coordinates["tensor"] == 0

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Returns the group of ranks that differ from this one along `axes` alone; None if it is this rank alone."""
        wide = tuple(axis for axis in AXES if axis in axes and self.sizes[axis] > 1)
        if wide not in self._groups:
            self._groups[wide] = self._made(wide)
        return self._groups[wide]

    def _made(self, wide: tuple[str, ...]) -> dist.ProcessGroup | None:
        if not wide:
            return None
        if prod(self.sizes[axis] for axis in wide) == prod(self.sizes.values()):
            return dist.group.WORLD
        assert self.root is not None
        return flattened(self.root[wide]).get_group() if len(wide) > 1 else self.root.get_group(wide[0])

    def axis(self, name: str) -> DeviceMesh:
        """Returns the mesh of one axis, for torch's own use."""
        assert self.root is not None
        return self.root[name]

    def sharded(self, replicas: int, device: torch.device) -> DeviceMesh:
        """Returns the mesh for `fully_shard`: replicas x shards, without the first if it is one."""
        from torch.distributed.device_mesh import init_device_mesh

        ranks = self.sizes["data"] * self.sizes["context"]
        names = ("replicas", "shards")
        if self.root is None:
            if replicas == 1:
                return init_device_mesh(device.type, (ranks,), mesh_dim_names=names[1:])
            return init_device_mesh(device.type, (replicas, ranks // replicas), mesh_dim_names=names)
        flat = flattened(self.root["data", "context"], "shards" if replicas == 1 else "copies")
        made = flat if replicas == 1 else unflattened(flat, (replicas, ranks // replicas), names)
        return made


def sizes_of(job: JobProgram) -> dict[str, int]:
    """Returns the number of ranks along each axis."""
    pipeline = 1 + max((stage.rank for stage in job.pipeline.stages), default=0) if job.pipeline else 1
    tensor = job.tensor.size if job.tensor else 1
    data = job.world_size // (pipeline * tensor * job.context)
    return {"pipeline": pipeline, "data": data, "context": job.context, "tensor": tensor}


def several_axes(job: JobProgram) -> bool:
    """True if there is another axis than data."""
    return sizes_of(job)["data"] != job.world_size


def coordinates_of(job: JobProgram, rank: int) -> dict[str, int]:
    """Returns a rank's coordinate on each axis."""
    return coordinates(sizes_of(job), rank)


def mesh_of(job: JobProgram, place: RankPlace | None = None) -> Mesh:
    """Returns the mesh of this process, which all ranks make at the first call. The process group is open by then.

    `place` is checked against the place that the group gives this process.
    """
    sizes = tuple(sizes_of(job).values())
    if sizes not in _MADE:
        _MADE[sizes] = _make(job)
    mesh = _MADE[sizes]
    assert place is None or all(place.coordinates.get(axis, 0) == mesh.coordinates[axis] for axis in AXES), place
    return mesh


def _make(job: JobProgram) -> Mesh:
    sizes = sizes_of(job)
    rank = dist.get_rank() if dist.is_initialized() else 0
    root = None
    if several_axes(job):
        from torch.distributed.device_mesh import init_device_mesh

        root = init_device_mesh(job.device, tuple(sizes[axis] for axis in AXES), mesh_dim_names=AXES)
    return Mesh(sizes=sizes, coordinates=coordinates_of(job, rank), root=root)
