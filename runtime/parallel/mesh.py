"""The ranks as a mesh of axes, and the groups of ranks along them.

Model: rank = ((p * data + d) * context + c) * tensor + t, as the program has it. One DeviceMesh of these four axes is
the root of every other: the mesh of `fully_shard` is replicas x shards, cut from the flattened (data, context) of a
rank's pipeline and tensor coordinate. The reason: ranks that share a sequence hold the same parameters and see other
tokens. Where neighbours on the data axis share experts, the root has two axes in its place: d = copy * experts +
expert.

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

from dslc.compiler.ir.program import JobProgram
from dslc.compiler.placement.axes import AXES, coordinates
from dslc.compiler.trace.private_torch import flattened, unflattened

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COPIES, EXPERT = "copies_of_experts", "expert"  # inside the data axis
SHARDED = ("replicas", "shards")
_MADE: dict[tuple[int, ...], Mesh] = {}  # the meshes of this process, by the sizes of the axes: groups are never closed


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's place on the axes. `root` is None if the data axis is the only one, and no ranks share `experts`."""

    sizes: Mapping[str, int]
    coordinates: Mapping[str, int]
    root: DeviceMesh | None
    experts: int = 1
    _groups: dict[tuple[str, ...], dist.ProcessGroup | None] = field(default_factory=dict, repr=False)

    @property
    def leads(self) -> bool:
        """True if this rank is the first of those that compute the same: the ranks of a tensor axis."""
        return self.coordinates["tensor"] == 0

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Returns the group of ranks that differ from this one along `axes` alone; None if it is this rank alone."""
        wide = tuple(axis for axis in AXES if axis in axes and self.sizes[axis] > 1)
        if wide not in self._groups:
            self._groups[wide] = self._make_group(wide)
        return self._groups[wide]

    def _make_group(self, wide: tuple[str, ...]) -> dist.ProcessGroup | None:
        if not wide:
            return None
        if prod(self.sizes[axis] for axis in wide) == prod(self.sizes.values()):
            return dist.group.WORLD
        assert self.root is not None
        names = self._in_root(wide)
        return flattened(self.root[names]).get_group() if len(names) > 1 else self.root.get_group(names[0])

    def _in_root(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        if self.experts == 1:
            return axes
        return tuple(name for axis in axes for name in ((COPIES, EXPERT) if axis == "data" else (axis,)))

    def axis(self, name: str) -> DeviceMesh:
        """Returns the mesh of one axis, for torch's own use."""
        assert self.root is not None
        return self.root[name]

    def sharded(self, replicas: int, device: torch.device) -> DeviceMesh:
        """Returns the mesh for `fully_shard`: replicas x shards, without the first if it is one."""
        from torch.distributed.device_mesh import init_device_mesh

        ranks = self.sizes["data"] * self.sizes["context"]
        names = SHARDED
        if self.root is None:
            if replicas == 1:
                return init_device_mesh(device.type, (ranks,), mesh_dim_names=names[1:])
            return init_device_mesh(device.type, (replicas, ranks // replicas), mesh_dim_names=names)
        flat = flattened(self.root[self._in_root(("data", "context"))], "shards" if replicas == 1 else "copies")
        return flat if replicas == 1 else unflattened(flat, (replicas, ranks // replicas), names)

    def sharded_experts(self, replicas: int) -> DeviceMesh:
        """Returns the mesh of `fully_shard` for the experts that this rank holds, along with ranks of other groups: the
        ranks of its sequence, and the ranks of other copies.
        """
        assert self.root is not None
        copies = self.sizes["data"] // self.experts * self.sizes["context"]
        names = tuple(f"expert_{name}" for name in SHARDED)
        replicas = min(replicas, copies)
        made = self.root[COPIES]
        if self.sizes["context"] > 1:
            made = flattened(self.root[COPIES, "context"], "copies_of_experts_by_sequence")
        return made if replicas == 1 else unflattened(made, (replicas, copies // replicas), names)


def several_axes(job: JobProgram) -> bool:
    """True if there is another axis than data, or one inside it."""
    return job.axes["data"] != job.world_size or job.experts is not None


def mesh_of(job: JobProgram) -> Mesh:
    """Returns the mesh of this process, which all ranks make at the first call. The process group is open by then."""
    sizes = (*(job.axes[axis] for axis in AXES), job.experts.size if job.experts else 1)
    if sizes not in _MADE:
        _MADE[sizes] = _make(job)
    return _MADE[sizes]


def _make(job: JobProgram) -> Mesh:
    if not several_axes(job):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return Mesh(sizes=job.axes, coordinates=dict.fromkeys(AXES, 0) | {"data": rank}, root=None)
    from torch.distributed.device_mesh import init_device_mesh

    experts = job.experts.size if job.experts else 1
    sizes = dict(job.axes)
    if experts > 1:
        sizes |= {COPIES: sizes["data"] // experts, EXPERT: experts}
    names = tuple(name for axis in AXES for name in ((COPIES, EXPERT) if experts > 1 and axis == "data" else (axis,)))
    root = init_device_mesh(job.device, tuple(sizes[name] for name in names), mesh_dim_names=names)
    return Mesh(sizes=job.axes, coordinates=coordinates(job.axes, dist.get_rank()), root=root, experts=experts)
