"""The cut into stages, compared with every possible cut; cuts that torch cannot run, or a device cannot hold, are not
taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from helpers.job_texts import job_text
from helpers.made_jobs import gpt_model, make_job
from hypothesis import given
from hypothesis import strategies as st

from dslc.compiler.cost.stages import balance, equal_counts, work
from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Report
from dslc.dsl.language import calls as c
from dslc.dsl.language import layers as s
from dslc.dsl.language.blocks import DataSpec, DevicesSpec, MemorySpec, ModelSpec, ParallelismSpec
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.load import load_text


def every_cut(layers: int, stages: int) -> Iterator[tuple[range, ...]]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(range(a, b) for a, b in itertools.pairwise((0, *cuts, layers)))


def slowest(costs: Sequence[float], cut: Sequence[range]) -> float:
    return max(sum(costs[n] for n in stage) for stage in cut)


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), stages=st.integers(1, 9))
def test_no_cut_has_a_faster_slowest_stage(costs: list[int], stages: int) -> None:
    stages = min(stages, len(costs))
    found = balance(costs, stages)
    assert found in list(every_cut(len(costs), stages))
    assert slowest(costs, found) == min(slowest(costs, cut) for cut in every_cut(len(costs), stages))


@given(
    layers=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=8),
    limits=st.lists(st.integers(0, 12), min_size=1, max_size=4),
)
def test_no_cut_within_the_bounds_of_its_stages_is_faster(layers: list[tuple[int, int]], limits: list[int]) -> None:
    limits = limits[: len(layers)]
    costs, sizes = [cost for cost, _ in layers], [size for _, size in layers]

    def fits(stage: int, first: int, end: int) -> bool:
        return sum(sizes[first:end]) <= limits[stage]

    def all_fit(cut: Sequence[range]) -> bool:
        return all(fits(n, stage[0], stage[-1] + 1) for n, stage in enumerate(cut))

    def begins(stage: int) -> list[range]:
        layers = range(len(costs) + 1)
        return [range(next((n for n in range(end) if fits(stage, n, end)), end), end) for end in layers]

    found = balance(costs, len(limits), begins)
    possible = [slowest(costs, cut) for cut in every_cut(len(costs), len(limits)) if all_fit(cut)]
    if not possible:
        assert found is None
    else:
        assert found is not None and all_fit(found)
        assert slowest(costs, found) == min(possible)


def test_equal_counts_differ_by_one_layer_at_most() -> None:
    assert equal_counts(8, 3) == (range(3), range(3, 6), range(6, 8))


# ------------------------------------------------------------------------------------------------------------ jobs


def analysed(**blocks: object) -> Analysis:
    report = Report()
    found = report.collect(analyse(pipelined(**blocks), Facts(), limits=False))
    assert found is not None and not report.errors, [d.message for d in report.errors]
    return found


def pipelined(**blocks: object) -> JobSpec:
    made = {
        "model": gpt_model(),
        "data": DataSpec(source=c.Stdlib(), batch=16),
        "devices": DevicesSpec(cpus=2),
        "parallelism": ParallelismSpec(pipeline=2, microbatches=4),
    }
    return make_job(**(made | blocks))


def stages(found: Analysis) -> tuple[range, ...]:
    assert found.pipeline is not None
    return found.pipeline.stages


def test_embedding_and_head_are_counted() -> None:
    found = analysed(model=gpt_model(vocab=4096))  # a head as heavy as several blocks
    assert found.model is not None
    costs = [work(layer) for layer in found.model.layers]
    first, last = stages(found)
    assert len(first) > len(last)
    assert slowest(costs, (first, last)) < slowest(costs, equal_counts(len(costs), 2))


def test_a_stage_that_does_not_fit_is_cut_elsewhere() -> None:
    # Under 1f1b the first of four stages has four micro-batches in flight, the last one.
    four = {
        "model": gpt_model(layers=12),
        "devices": DevicesSpec(cpus=4),
        "parallelism": ParallelismSpec(pipeline=4, microbatches=4),
    }
    free = analysed(**four)
    peak = max(cost.memory.peak for cost in free.costs)
    for percent in (80, 90):
        bounded = analysed(**four, memory=MemorySpec(limit=peak * percent // 100))
        assert stages(bounded) != stages(free)
        assert max(cost.memory.peak for cost in bounded.costs) <= peak * percent // 100
    none = analysed(**four, memory=MemorySpec(limit=peak // 10))
    assert stages(none) == stages(free)  # the fastest, which is refused


def test_each_stage_has_something_to_train_and_sends_numbers() -> None:
    network = (s.Embedding(vocab=256, width=8), s.ReLU(), s.ReLU(), s.ReLU(), s.Linear(features=256))
    found = analysed(
        model=ModelSpec(network=network, loss=c.CrossEntropy()),
        data=DataSpec(source=c.Stdlib(context=16), batch=16),
    )
    assert found.model is not None
    for stage in stages(found):
        assert any(found.model.layers[n].parameters for n in stage)


def test_ranks_without_anything_to_train_are_refused() -> None:
    job = pipelined()
    frozen = replace(job, model=replace(job.model, freeze=("embedding*", "position*", "blocks.0.*", "blocks.1.*")))
    by_hand = replace(frozen, parallelism=replace(job.parallelism, stages=(4, 4)))
    for changed, wrong in ((frozen, []), (by_hand, ["E0432"])):
        report = Report()
        report.collect(analyse(changed, Facts(), limits=False))
        assert [d.code for d in report.errors] == wrong


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize(("data", "context"), [(2, 1), (1, 2)])
def test_what_a_split_backward_pass_cannot_do(data: int, context: int, schedule: str) -> None:
    job = pipelined(
        devices=DevicesSpec(cpus=4),
        parallelism=ParallelismSpec(data=data, context=context, pipeline=2, zero=3, schedule=schedule, microbatches=4),
        memory=MemorySpec(recompute="selective"),
    )
    job = replace(job, train=replace(job.train, compile=True))
    report = Report()
    report.collect(analyse(job, Facts(), limits=False))
    assert sorted(d.code for d in report.errors) == ["E0414", "E0430", "E0431"]


def test_a_tied_weight_takes_memory_on_both_its_ranks() -> None:
    tied, apart = (analysed(model=gpt_model(vocab=1024, tie=tie)) for tie in (True, False))
    assert [cost.memory.parameters for cost in tied.costs] == [cost.memory.parameters for cost in apart.costs]


def test_a_pair_is_two_rows_of_a_stage() -> None:
    """A limit has the cut compared with the account, whose figures are the plan's."""
    job = load_text(
        job_text(
            model={"network": "gpt(layers = 4, width = 32, heads = 4, context = 24, vocab = 64)", "loss": "simpo()"},
            data={"source": 'preferences("pairs.jsonl", tokenizer = "tokenizer")', "batch": 8},
            devices={"cpus": 2},
            parallelism={"pipeline": 2},
            train={"steps": 5},
        )
    ).job
    assert job is not None
    tokens = TensorFact(shape=(24,), dtype="int64")
    facts = Facts(source=SourceFacts(samples=100, input=tokens, target=tokens, vocab=64))
    peaks = []
    for limit in (None, 2**30):
        analysis = Report().collect(analyse(replace(job, memory=MemorySpec(limit=limit)), facts))
        assert analysis is not None
        peaks.append([cost.memory.peak for cost in analysis.costs])
    assert peaks[0] == peaks[1]


def test_stages_are_cut_beside_an_expert_axis_that_does_not_fit() -> None:
    job = make_job(
        model=ModelSpec(network=s.GPT(layers=4, width=32, heads=4, context=24, vocab=64), loss=c.CrossEntropy()),
        data=DataSpec(source=c.Synthetic(samples=100, context=24, vocab=64), batch=8),
        devices=DevicesSpec(cpus=4, backend="shared_memory"),
        parallelism=ParallelismSpec(pipeline=2, expert=4),
        memory=MemorySpec(limit=2**30),
    )
    report = Report()
    assert report.collect(analyse(job, Facts())) is None
    assert "E0450" in [found.code for found in report.errors]
