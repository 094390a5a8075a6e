"""The predicted time of a step, compared with a calculation by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.planning import compiled

from dslc.compiler.compile import Compiled
from dslc.compiler.cost.estimate import StepEstimate
from dslc.compiler.ir.number_text import time_text
from dslc.compiler.show.explain import explain

GPT = """
model {
  network = gpt(layers = 8, width = 1024, heads = 16, context = 1024, vocab = 8192)
  loss    = cross_entropy()
}
data {
  source = synthetic(samples = 100_000, vocab = 8192)
  batch  = 512
}
devices {
  nodes     = 4
  gpus      = 8
  kind      = card
  catalogue = "cards.toml"
}
train {
  steps     = 10
  precision = bf16
  optimizer = adamw(lr = 1e-3)
}
"""
CARDS = """
[card]
memory  = "80GiB"
fp32    = "50TFLOPS"
bf16    = "100TFLOPS"
link    = "400GBps"
network = "40GBps"
"""


def planned(folder: Path, *settings: str, cards: str = CARDS) -> tuple[Compiled, StepEstimate]:
    (folder / "job.plt").write_text(GPT.replace("cards.toml", str(folder / "cards.toml")))
    (folder / "cards.toml").write_text(cards)
    job = compiled(folder / "job.plt", *settings)
    assert job.analysis.estimate is not None and job.analysis.estimate.step_time is not None
    return job, job.analysis.estimate


def flops(job: Compiled) -> int:
    assert job.analysis.model is not None
    return job.analysis.model.forward_flops + job.analysis.model.backward_flops


def test_a_step_that_hides_its_gradients_takes_as_long_as_its_arithmetic(tmp_path: Path) -> None:
    job, found = planned(tmp_path)
    assert found.step_time == pytest.approx(flops(job) * 16 / 100e12)
    assert found.exposed == found.transfers == 0 and found.waiting == pytest.approx(0)
    assert found.mfu == pytest.approx(1)


def test_gradients_that_take_longer_than_a_micro_batch_are_waited_for(tmp_path: Path) -> None:
    job, found = planned(tmp_path, "parallelism.microbatches=16")
    slow = CARDS.replace("40GBps", "0.04GBps")
    _, late = planned(tmp_path, "parallelism.microbatches=16", cards=slow)
    (gradients,) = [t for t in job.analysis.costs[0].traffic if t.what == "gradients"]
    # Twice what is not on a rank's own node, through the eight ports of a node.
    seconds = 2 * gradients.bytes * 3 / 4 / 8 / 40e6
    assert late.exposed == pytest.approx(seconds - found.arithmetic / 16)
    assert late.step_time == pytest.approx(found.arithmetic + late.exposed)


def test_shards_of_a_replica_on_one_node_send_nothing_over_the_network(tmp_path: Path) -> None:
    # Neighbours along the context axis are shards too: eight in a row, the GPUs of a node.
    axes = ("parallelism.zero=3", "parallelism.replicas=4", "parallelism.context=2")
    job, found = planned(tmp_path, *axes)
    (summed,) = [t for t in job.analysis.costs[0].traffic if (t.operation, t.what) == ("all_reduce", "gradients")]
    assert (summed.ranks, summed.stride) == (4, 8)
    assert dict(found.links)["network"] == pytest.approx(2 * summed.bytes * 3 / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("backend", "of_sum", "of_scatter", "of_gather"),
    [("gloo", 2 * 31 / 32, 2 * 31 / 32, 31 / 32), ("shared_memory", 2 * 3 / 4, 3 / 4, 3 / 4)],
)
def test_a_host_sends_each_byte_once_where_its_ranks_share_memory(
    tmp_path: Path, backend: str, of_sum: float, of_scatter: float, of_gather: float
) -> None:
    """Four hosts of eight ranks; gloo sends around a ring of all ranks, and scatters sums by an all-reduce."""
    settings = ("devices.gpus=none", "devices.cpus=8", "train.precision=fp32", f"devices.backend={backend}")
    ways = {"all_reduce": of_sum, "reduce_scatter": of_scatter, "all_gather": 32 * of_gather}
    for zero in (0, 3):
        cards = CARDS.replace("[card]", "[card]\ndevice = 'cpu'")
        job, found = planned(tmp_path, *settings, f"parallelism.zero={zero}", cards=cards)
        traffic = job.analysis.costs[0].traffic
        assert {each.operation for each in traffic} == ({"all_gather", "reduce_scatter"} if zero else {"all_reduce"})
        sent = sum(each.bytes * ways[each.operation] for each in traffic) / 8
        assert dict(found.links)["network"] == pytest.approx(sent, rel=1e-6)


def test_within_a_node_the_link_counts(tmp_path: Path) -> None:
    job, found = planned(tmp_path, "devices.nodes=1", cards=CARDS.replace("400GBps", "0.04GBps"))
    (gradients,) = [t for t in job.analysis.costs[0].traffic if t.what == "gradients"]
    seconds = 2 * gradients.bytes * 7 / 8 / 40e6
    assert found.exposed == pytest.approx(seconds - found.arithmetic)
    assert dict(found.links)["network"] == 0
    assert dict(found.links)["link"] == pytest.approx(
        sum(2 * t.bytes * 7 / 8 for t in job.analysis.costs[0].traffic), 0.1
    )


def test_the_bubble_of_a_pipeline_is_waited_for(tmp_path: Path) -> None:
    settings = ("parallelism.pipeline=4", "parallelism.schedule=gpipe", "parallelism.microbatches=8")
    job, found = planned(tmp_path, *settings, "parallelism.stages=[3, 3, 3, 3]")
    assert job.analysis.pipeline is not None and found.step_time is not None
    assert found.waiting > 0
    assert found.arithmetic + found.waiting + found.transfers + found.exposed == pytest.approx(found.step_time)
    slowest = max(cost.flops for cost in job.analysis.costs) / 100e12
    assert found.arithmetic == pytest.approx(slowest)
    assert found.step_time > slowest * (8 + 3) / 8 * 0.8


def test_what_layers_exchange_is_in_line(tmp_path: Path) -> None:
    job, found = planned(tmp_path, "parallelism.tensor=8", "parallelism.zero=2")
    whole = [t for t in job.analysis.costs[0].traffic if t.axis == "tensor"]
    moved = 0.0
    for node in whole:
        ways = 2 if node.operation == "all_reduce" else 1
        moved += ways * node.bytes * (8 if node.operation == "all_gather" else 1) * 7 / 8
    assert found.transfers == pytest.approx(moved / 400e9) and moved > 0
    assert found.step_time == pytest.approx(found.arithmetic + found.transfers + found.exposed)


def test_half_the_efficiency_is_twice_the_arithmetic(tmp_path: Path) -> None:
    _, whole = planned(tmp_path)
    _, half = planned(tmp_path, cards=CARDS + "efficiency = 0.5\n")
    assert half.arithmetic == pytest.approx(2 * whole.arithmetic)
    assert half.mfu == pytest.approx(0.5)


def test_the_plan_says_where_the_time_goes(tmp_path: Path) -> None:
    job, found = planned(tmp_path, "parallelism.tensor=8", cards=CARDS + "efficiency = 0.5\n")
    assert job.plan.step is not None and job.plan.step.efficiency == 0.5
    assert job.plan.step.transfers == found.transfers and job.plan.step.within == dict(found.links)["link"]
    said = explain(job.plan)
    assert "where products reach 50% of the peak" in said and f"{time_text(found.transfers)} within layers" in said
    assert "at best" in explain(planned(tmp_path)[0].plan)


@pytest.mark.parametrize("wrong", ["0", "1.5", '"half"'])
def test_an_efficiency_is_a_share(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="E0422"):
        planned(tmp_path, cards=CARDS + f"efficiency = {wrong}\n")


def test_recomputation_is_arithmetic_and_no_use(tmp_path: Path) -> None:
    _, plain = planned(tmp_path)
    _, again = planned(tmp_path, "memory.recompute=full")
    assert again.arithmetic > 1.25 * plain.arithmetic
    assert again.mfu is not None and again.mfu < 0.8


@pytest.mark.slow
def test_a_plan_for_many_thousand_devices_has_an_estimate() -> None:
    found = compiled(ROOT / "benchmarks" / "jobs" / "large.plt").analysis.estimate
    assert found is not None and found.step_time is not None and found.mfu is not None
    assert 0 < found.mfu < 1 and dict(found.links)["network"] > 0
    parts = (found.arithmetic, found.transfers, found.waiting, found.exposed, found.update, found.rest, found.launches)
    assert sum(parts) == pytest.approx(found.step_time)
