"""The time of a step by published runs: compared with a calculation by hand, and where a bound stays a bound."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.job_texts import job_text
from helpers.planning import compiled

from benchmarks.predictions import FLOAT8, analysed, tokens
from benchmarks.published import read_runs
from benchmarks.published_fit import BEGIN, errors, fit_constants
from dslc.compiler.compile import Compiled
from dslc.compiler.cost.estimate import StepEstimate, estimate, slower_of
from dslc.compiler.facts.hardware import CATALOGUE, fitted_kinds, nearest_fit, read_fit
from dslc.compiler.show.explain import explain

JOB = job_text(
    model={
        "network": "gpt(layers = 4, width = 1024, heads = 8, context = 1024, vocab = 8192, bias = false)",
        "loss": "cross_entropy()",
    },
    data={"source": "synthetic(samples = 640, vocab = 8192)", "batch": 64},
    devices={"gpus": 1, "kind": "a100_80g"},
    train={"steps": 20, "optimizer": "adamw(lr = 0.001)", "precision": "bf16"},
)


def planned(folder: Path, *settings: str, job: str = JOB) -> tuple[Compiled, StepEstimate]:
    (folder / "job.plt").write_text(job)
    plan = compiled(folder / "job.plt", *settings)
    assert plan.analysis.estimate is not None
    return plan, plan.analysis.estimate


def test_a_step_takes_the_times_of_its_products_attention_loss_and_update(tmp_path: Path) -> None:
    plan, found = planned(tmp_path)
    fit, bandwidth = read_fit("a100_80g"), CATALOGUE["a100_80g"].bandwidth
    assert bandwidth is not None and plan.analysis.model is not None
    rows, width = 64 * 1024, 1024
    sizes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]  # of a block
    head = [(width, 8192)]

    def products(shapes: list[tuple[int, int]]) -> float:
        flops = sum(2 * rows * k * n for k, n in shapes)
        moved = sum(2 * (rows * k + k * n + rows * n) for k, n in shapes)
        return flops / 312e12 / fit.products + moved / bandwidth / fit.memory

    attention = 64 * 4 * 1024**2 * width / 312e12 / fit.attention
    loss = 4 * rows * 8192 / bandwidth / fit.loss
    passes = 3 * (4 * (products(sizes) + attention) + products(head) + loss)
    update = 28 * plan.analysis.model.parameters / bandwidth / fit.update
    assert (found.source, found.fit) == ("published", "a100_80g")
    assert found.arithmetic == pytest.approx(passes, rel=1e-6) and found.update == pytest.approx(update)
    assert found.step_time == pytest.approx(passes + update + fit.rest, rel=1e-3)


def test_the_host_is_waited_for_where_kernels_are_short(tmp_path: Path) -> None:
    _, found = planned(tmp_path, "data.batch=1", "model.network.context=256", "devices.kind=h200")
    launch = read_fit("h200").launch * (4 * 4 + 1) * 1.5  # half as long in the backward pass
    assert found.arithmetic < launch < found.arithmetic + found.launches < 1.2 * launch
    assert slower_of(3.0, 0.0) == 3.0 and slower_of(1.0, 10.0) == pytest.approx(10.0, rel=1e-3)


def test_collectives_wait_for_their_ranks_and_bytes(tmp_path: Path) -> None:
    plan, found = planned(tmp_path, "devices.gpus=4", "parallelism.tensor=4")
    fit, link = read_fit("a100_80g"), CATALOGUE["a100_80g"].link
    inside = [t for t in plan.analysis.costs[0].traffic if t.axis == "tensor"]
    assert link is not None and inside
    moved = sum(
        (2 if t.operation == "all_reduce" else 1) * t.bytes * (4 if t.operation == "all_gather" else 1) * 3 / 4
        for t in inside
    )
    latency = fit.latency * math.log2(4) * sum(t.count for t in inside)
    assert found.transfers == pytest.approx(moved / link / fit.links + latency, rel=1e-6)


@pytest.mark.parametrize(
    "settings, source, fit",
    [
        ((), "published", "a100_80g"),
        (("devices.kind=h100",), "published", "h200"),
        (("devices.kind=l40s",), "published", "a100_40g"),
        (("train.precision=fp16",), "published", "a100_80g"),
        (("train.compile=true",), "published", "a100_80g"),
        (("train.precision=fp32",), "bound", ""),
        (("devices.kind=v100",), "bound", ""),  # has no bf16
        (("devices.kind=v100", "train.precision=fp16"), "published", "a100_40g"),
        (("model.network.width=128",), "bound", ""),
        (("model.network.context=128",), "bound", ""),
        (("devices.gpus=2", "parallelism.gradients=fp16()"), "bound", ""),
        (("devices.gpus=2", "parallelism.zero=3", "memory.offload=[optimizer, parameters]"), "bound", ""),
    ],
)
def test_a_fit_serves_transformers_like_those_of_its_runs(
    settings: tuple[str, ...], source: str, fit: str, tmp_path: Path
) -> None:
    plan, found = planned(tmp_path, *settings)
    assert (found.source, found.fit) == (source, fit)
    said = explain(plan.plan)
    assert ("at best" in said) == (source == "bound")
    kind = plan.analysis.layout.hardware.kind
    assert (f"by the published times of {fit}, the most similar kind" in said) == (fit not in ("", kind))
    assert ("what compiling saves is not known" in said) == ("train.compile=true" in settings)


@pytest.mark.parametrize(
    "settings, said",
    [((), "published"), (("devices.kind=h100",), "published (as h200)"), (("train.precision=fp32",), "at best")],
)
def test_a_broken_promise_says_where_the_time_comes_from(settings: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "job.plt").write_text(JOB + "expect { step_time < 1us }\n")
    with pytest.raises(AssertionError, match="E0502") as error:
        compiled(tmp_path / "job.plt", *settings)
    assert said in str(error.value)


@pytest.mark.parametrize("network", ["resnet(depth = 18)", "mlp(widths = [4096, 4096])"])
def test_other_networks_keep_their_bound(network: str, tmp_path: Path) -> None:
    job = job_text(
        model={"network": network, "loss": "cross_entropy()"},
        data={"source": "synthetic(samples = 640, shape = [3, 64, 64], classes = 10)", "batch": 64},
        devices={"gpus": 1, "kind": "a100_80g"},
        train={"steps": 20, "optimizer": "sgd(lr = 0.1)", "precision": "bf16"},
    )
    assert planned(tmp_path, job=job)[1].source == "bound"


def test_a_kind_of_the_user_needs_its_bandwidth(tmp_path: Path) -> None:
    figures = '[card]\nmemory = "80GiB"\nfp32 = "60TFLOPS"\nbf16 = "900TFLOPS"\nfp16 = "900TFLOPS"\n'
    catalogue, settings = tmp_path / "cards.toml", ("devices.kind=card", f'devices.catalogue="{tmp_path}/cards.toml"')
    catalogue.write_text(figures)
    assert planned(tmp_path, *settings)[1].source == "bound"
    catalogue.write_text(figures + 'bandwidth = "4000GBps"\n')
    assert planned(tmp_path, *settings)[1].fit == "h200"
    catalogue.write_text(figures + 'bandwidth = "4000GBps"\nefficiency = 0.5\n')
    assert planned(tmp_path, *settings)[1].source == "estimated"


def test_catalogues_hold_shares_of_known_kinds() -> None:
    assert {"a100_40g", "a100_80g", "h200"} == set(fitted_kinds()) <= set(CATALOGUE)
    for kind in fitted_kinds():
        fit = read_fit(kind)
        shares = (fit.products, fit.memory, fit.attention, fit.loss, fit.update, fit.links)
        assert all(0 < share <= 1 for share in shares) and 0 <= fit.overlap <= 1 and 0 <= fit.scores <= 1
        assert fit.latency > 0 and fit.launch > 0 and nearest_fit(CATALOGUE[kind]) == fit


def test_published_runs_are_predicted_to_a_tenth_and_no_sooner_than_their_bound() -> None:
    runs = [run for run in read_runs() if run.source == "mosaicml/llm-foundry"][::6]
    found = errors(read_fit("a100_80g"), runs)
    assert np.median(np.abs(found)) < 0.06 and np.quantile(np.abs(found), 0.9) < 0.2
    for run in runs:
        staging, bound = run.analysis.staging, run.analysis.layout.hardware
        assert staging is not None and run.analysis.estimate is not None
        flops = max(cost.flops for cost in run.analysis.costs)
        assert run.analysis.estimate.step_time is not None and bound.flops_bf16 is not None
        assert estimate(staging, run.analysis.costs) == run.analysis.estimate
        assert run.analysis.estimate.step_time > flops / bound.flops_bf16


def test_a_fit_finds_the_constants_that_times_were_made_with() -> None:
    runs = [run for run in read_runs() if run.source == "mosaicml/llm-foundry"][::12]
    truth: dict[str, Any] = {"products": 0.7, "memory": 0.5, "attention": 0.4}
    made = [replace(run, seconds=run.estimate(replace(BEGIN, **truth)).step_time or 1.0) for run in runs]
    fit = fit_constants(BEGIN, tuple(truth), made)
    assert {name: getattr(fit, name) for name in truth} == pytest.approx(truth, rel=0.02)


def test_interleaving_gains_as_much_as_published() -> None:
    plain, interleaved = (row for row in FLOAT8 if row.what.startswith("405B") and "table 5" in row.what)
    speeds = []
    for row in (plain, interleaved):
        found = analysed(row)
        assert found.estimate is not None and found.estimate.source == "published"
        speeds.append(tokens(found, found.estimate))
    assert speeds[1] / speeds[0] == pytest.approx(interleaved.tokens / plain.tokens, rel=0.1)
