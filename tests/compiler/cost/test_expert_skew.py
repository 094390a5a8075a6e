"""A stated skew of the routing to experts in the plan: memory, traffic and time of the busiest rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.planning import compiled
from hypothesis import given, settings
from hypothesis import strategies as st

from dslc.compiler.ir.facts import Facts
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.show.explain import explain
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load

JOB = """
model {
  network = llama(
    layers = 2, width = 32, heads = 2, context = 16, vocab = 64, hidden = 64, dense_layers = 1,
    experts = moe(experts = 8, top_k = 2, hidden = 32),
  )
  loss = cross_entropy()
}
data {
  source = synthetic(vocab = 64)
  batch  = 32
}
devices {
  gpus = 4
  kind = "h100"
}
parallelism {
  expert = 2
}
train {
  steps     = 2
  optimizer = adamw()
  precision = bf16
}
"""
PLANS = (
    (),
    ("parallelism.zero=3", "memory.recompute=full"),
    ("parallelism.zero=2", "parallelism.microbatches=2"),
    ("parallelism.tensor=2",),
    ("parallelism.context=2",),
    ("parallelism.pipeline=2", "parallelism.microbatches=2"),
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("skew") / "job.plt"
    path.write_text(JOB)
    return path


def _plan(job: Path, skew: float | None, *others: str) -> PlanView:
    stated = () if skew is None else (f"parallelism.expert_skew={skew!r}",)
    return compiled(job, *stated, *others).plan


def _peak(plan: PlanView) -> int:
    return max(node.memory.peak for node in plan.ranks)


@pytest.mark.parametrize("others", PLANS)
def test_a_skew_of_1_is_an_even_routing(job: Path, others: tuple[str, ...]) -> None:
    even, one = _plan(job, None, *others), _plan(job, 1.0, *others)
    assert [(n.memory, n.traffic, n.flops) for n in one.ranks] == [(n.memory, n.traffic, n.flops) for n in even.ranks]
    assert [node.even_memory for node in one.ranks] == [node.memory for node in even.ranks]
    assert all(node.even_memory is None for node in even.ranks)
    assert one.step == even.step and even.step is not None and even.step.step_time


@settings(max_examples=12, deadline=None)
@given(skews=st.tuples(st.floats(1, 2), st.floats(1, 2)).map(sorted), others=st.sampled_from(PLANS))
def test_a_larger_skew_costs_no_less(job: Path, skews: list[float], others: tuple[str, ...]) -> None:
    smaller, larger = (_plan(job, skew, *others) for skew in skews)
    assert _peak(smaller) <= _peak(larger)
    assert smaller.step_time is not None and larger.step_time is not None
    assert smaller.step_time <= larger.step_time
    for node, other in zip(smaller.ranks, larger.ranks, strict=True):
        assert node.flops <= other.flops
        assert node.traffic == other.traffic, "bytes are those of an even routing"
        assert node.even_memory == other.even_memory


def test_the_busiest_rank_works_on_as_many_times_the_rows(job: Path) -> None:
    even, twice = _plan(job, 1.0), _plan(job, 2.0)
    tokens, top_k, width, hidden = 8 * 16, 2, 32, 32
    assert twice.ranks[0].flops - even.ranks[0].flops == 3 * tokens * top_k * 6 * width * hidden
    text = explain(twice)
    assert "this is for the busiest rank at a skew of 2" in text
    assert "even; 32 KiB at skew 2" in text and "even;" not in explain(_plan(job, None))


def test_a_limit_of_memory_holds_for_the_stated_skew(job: Path) -> None:
    even, twice = _peak(_plan(job, None)), _peak(_plan(job, 2.0))
    assert even < twice
    for skew, codes in (("none", []), ("2.0", ["E0501"])):
        loaded, report = load(str(job), [f"parallelism.expert_skew={skew}", f"memory.limit={even}B"]), Report()
        assert loaded.job is not None
        report.collect(analyse(loaded.job, Facts()))
        assert [error.code for error in report.errors] == codes
