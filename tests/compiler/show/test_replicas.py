"""Replicas in the text and the pictures of a plan: which ranks they are, and which ranks take part in each exchange."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from helpers import made_plans
from helpers.golden import hold
from helpers.planning import JOBS, compiled
from test_draw import GOLDEN, named

from dslc.compiler.ir.actions import SendActivations
from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.canvas import fitted
from dslc.compiler.show.describe import exchange_groups, replica, replicas, sharers
from dslc.compiler.show.draw import draw
from dslc.compiler.show.explain import explain, explain_rank

JOB = JOBS / "replicas.plt"


def plan(*settings: str) -> PlanView:
    return compiled(JOB, *settings).plan


def test_each_exchange_says_within_or_across_which_ranks_it_goes() -> None:
    made = plan()
    dot = draw(made)
    hold(dot.replace(made.hash, "0" * len(made.hash)), GOLDEN / "replicas.placement.dot")  # which every account changes
    for said in (
        "data x4 within groups of 2 ranks (0–1; 2–3): all-gather parameters, ",
        "data x4 within groups of 2 ranks (0–1; 2–3): reduce-scatter gradients, ",
        "data x4 across 2 replicas (0, 2; 1, 3): all-reduce gradients, ",
        "data 4 (2 replicas of 2 ranks)",
        "data 1, replica 0",
        "data 2, replica 1",
    ):
        assert said in dot, said
    assert [len(re.findall(f'"data {where} 2', dot)) for where in ("within", "across")] == [2, 1], "the table"
    assert "across" not in draw(plan("parallelism.replicas=1"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_stage_sends_is_what_its_messages_are(precision: str) -> None:
    made = compiled(JOBS / "pipeline.plt", "parallelism.tensor=2", "devices.cpus=8", f"train.precision={precision}")
    sent = {a.stage: a.bytes for _, a in made.graph.of_kind(SendActivations)}
    assert sent and sent == {stage.index: stage.output_bytes for stage in made.plan.stages[:-1]}
    assert byte_text(sent[0]) in draw(made.plan, "graph")


def test_a_norm_over_the_shards_is_within_a_replica() -> None:
    text = explain(plan("train.clip=1.0"))
    assert re.search(r"all_reduce +data within 2 +norm of the gradient", text)


def test_many_ranks_are_told_by_the_first_group_and_by_their_links() -> None:
    dot = draw(plan("devices.nodes=4", "devices.gpus=8", "parallelism.replicas=4"))
    assert "data 32 (4 replicas of 8 ranks)" in dot
    assert re.search(r"within 8 ranks \(0–7; …\): all-gather parameters, [\d.]+ KiB\\l", dot), "within a node"
    assert re.search(r"across 4 ranks \(0, 8, 16, 24; …\): all-reduce gradients, [\d.]+ KiB, between nodes", dot)


def test_the_graph_and_the_text_say_it_too() -> None:
    assert len(re.findall(r"operations, within 2\"", draw(plan(), "graph"))) == 2
    assert len(re.findall(r"operations, across 2\"", draw(plan(), "graph"))) == 1
    text, rank = explain(plan()), explain_rank(plan(), 3)
    assert re.search(r"reduce_scatter +data within 2 +gradients", text)
    assert re.search(r"all_reduce +data across 2 +gradients", text)
    assert "1 of 2: shares within groups of 2 ranks (0–1; 2–3); across 2 replicas (0, 2; 1, 3)" in rank


@pytest.mark.parametrize("axes", [{}, {"tensor": 2}, {"context": 2}, {"pipeline": 2, "context": 2, "tensor": 2}])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_every_rank_is_in_one_group_of_each_kind(axes: dict[str, int], shards: int) -> None:
    layers = made_plans.gpt_layers(8, 64, 32)
    made = made_plans.make_plan("some", layers, nodes=2, processes=16, microbatches=2, **axes)  # type: ignore[arg-type]
    made = replace(made, shards=shards)
    copies = replicas(made)
    for rank in range(made.world_size):
        along = sharers(made, rank)
        assert rank in along and copies * (shards if copies > 1 else 1) == (len(along) if copies > 1 else 1)
        if copies == 1:
            continue
        for where, size in (("within", shards), ("across", copies)):
            groups = exchange_groups(made, rank, where)
            assert sorted(each for some in groups for each in some) == sorted(along)
            assert all(len(some) == size for some in groups)
        (mine,) = [some for some in exchange_groups(made, rank, "within") if rank in some]
        assert {replica(made, other) for other in mine} == {replica(made, rank)}
        (likes,) = [some for some in exchange_groups(made, rank, "across") if rank in some]
        assert sorted(replica(made, other) for other in likes) == list(range(copies))


# --------------------------------------------------------------------------------------------- bounds, and their places


def test_what_is_predicted_at_the_peak_of_the_data_sheet_is_said_to_be_at_best() -> None:
    made, text = plan(), explain(plan())
    assert made.step_time and made.mfu
    rate = 64 * 32 / made.step_time
    (heading,) = [line for line in draw(made).splitlines() if line.startswith("\tsummary ")]
    assert re.search(rf"at best: step [\d.]+ us, {rate / 1e6:.3g} M tokens/s, MFU [\d.]+%", heading)
    for row in ("step time", "throughput", "MFU", "training"):
        assert re.search(rf"^  {row} .* at best", text, re.M), row
    images = replace(made_plans.digits(), step=replace(made_plans.STEP, step_time=0.5))
    assert "at best: step 500 ms, 128 samples/s" in draw(images)


def test_the_name_of_a_micro_batch_fits_its_box() -> None:
    dot = draw(made_plans.make_plan("some", made_plans.image_layers(), microbatches=12), "graph")
    names = named(dot, r"0[FB]\d+")
    assert len(names) == 24
    for width, label in re.findall(r'  "0[FB]\d+" \[pos="[^"]*" width=([\d.]+) height=[\d.]+ label="([^"]*)"', dot):
        for line in label.split("\\n"):
            assert fitted(line, 72 * float(width) - 8, 8.5) == line, line
