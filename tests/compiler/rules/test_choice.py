"""The choice of a plan: what a search prices is what `check` says of the written job, and the best of it is chosen."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from helpers.job_texts import job_text
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dslc.compiler.cost.reuse import Reuse
from dslc.compiler.facts.sources import context_of, source_facts
from dslc.compiler.ir.facts import Facts
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.rules.choice import search
from dslc.compiler.rules.choice.choice_text import chosen_line
from dslc.compiler.rules.choice.choose import choose_plan
from dslc.compiler.rules.choice.plan_choice import PlanChoice, PricedPlan, ordered
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.auto_fields import SEARCHED, auto_fields, settings_text
from dslc.dsl.meaning.load import load_text
from dslc.dsl.meaning.write import write

GPT = job_text(
    model={"network": "gpt(layers = 2, width = 16, heads = 2, context = 8, vocab = 16)", "loss": "cross_entropy()"},
    data={"source": "synthetic(samples = 64, vocab = 16)", "batch": 4},
    devices={"gpus": 2, "kind": "a100_80g"},
    train={"steps": 4, "optimizer": "adamw()"},
)
CONVNET = job_text(
    model={
        "network": "[conv2d(4, kernel = 3), batch_norm(), relu(), flatten(), linear(10)]",
        "loss": "cross_entropy()",
    },
    data={"source": "digits()", "batch": 8},
    devices={"gpus": 2, "kind": "a100_80g"},
    train={"steps": 4, "optimizer": "sgd(lr = 0.1)"},
)
EXPERTS = job_text(
    model={
        "network": "llama(layers = 2, width = 16, heads = 2, context = 8, vocab = 16, experts = moe(4, 2, 8))",
        "loss": "cross_entropy()",
    },
    data={"source": "synthetic(samples = 64, vocab = 16)", "batch": 8},
    devices={"gpus": 4, "kind": "a100_80g"},
    train={"steps": 4, "optimizer": "adamw()"},
)
WRITTEN = {  # values of the searched fields, as a user might write them, those without an effect too
    "parallelism.pipeline": (1, 2),
    "parallelism.tensor": (1, 2, 4),
    "parallelism.context": (1, 2),
    "parallelism.zero": (0, 1, 2, 3),
    "parallelism.replicas": (1, 2),
    "parallelism.expert": (1, 2, 4),
    "parallelism.microbatches": (1, 2, 4),
    "parallelism.schedule": ("1f1b", "gpipe", "interleaved_1f1b", "zbv"),
    "memory.recompute": ("none", "full", "every(2)", "selective"),
}


def load_job(text: str, *changes: str) -> JobSpec:
    loaded = load_text(text, settings=changes)
    assert loaded.job is not None, loaded.report.found
    return loaded.job


def checked(text: str, *changes: str) -> tuple[Analysis | None, Report]:
    report = Report()
    return report.collect(analyse(load_job(text, *changes), facts_of(text))), report


@cache
def facts_of(text: str) -> Facts:
    job = load_job(text)
    return Facts(source=source_facts(job.data.source, context_of(job)))


def choose(text: str, *changes: str, fields: tuple[str, ...] = ()) -> tuple[PlanChoice | None, Report]:
    job, report = load_job(text, *changes), Report()
    facts = facts_of(text)
    return report.collect(choose_plan(job, fields or auto_fields(job), lambda _: (facts, ()), Reuse())), report


def figures(analysis: Analysis) -> tuple[float | None, int, float]:
    assert analysis.estimate is not None and analysis.pipeline is not None
    peak = max(cost.memory.peak for cost in analysis.costs)
    return analysis.estimate.step_time, peak, analysis.pipeline.bubble


def plan_values(analysis: Analysis, fields: tuple[str, ...]) -> dict[str, object]:
    """Returns the values of a written job as a search has them: defaults where a value has no effect."""
    job, layout = analysis.job, analysis.layout
    values: dict[str, object] = {
        f"parallelism.{name}": getattr(job.parallelism, name)
        for name in ("pipeline", "tensor", "context", "zero", "replicas", "expert", "schedule")
    }
    values |= {"parallelism.data": layout.sizes["data"], "memory.recompute": job.memory.recompute}
    if "parallelism.microbatches" in fields:
        values["parallelism.microbatches"] = layout.microbatches
    if "parallelism.virtual_stages" in fields:
        values["parallelism.virtual_stages"] = layout.virtual_stages
    if layout.sizes["data"] * layout.sizes["context"] == 1:
        values["parallelism.zero"] = 0
    if values["parallelism.zero"] == 0:
        values["parallelism.replicas"] = 1
    if layout.sizes["pipeline"] == 1:
        values |= {"parallelism.schedule": "1f1b", "parallelism.virtual_stages": None}
    return {path: values.get(path) for path in SEARCHED} | {"memory.offload": ()}


AXES = ("parallelism.data", "parallelism.pipeline", "parallelism.tensor", "parallelism.context")
SPACES = (  # a job, what is set in it, and the fields that are searched besides the axes
    (GPT, ("devices.gpus=4",), ("parallelism.zero", "parallelism.replicas")),
    (GPT, ("devices.gpus=4", "memory.limit=1535MiB"), ("parallelism.microbatches", "memory.recompute")),
    (GPT, ("devices.gpus=2",), ("parallelism.microbatches", "parallelism.schedule", "parallelism.virtual_stages")),
    (EXPERTS, (), ("parallelism.zero", "parallelism.replicas", "parallelism.expert")),
    (CONVNET, ("devices.gpus=2",), ("parallelism.zero", "parallelism.microbatches", "memory.recompute")),
)


@cache
def space_of(number: int) -> tuple[PlanChoice, dict[tuple[str, ...], PricedPlan]]:
    text, changes, fields = SPACES[number]
    choice, _ = choose(text, *changes, fields=(*AXES, *fields))
    assert choice is not None and choice.is_exact
    return choice, {settings_text(plan.values): plan for plan in choice.plans if not plan.code}


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.integers(0, len(SPACES) - 1), st.integers(0, 10_000))
def test_a_priced_plan_has_the_figures_of_the_written_job(number: int, place: int) -> None:
    text, changes, _ = SPACES[number]
    choice, _ = space_of(number)
    plan = choice.plans[place % len(choice.plans)]
    analysis, report = checked(text, *changes, *settings_text(plan.settings))
    if plan.code:
        assert report.errors[0].code == plan.code
        return
    assert analysis is not None and figures(analysis) == (plan.step_time, plan.peak, plan.bubble)
    assert not report.errors if plan.is_admissible else {error.code for error in report.errors} == {"E0501"}


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.integers(0, len(SPACES) - 1), st.data())
def test_a_written_job_that_check_accepts_is_priced_at_its_figures(number: int, data: st.DataObject) -> None:
    text, changes, fields = SPACES[number]
    searched = [path for path in WRITTEN if path in (*AXES, *fields)]
    values = {path: data.draw(st.sampled_from(WRITTEN[path])) for path in searched}
    analysis, report = checked(text, *changes, *(f"{path}={value}" for path, value in values.items()))
    if analysis is not None and {error.code for error in report.errors} <= {"E0501"}:
        plan = space_of(number)[1][settings_text(plan_values(analysis, fields))]
        assert figures(analysis) == (plan.step_time, plan.peak, plan.bubble)
        assert plan.fits == (not report.errors)


def test_the_fastest_plan_that_fits_and_keeps_its_promises_is_chosen() -> None:
    changes, fields = ("devices.gpus=4",), (*AXES, "parallelism.zero", "parallelism.microbatches")
    free, _ = choose(GPT, *changes, fields=fields)
    assert free is not None and free.plan is not None
    least = min(plan.peak for plan in free.plans if not plan.code)
    limit = (free.plan.peak + least) // 2
    choice, report = choose(GPT, *changes, f"memory.limit={limit}B", "expect.traffic<64KiB", fields=fields)
    assert choice is not None and choice.plan is not None and not report.found
    kept = [plan for plan in free.plans if not plan.code and plan.peak <= limit and plan.traffic < 2**16]
    assert choice.plan.step_time == min(plan.step_time for plan in kept if plan.step_time is not None)
    assert any(not plan.code and not plan.fits for plan in choice.plans), "the limit leaves plans out"
    assert any(plan.fits and plan.broken_promises for plan in choice.plans), "and so does the promise"
    assert choice.front[0].step_time == choice.plan.step_time
    assert all(a.peak > b.peak for a, b in pairwise(choice.front))


def test_a_device_keeps_a_margin_of_its_memory_free_if_a_plan_does() -> None:
    plan = PricedPlan(values=dict.fromkeys(SEARCHED, 1), step_time=1.0, peak=97, limit=100, margin=5)
    values = {**plan.values, "parallelism.data": 2}
    other = PricedPlan(values=values, step_time=2.0, peak=90, limit=100, margin=5)
    assert ordered([plan, other]) == [other, plan]
    choice = PlanChoice(fields=(), plans=(plan, other), plan=other, is_exact=True, space=2)
    assert "free" in choice.why_not(plan)


def test_a_measured_time_is_not_compared_with_a_bound() -> None:
    values = dict.fromkeys(SEARCHED, 1)
    bound = PricedPlan(values=values, step_time=1.0, lacks="times of stages")
    measured = PricedPlan(values={**values, "parallelism.data": 2}, step_time=2.0, source="measured")
    assert ordered([bound, measured]) == [measured]
    choice = PlanChoice(fields=(), plans=(bound, measured), plan=measured, is_exact=True, space=2)
    assert "times of stages" in choice.why_not(bound)


def test_no_plan_is_chosen_that_changes_the_statistics_of_a_batch() -> None:
    choice, _ = choose(CONVNET, "parallelism.microbatches=auto", "parallelism.zero=auto")
    assert choice is not None and choice.plan is not None
    assert choice.plan.values["parallelism.microbatches"] == 1 and not choice.plan.warnings
    assert any("W0606" in plan.warnings for plan in choice.plans)


@pytest.mark.parametrize("changes", [(), ("memory.limit=1550MiB",), ("data.batch=12", "devices.gpus=3")])
def test_a_bounded_search_is_as_good_as_an_exact_one(changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    fields = (*AXES, "parallelism.zero", "parallelism.microbatches", "parallelism.schedule", "memory.recompute")
    exact, _ = choose(GPT, *changes, fields=fields)
    monkeypatch.setattr(search, "EXACT", 0)
    bounded, _ = choose(GPT, *changes, fields=fields)
    assert exact is not None and bounded is not None and exact.is_exact and not bounded.is_exact
    assert len(bounded.plans) < len(exact.plans)
    exact_plans = {plan.text(): plan for plan in exact.plans}
    for plan in bounded.plans:
        same = exact_plans[plan.text()]
        assert (plan.peak, plan.code) == (same.peak, same.code)
        assert plan.step_time == same.step_time if plan.is_timed else not plan.fits
    assert (exact.plan is None) == (bounded.plan is None)
    if exact.plan is not None and bounded.plan is not None:
        assert bounded.plan.step_time == pytest.approx(exact.plan.step_time, rel=0.02)


def test_whole_sequences_and_pieces_are_both_tried_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = ("devices.gpus=none", "devices.kind=none", "devices.cpus=2")
    fields = ("parallelism.data", "parallelism.tensor", "parallelism.sequence")
    choice, _ = choose(GPT, *cpus, fields=fields)
    assert choice is not None and choice.is_exact
    peaks = {plan.text(): plan.peak for plan in choice.plans}
    assert set(peaks) == {"data 2", "data 1, tensor 2", "data 1, tensor 2, sequence true"}
    assert peaks["data 1, tensor 2, sequence true"] < peaks["data 1, tensor 2"]
    monkeypatch.setattr(search, "EXACT", 0)
    bounded, _ = choose(GPT, *cpus, f"memory.limit={peaks['data 1, tensor 2'] - 1}B", fields=fields)
    assert bounded is not None and {plan.text() for plan in bounded.plans if plan.fits} >= {
        "data 1, tensor 2, sequence true"
    }
    on_gpus, _ = choose(GPT, fields=fields)
    assert on_gpus is not None and {plan.text() for plan in on_gpus.plans} == {"data 2", "data 1, tensor 2"}


def test_a_search_that_leaves_out_splits_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in {"EXACT": 0, "MANY_SPLITS": 1, "MANY_SPLITS_WORK": 20, "REFINED_WORK": 60}.items():
        monkeypatch.setattr(search, name, most)
    choice, _ = choose(GPT, fields=SEARCHED)
    assert choice is not None and choice.plan is not None
    priced, splits = choice.splits
    assert 0 < priced < splits and f"in {priced} of {splits} splits into axes" in chosen_line(choice)
    assert choice.plans[0].values["parallelism.data"] == 2  # those with the most data ranks come first


def test_only_what_is_left_to_the_compiler_is_searched_and_it_is_written_as_auto() -> None:
    changes = ("devices.gpus=4", "parallelism.tensor=auto", "parallelism.zero=1", "parallelism.microbatches=2")
    choice, _ = choose(GPT, *changes)
    assert choice is not None and choice.plan is not None
    assert {plan.values["parallelism.tensor"] for plan in choice.plans} == {1, 2, 4}
    assert {(plan.values["parallelism.zero"], plan.values["parallelism.microbatches"]) for plan in choice.plans} == {
        (1, 2)
    }
    text = write(load_job(GPT, *changes))
    assert "tensor       = auto" in text
    assert auto_fields(load_job(text)) == ("parallelism.tensor",)
    assert auto_fields(load_job(GPT, "memory=auto")) == ("memory.recompute", "memory.offload")


def test_memory_moves_to_the_host_only_if_nothing_fits_without() -> None:
    roomy, _ = choose(GPT, "memory=auto")
    assert roomy is not None and {plan.values["memory.offload"] for plan in roomy.plans} == {()}
    least = min(plan.peak for plan in roomy.plans)
    tight, _ = choose(GPT, "memory.recompute=auto", "memory.offload=auto", f"memory.limit={least - 1}B")
    assert tight is not None and any(plan.values["memory.offload"] for plan in tight.plans)
    assert tight.plan is None or tight.plan.moved_kinds()
