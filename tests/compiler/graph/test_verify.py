"""The second gate: plan graphs broken on purpose are refused, each by the proposition it breaks; sound ones pass.

What is proved of a step is in test_proof.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.planning import JOBS, compiled

from dslc.compiler.compile import Compiled
from dslc.compiler.graph.build import build_graph
from dslc.compiler.graph.passes import PASSES
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.plan_view import plan_view
from dslc.compiler.graph.stored import plan_hash, restore, store
from dslc.compiler.graph.verify import Unsound, verify
from dslc.compiler.ir.records import PlacementEdge, Process, Stage, Weights
from dslc.compiler.placement.schedules import NAMES
from dslc.compiler.show.describe import memory_groups, memory_of

SOUND = ("pipeline.plt", "uneven.plt")


@pytest.fixture(scope="module")
def pipeline() -> Compiled:
    return compiled(JOBS / "pipeline.plt")


@pytest.fixture(scope="module")
def uneven() -> Compiled:
    return compiled(JOBS / "uneven.plt")


def add(plan: PlanGraph, name: str, key: str, step: int) -> None:
    plan.change(name, **{key: getattr(plan.graph.nodes[name]["record"], key) + step})


def broken(job: Compiled, change: Callable[[PlanGraph], None]) -> PlanGraph:
    """Returns the job's graph, built anew with a change."""
    plan = build_graph(job.analysis)
    change(plan)
    return plan


def refused(job: Compiled, change: Callable[[PlanGraph], None]) -> str:
    """Returns the proposition that refuses the changed graph, and the reason."""
    with pytest.raises(Unsound) as found:
        verify(broken(job, change))
    return f"{found.value.proposition}: {found.value}"


def test_sound_plans_pass(pipeline: Compiled, uneven: Compiled) -> None:
    for job in (pipeline, uneven, compiled(JOBS / "uneven.plt", "parallelism.data_shares=[9, 1, 1]")):
        verify(broken(job, lambda plan: None))


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_sound(name: str) -> None:
    job = compiled(JOBS / "pipeline.plt", f"parallelism.schedule={name}", "data.batch=16", "model.network.layers=6")
    verify(job.graph)
    assert job.plan.schedule is not None and job.plan.schedule.name == name


def test_a_network_that_was_not_traced_is_sound(tmp_path: Path) -> None:
    """Its exchanges are unknown, and so nothing is proved of them."""
    text = (
        (JOBS / "pipeline.plt")
        .read_text()
        .split("parallelism {")[0]
        .replace("gpt(layers = 4, width = 128, heads = 4, context = 128, vocab = 256)", 'python("net:net")')
    )
    job = tmp_path / "own.plt"
    job.write_text(text.replace("vocab = 256", "shape = [4], classes = 3") + "train { steps = 1, optimizer = sgd() }\n")
    for settings in (("train.clip=1.0",), ("parallelism.zero=1",), ("parallelism.zero=3",), ("model.loss.ignore=0",)):
        found = compiled(job, *settings)
        assert found.analysis.model is None
        verify(found.graph)


def test_a_stage_without_parameters_has_nothing_to_gather(tmp_path: Path) -> None:
    """A rank may have one beside another, which it trains."""
    job = tmp_path / "job.plt"
    job.write_text(
        """
        model { network = [dropout(0.0), linear(4), linear(4), linear(5)], loss = cross_entropy() }
        data { source = synthetic(samples = 40, shape = [8], classes = 5), batch = 16 }
        devices { cpus = 4 }
        parallelism { pipeline = 2, schedule = interleaved_1f1b, microbatches = 4, zero = 3 }
        train { steps = 5, optimizer = sgd() }
        """
    )
    plan = compiled(job).graph
    assert {stage.index for _, stage in plan.of_kind(Stage)} - {each.stage for _, each in plan.of_kind(Weights)} == {0}


def test_every_pass_is_followed_by_the_proof(pipeline: Compiled) -> None:
    for n, each in enumerate(PASSES, 1):
        plan = build_graph(pipeline.analysis, after=each.name)
        assert plan.done == tuple(each.name for each in PASSES[:n])
        verify(plan)


# ---------------------------------------------------------------------------------------------------------- devices


def test_a_rank_that_is_missing(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        add(plan, "process 1", "last", -1)

    assert refused(pipeline, change).startswith("devices: ") and "3 ranks on 4 devices" in refused(pipeline, change)


def test_a_rank_between_that_is_missing(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        add(plan, "process 1", "first", 1)

    assert "begins at rank 3, not 2" in refused(pipeline, change)


def test_a_rank_on_two_processes(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        add(plan, "process 1", "first", -1)

    assert "devices: " in refused(pipeline, change) and "begins at rank 1 has two processes" in refused(
        pipeline, change
    )


def test_a_rank_at_another_coordinate(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        for name in ("process 0", "process 1"):
            plan.change(name, pipeline=1 - plan.node_record(name, Process).pipeline)

    assert "process 0 holds rank 0, which is not at pipeline coordinate 1" in refused(pipeline, change)


@pytest.mark.slow
def test_a_gpu_that_is_used_twice() -> None:
    job = compiled(JOBS / "vast.plt")

    def change(plan: PlanGraph) -> None:
        plan.change("devices", gpus=(0, 1, 2, 3, 4, 5, 6, 6))

    assert "GPU 6 is used twice on each node" in refused(job, change)


def test_devices_that_do_not_exist(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        plan.change("nodes", count=2)

    assert refused(pipeline, change).startswith("devices: ")


# ----------------------------------------------------------------------------------------------------------- layers


def test_a_layer_on_two_stages(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        add(plan, "stage 1", "first", -1)

    assert refused(pipeline, change).startswith("layers: ")


def test_a_layer_on_no_stage(pipeline: Compiled) -> None:
    def between(plan: PlanGraph) -> None:
        add(plan, "stage 1", "first", 1)

    def at_the_end(plan: PlanGraph) -> None:
        add(plan, "stage 1", "last", -1)

    assert refused(pipeline, between).startswith("layers: ")
    assert refused(pipeline, at_the_end).startswith("layers: ")


def test_a_stage_on_two_processes_or_none(pipeline: Compiled) -> None:
    def two(plan: PlanGraph) -> None:
        plan.relate("stage 0", "process 1", PlacementEdge())

    def none(plan: PlanGraph) -> None:
        plan.graph.remove_edge("stage 0", "process 0")

    assert "stage 0 is on 2 processes" in refused(pipeline, two)
    assert "stage 0 is on 0 processes" in refused(pipeline, none)


def test_a_stage_that_is_missing(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        plan.graph.remove_node("stage 1")

    assert refused(pipeline, change).startswith("layers: ")


# ---------------------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize(
    ("key", "step"), [("samples", 1), ("samples", -1), ("ranks", 1), ("ranks", -1), ("first_rank", 1)]
)
@pytest.mark.parametrize("batch", ["full", "last"])
def test_a_sample_given_twice_or_to_none(uneven: Compiled, key: str, step: int, batch: str) -> None:
    def change(plan: PlanGraph) -> None:
        add(plan, f"share {batch} 0", key, step)

    assert refused(uneven, change).startswith("samples: ")


def test_a_share_given_twice(uneven: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        plan.put("share again", plan.graph.nodes["share full 0"]["record"])

    assert "has two shares" in refused(uneven, change)


def test_a_share_that_is_missing(uneven: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        plan.graph.remove_node("share last 1")

    assert refused(uneven, change).startswith("samples: ")


def test_shares_out_of_proportion() -> None:
    """Of 48 samples in proportions of 3, 2 and 1, two micro-batches each: 24, 16 and 8."""
    job = compiled(JOBS / "uneven.plt", "parallelism.data_shares=[3, 2, 1]")
    assert job.program().data.shares == (24, 16, 8)

    def moves(samples: int) -> Callable[[PlanGraph], None]:
        def change(plan: PlanGraph) -> None:
            add(plan, "share full 0", "samples", -samples)
            add(plan, "share full 2", "samples", samples)

        return change

    assert "which are no 2 equal micro-batches" in refused(job, moves(1))
    assert "22 samples, and 24 by its weight" in refused(job, moves(2))
    assert "4 weights for 3 data ranks" in refused(job, lambda plan: plan.change("batches", weights=(3, 2, 1, 1)))
    assert "ranks take (24, 8, 16)" in refused(job, lambda plan: plan.change("data", shares=(24, 8, 16)))


# ----------------------------------------------------------------------------------------------------------- memory


def test_memory_over_the_limit() -> None:
    peak = compiled(JOBS / "pipeline.plt").plan.ranks[0].memory.peak
    job = compiled(JOBS / "pipeline.plt", f"memory.limit={2 * peak}B")

    def change(plan: PlanGraph) -> None:
        memory = plan.node_record("process 1", Process).memory
        assert memory is not None
        plan.change("process 1", memory=replace(memory, activations=memory.activations + 2 * peak))

    verify(job.graph)
    assert refused(job, change).startswith("memory: ") and "process 1 holds" in refused(job, change)


def test_memory_of_smaller_shares() -> None:
    """The ranks of a share hold as much as in a job whose equal shares have its size."""
    settings = ("parallelism.microbatches=2", "data.batch=12")
    job = compiled(JOBS / "pipeline.plt", *settings, "parallelism.data_shares=[2, 1]")
    equal = compiled(JOBS / "pipeline.plt", *settings, "data.batch=8")
    for node, other in zip(job.plan.ranks, equal.plan.ranks, strict=True):
        assert [memory_of(job.plan, node, rank) == other.memory for rank in (node.first, node.last)] == [False, True]
        assert node.memory.peak > other.memory.peak
    assert [ranks for ranks, _ in memory_groups(job.plan)] == ["0", "1", "2", "3"]

    def forget(plan: PlanGraph) -> None:
        plan.change("process 1", share_memory=())

    def grow(plan: PlanGraph) -> None:
        process = plan.node_record("process 1", Process)
        (smaller,) = process.share_memory
        assert process.memory is not None
        memory = replace(smaller.memory, activations=process.memory.peak)
        plan.change("process 1", share_memory=(replace(smaller, memory=memory),))

    assert "process 1 has memory of the shares [], not of [4]" in refused(job, forget)
    assert "bytes for a smaller share, over" in refused(job, grow)


# ----------------------------------------------------------------------------------------------------- the plan's bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SOUND, "vast.plt"])
def test_a_plan_is_restored_as_it_was(name: str) -> None:
    job = compiled(JOBS / name)
    graph = restore(json.loads(json.dumps(store(job.graph))))
    assert plan_hash(graph) == job.plan.hash and plan_view(graph) == job.plan


FRESH = """
import sys
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.compile import compile_plan
from dslc.compiler.ir.facts import Facts
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.compiler.show.draw import draw
from dslc.compiler.show.explain import explain
plan = compile_plan(Report().collect(analyse(load(sys.argv[1]).job, Facts()))).plan
sys.stdout.buffer.write((plan.text() + draw(plan) + explain(plan)).encode())
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("job", [JOBS / "pipeline.plt", JOBS / "uneven.plt", ROOT / "examples" / "cluster.plt"])
def test_a_plan_has_the_same_bytes_anywhere(job: Path, tmp_path: Path) -> None:
    """Another hash seed, another working directory, another place of the file."""
    moved = tmp_path / "a folder" / job.name
    moved.parent.mkdir()
    shutil.copyfile(job, moved)
    made = []
    for seed, folder, path in (
        ("0", ROOT, str(job.relative_to(ROOT))),
        ("1", tmp_path, str(moved)),
        ("4000", moved.parent, job.name),
    ):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", FRESH, path], cwd=folder, env=environment, capture_output=True, check=True
        )
        made.append(run.stdout)
    assert made[0] and made[0] == made[1] == made[2]
    assert str(tmp_path).encode() not in made[1] and str(ROOT).encode() not in made[0]
