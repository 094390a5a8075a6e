"""Ranks find each other along the axes that the program names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gang import gang
from helpers.made_programs import program, tokens
from helpers.paths import EXAMPLES
from helpers.planning import compiled

from dslc.compiler.ir import program as p
from dslc.compiler.placement.axes import AXES
from dslc.runtime.parallel.mesh import mesh_of

CPU = torch.device("cpu")


def job_of(folder: str, ranks: int, tensor: int = 1, context: int = 1) -> p.JobProgram:
    step = p.TensorParallelStep(size=tensor, sequence=True, styles=(), loss_parallel=False)
    axes = {"pipeline": 1, "data": ranks // (tensor * context), "context": context, "tensor": tensor}
    return program(ranks, tokens(Path(folder)), tensor=step if tensor > 1 else None, axes=axes)


def groups(rank: int, folder: str) -> list[Any]:
    mesh = mesh_of(job_of(folder, 4, tensor=2, context=2))
    found: list[Any] = [mesh.leads, mesh.group("data"), mesh.group("data", "pipeline")]
    for axes in (("context",), ("tensor",), ("data", "context"), ("context", "tensor"), ("tensor", "data", "context")):
        summed = torch.tensor(10**rank)
        dist.all_reduce(summed, group=mesh.group(*axes))
        found.append(int(summed))
    assert mesh.group("context") is mesh.group("context", "data"), "a group is made once"
    return found


def test_a_group_is_of_the_ranks_that_differ_along_its_axes(tmp_path: Path) -> None:
    assert gang(4, groups, str(tmp_path)) == [
        [True, None, None, 101, 11, 101, 1111, 1111],
        [False, None, None, 1010, 11, 1010, 1111, 1111],
        [True, None, None, 101, 1100, 101, 1111, 1111],
        [False, None, None, 1010, 1100, 1010, 1111, 1111],
    ]


def shards(rank: int, folder: str, replicas: int) -> list[Any]:
    mesh = mesh_of(job_of(folder, 4, tensor=2)).sharded(replicas, CPU)
    return [mesh.mesh_dim_names, mesh.mesh.tolist()]


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_ranks_that_share_a_place_in_the_model_are_replicas_and_shards(tmp_path: Path, replicas: int) -> None:
    found = gang(4, shards, str(tmp_path), replicas)
    names = ("shards",) if replicas == 1 else ("replicas", "shards")
    for rank, (named, ranks) in enumerate(found):
        peers = [rank % 2, rank % 2 + 2]
        assert named == names and ranks == (peers if replicas == 1 else [[peers[0]], [peers[1]]])


def lies(rank: int, programs: tuple[p.RankProgram, ...]) -> bool:
    own = programs[rank]
    return mesh_of(own.job).coordinates == own.place.coordinates


@pytest.mark.parametrize("axes", ["tensor=2", "context=2", "pipeline=2", "data=4"])
def test_torch_counts_ranks_as_the_plan_does(axes: str) -> None:
    made = compiled(EXAMPLES / "gpt_cpu.plt", "devices.cpus=4", f"parallelism.{axes}")
    job = made.program()
    assert tuple(job.axes) == AXES
    assert all(gang(4, lies, tuple(p.RankProgram(job=job, place=place) for place in made.places())))
