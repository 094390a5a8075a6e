"""Ranks and axes."""

from __future__ import annotations

import pytest
from helpers.made_jobs import make_job
from hypothesis import assume, given
from hypothesis import strategies as st

from dslc.compiler.ir.facts import MachineFacts
from dslc.compiler.placement.axes import AXES
from dslc.compiler.placement.layout import Layout, lay_out, warn_of_unknown_count
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.blocks import DevicesSpec, ParallelismSpec

sizes = st.integers(1, 4)


def layout_of(devices: DevicesSpec, parallelism: ParallelismSpec | None = None) -> Layout:
    report = Report()
    layout = report.collect(lay_out(make_job(devices=devices, parallelism=parallelism or ParallelismSpec())))
    assert layout is not None, report.found
    return layout


@given(data=sizes, pipeline=sizes, tensor=sizes, context=sizes, nodes=sizes)
def test_every_rank_has_coordinates_of_its_own(data: int, pipeline: int, tensor: int, context: int, nodes: int) -> None:
    world = data * pipeline * tensor * context
    layout = layout_of(
        DevicesSpec(nodes=nodes, cpus=world),
        ParallelismSpec(data=data * nodes, pipeline=pipeline, tensor=tensor, context=context),
    )
    assert layout.world_size == world * nodes
    seen = [tuple(layout.coordinates(rank).items()) for rank in range(layout.world_size)]
    assert len(set(seen)) == layout.world_size
    for rank, coordinates in enumerate(seen):
        assert rank == sum(layout.stride(axis) * place for axis, place in coordinates)
    for p in range(pipeline):
        assert all(layout.coordinates(rank)["pipeline"] == p for rank in layout.ranks(p))


def test_tensor_stays_inside_a_node_where_it_fits() -> None:
    layout = layout_of(DevicesSpec(nodes=2, cpus=8), ParallelismSpec(pipeline=2, tensor=4))
    assert [layout.stride(axis) for axis in AXES] == [8, 4, 4, 1]
    assert [axis for axis in AXES if layout.crosses_nodes(axis)] == ["pipeline"]


@given(data=sizes, pipeline=sizes, tensor=sizes, context=sizes, nodes=st.integers(1, 6))
def test_an_axis_crosses_nodes_where_some_of_its_neighbours_do(
    data: int, pipeline: int, tensor: int, context: int, nodes: int
) -> None:
    world = data * pipeline * tensor * context
    assume(world % nodes == 0)
    layout = layout_of(
        DevicesSpec(nodes=nodes, cpus=world // nodes),
        ParallelismSpec(data=data, pipeline=pipeline, tensor=tensor, context=context),
    )
    for axis in AXES:
        ranks = [r for r in range(world) if layout.coordinates(r)[axis] + 1 < layout.sizes[axis]]
        each, stride = layout.processes, layout.stride(axis)
        assert layout.crosses_nodes(axis) == any(r // each != (r + stride) // each for r in ranks)


def test_the_data_axis_takes_what_the_others_leave() -> None:
    assert layout_of(DevicesSpec(cpus=8), ParallelismSpec(tensor=2)).sizes["data"] == 4


def test_a_tensor_axis_cuts_the_sequence_on_gpus_unless_the_job_says_otherwise() -> None:
    cpus, gpus = DevicesSpec(cpus=2), DevicesSpec(gpus=2)
    for devices, written, sequence in (
        (cpus, None, False),
        (gpus, None, True),
        (cpus, True, True),
        (gpus, False, False),
    ):
        assert layout_of(devices, ParallelismSpec(tensor=2, sequence=written)).sequence == sequence


def test_ways_to_name_gpus() -> None:
    """A count, a list, and both as text."""
    for gpus, processes, named in (
        (3, 3, ()),
        ((1, 3), 2, (1, 3)),
        ("3", 3, ()),
        ("1, 3", 2, (1, 3)),
        ((0,), 1, (0,)),
    ):
        layout = layout_of(DevicesSpec(gpus=gpus))
        assert (layout.processes, layout.gpus) == (processes, named), gpus


def test_all_gpus_are_counted_where_the_job_runs() -> None:
    for gpus in ("all", -1, "-1"):
        job, report = make_job(devices=DevicesSpec(gpus=gpus)), Report()
        assert report.collect(lay_out(job)) is None and not report
        assert [d.code for d in warn_of_unknown_count(job.devices, None)] == ["W0404"]
        machine = MachineFacts(cores=2, memory=2**30, gpus=(2**30,) * 4)
        layout = Report().collect(lay_out(job, machine))
        assert layout is not None
        assert layout.processes == 4


@pytest.mark.parametrize("gpus", ["all", 2, (0, 1)])
def test_a_machine_that_cannot_be_asked_says_why(gpus: str | int | tuple[int, ...]) -> None:
    report, machine = Report(), MachineFacts(cores=2, memory=2**30, fault="`nvidia-smi` ended with status 9")
    assert report.collect(lay_out(make_job(devices=DevicesSpec(gpus=gpus)), machine)) is None
    assert [(d.code, d.message) for d in report] == [("E0824", machine.fault)]


def test_a_machine_without_the_gpus_asked_for_is_an_error() -> None:
    report = Report()
    machine = MachineFacts(cores=2, memory=2**30, gpus=(2**30,))
    assert report.collect(lay_out(make_job(devices=DevicesSpec(gpus=(0, 1))), machine)) is None
    assert [d.code for d in report] == ["E0420"]
