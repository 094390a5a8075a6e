"""Ranks find each other along the axes that the program names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gang import gang
from helpers.made_programs import program, tokens

from dslc.compiler.ir import program as p
from dslc.compiler.ir.axes import AXES
from dslc.compiler.placement.layout import lay_out
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.runtime.parallel.mesh import coordinates_of, mesh_of, sizes_of

CPU = torch.device("cpu")


def job_of(folder: str, ranks: int, tensor: int = 1, context: int = 1) -> p.JobProgram:
    step = p.TensorParallelStep(size=tensor, sequence=True, styles=(), loss_parallel=False)
    plain = program(ranks, tokens(Path(folder)))
    return dataclasses.replace(plain, tensor=step if tensor > 1 else None, context=context)


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


JOB = """
model {
  network = gpt(layers = 2, width = 16, heads = 2, context = 16, vocab = 256)
  loss    = cross_entropy()
}
data {
  source = stdlib()
  batch  = 16
}
devices {
  cpus = 16
}
parallelism {
  tensor  = 2
  context = 2
  data    = 4
}
train {
  steps     = 5
  optimizer = sgd(lr = 0.1)
}
"""


def test_the_compiler_counts_ranks_alike(tmp_path: Path) -> None:
    (tmp_path / "made.plt").write_text(JOB)
    loaded = load(str(tmp_path / "made.plt"), [])
    assert loaded.job is not None, loaded.report.found
    layout = lay_out(loaded.job, Report())
    assert layout is not None
    job = job_of(str(tmp_path), 16, tensor=2, context=2)
    assert tuple(sizes_of(job)) == AXES and sizes_of(job) == layout.sizes
    for rank in range(16):
        assert coordinates_of(job, rank) == layout.coordinates(rank)
