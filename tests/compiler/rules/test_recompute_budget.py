"""The blocks that `memory.recompute = budget(…)` recomputes, compared with all choices."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations

import pytest
from helpers.job_texts import job_text
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dslc.compiler.compile import compile_plan
from dslc.compiler.cost.cost import rank_costs
from dslc.compiler.ir.facts import Facts
from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.placement.staging import Staging
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.rules.choice import recompute_budget
from dslc.compiler.show.explain import explain
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.blocks import RecomputeBudget
from dslc.dsl.meaning.load import load_text

BLOCKS = (
    "transformer_block(heads = 2)",
    "transformer_block(heads = 2, ratio = 12)",
    "attention(heads = 2)",
    "residual([layer_norm(), linear(16), gelu()])",
    "linear(16)",
    "gelu()",
    "transformer_block(heads = 2, dropout = 0.1)",
)
PLANS = (
    ("devices.cpus=1",),
    ("devices.cpus=1", "parallelism.microbatches=2"),
    ("devices.cpus=2", "parallelism.zero=3"),
    ("devices.cpus=2", "parallelism.tensor=2"),
    ("devices.cpus=2", "parallelism.pipeline=2", "parallelism.microbatches=4"),
    ("devices.cpus=2", "parallelism.pipeline=2", "parallelism.microbatches=4", "parallelism.schedule=gpipe"),
    ("devices.cpus=4", "parallelism.pipeline=2", "parallelism.microbatches=2", "parallelism.zero=2"),
    ("devices.cpus=2", "parallelism.pipeline=2", "parallelism.microbatches=4",
     "parallelism.schedule=interleaved_1f1b", "parallelism.virtual_stages=2"),
)  # fmt: skip


def analysed(blocks: tuple[str, ...], *changes: str, is_limited: bool = False) -> tuple[Analysis, Report]:
    text = job_text(
        model={
            "network": f"[embedding(width = 16), {', '.join(blocks)}, layer_norm(), linear(256)]",
            "loss": "cross_entropy()",
        },
        data={"source": "stdlib(context = 32)", "batch": 8},
        devices={"cpus": 1},
        train={"steps": 4, "optimizer": "adamw()"},
    )
    loaded = load_text(text, settings=changes)
    assert loaded.job is not None, loaded.report.found
    report = Report()
    analysis = report.collect(analyse(loaded.job, Facts(), limits=is_limited))
    assert analysis is not None and analysis.staging is not None, report.found
    return analysis, report


def with_blocks(staging: Staging, blocks: tuple[str, ...]) -> tuple[int, int]:
    """Returns the highest peak and the FLOPs of all ranks if these blocks are recomputed."""
    budget = RecomputeBudget(peak=1, blocks=blocks)
    job = replace(staging.job, memory=replace(staging.job.memory, recompute=budget))
    costs = rank_costs(replace(staging, job=job))
    return max(cost.memory.peak for cost in costs), sum(cost.flops for cost in costs)


@settings(max_examples=12, deadline=None)
@given(
    blocks=st.lists(st.sampled_from(BLOCKS), min_size=3, max_size=5),
    plan=st.sampled_from(PLANS),
    precision=st.sampled_from(("fp32", "bf16")),
    part=st.floats(0, 1),
)
@example(blocks=[*BLOCKS[:1] * 2, BLOCKS[2]], plan=PLANS[-1], precision="fp32", part=0.5)  # stages of two layers
def test_the_choice_is_the_cheapest_of_all(
    blocks: list[str], plan: tuple[str, ...], precision: str, part: float
) -> None:
    plan = (*plan, f"train.precision={precision}")
    staging = analysed(tuple(blocks), *plan, "memory.recompute=full")[0].staging
    assert staging is not None
    names = [layer.name for layer in staging.model.layers if layer.recomputable]
    subsets = [subset for n in range(len(names) + 1) for subset in combinations(names, n)]
    by_choice = {subset: with_blocks(staging, subset) for subset in subsets}
    peaks = sorted(peak for peak, _ in by_choice.values())
    budget = int(peaks[0] + part * (peaks[-1] - peaks[0]))
    chosen = recompute_budget.choose_recomputation(with_budget(staging, budget))[0].memory.recompute
    assert isinstance(chosen, RecomputeBudget) and chosen.blocks is not None and chosen.exact
    peak, flops = with_blocks(staging, chosen.blocks)
    assert peak <= budget
    assert flops == min(flops for peak, flops in by_choice.values() if peak <= budget)
    lowest = recompute_budget.choose_recomputation(with_budget(staging, peaks[0] - 1))[0].memory.recompute
    assert isinstance(lowest, RecomputeBudget) and lowest.blocks is not None
    assert with_blocks(staging, lowest.blocks)[0] == peaks[0]


def test_the_plan_and_the_remedies_name_the_choice() -> None:
    blocks = 4 * BLOCKS[:1]
    whole = analysed(blocks, "memory.recompute=none")[0]
    limit = 7 * whole.costs[0].memory.peak // 10
    _, report = analysed(blocks, f"memory.limit={limit}B", is_limited=True)
    (error,) = report.errors
    offered = re.findall(r"`(memory\.recompute) = (budget\(.*?\))`: peak (.*?),", error.help)
    assert error.code == "E0501" and len(offered) == 1, error.help
    setting = "=".join(offered[0][:2])
    chosen, report = analysed(blocks, f"memory.limit={limit}B", setting, is_limited=True)
    assert not report.errors and chosen.costs[0].memory.peak <= limit
    assert offered[0][2] == byte_text(chosen.costs[0].memory.peak)
    text = explain(compile_plan(chosen).plan)
    line = next(line for line in text.splitlines() if line.strip().startswith("recomputed"))
    assert re.search(r"3 of 4 blocks \(1, 2, 3\), for a peak of ", line), line
    assert chosen.job.memory.recompute.blocks == ("1", "2", "3")  # type: ignore[union-attr]
    assert recompute_budget.without_choice(chosen.job).memory.recompute.blocks is None  # type: ignore[union-attr]


def test_many_unlike_blocks_are_thinned_and_the_choice_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_budget, "MOST_STATES", 2)
    blocks = tuple(f"transformer_block(heads = 2, ratio = {n})" for n in range(1, 6))
    whole = analysed(blocks, "memory.recompute=none")[0].costs[0].memory.peak
    analysis, _ = analysed(blocks, f"memory.recompute=budget({3 * whole // 4}B)")
    budget = analysis.job.memory.recompute
    assert isinstance(budget, RecomputeBudget) and not budget.exact
    assert analysis.costs[0].memory.peak <= budget.peak


def test_some_of_many_choices_are_compared_and_the_choice_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight blocks on each rank, in stages of two: most choices have a peak of their own."""
    monkeypatch.setattr(recompute_budget, "MOST_ACCOUNTS", 4)
    plan = ("devices.cpus=2", "parallelism.pipeline=2", "parallelism.microbatches=8",
            "parallelism.schedule=interleaved_1f1b", "parallelism.virtual_stages=4")  # fmt: skip
    blocks = 16 * BLOCKS[:1]
    highest, lowest = (peak_of(analysed(blocks, *plan, f"memory.recompute={what}")[0]) for what in ("none", "full"))
    analysis, _ = analysed(blocks, *plan, f"memory.recompute=budget({(highest + lowest) // 2}B)")
    budget = analysis.job.memory.recompute
    assert isinstance(budget, RecomputeBudget) and budget.blocks is not None and not budget.exact
    assert peak_of(analysis) <= budget.peak and len(budget.blocks) < len(blocks)
    analysis, _ = analysed(blocks, *plan, "memory.recompute=budget(1B)")
    assert peak_of(analysis) <= lowest


def peak_of(analysis: Analysis) -> int:
    return max(cost.memory.peak for cost in analysis.costs)


def with_budget(staging: Staging, budget: int) -> Staging:
    memory = replace(staging.job.memory, recompute=RecomputeBudget(peak=budget))
    return replace(staging, job=replace(staging.job, memory=memory))
