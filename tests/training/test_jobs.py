"""Properties of every job: drawn from the registry, or made to fit together, or damaged at random.

Checked, planned, proved, formatted and parsed again; every sample of every global batch on exactly one rank; a
diagnostic or a plan, never a traceback.
"""

from __future__ import annotations

import json

import pytest
import torch
from helpers.paths import ROOT
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from dslc.compiler.compile import compile_plan
from dslc.compiler.graph.plan_view import plan_view
from dslc.compiler.graph.stored import restore, store
from dslc.compiler.ir.facts import Facts
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.show.explain import explain, explain_rank
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.load import load_text
from dslc.dsl.show import render, to_json
from dslc.dsl.source import Source
from dslc.dsl.syntax.format import format_document
from dslc.dsl.syntax.parser import parse
from dslc.jobs.check_job import inspect
from dslc.runtime.data.sampler import micro_batches, permutation
from dslc.testing.registry_strategies import job_specs, job_texts

EXAMPLES = sorted((ROOT / "examples").glob("*.plt"))
unhurried = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])

IMAGES = (
    "[conv2d({a}, padding = 1), batch_norm(), relu(), max_pool2d(2), flatten(), linear(10)]",
    "[conv2d({a}, kernel = 5), relu(), residual([conv2d({a}, padding = 1)]), flatten(), layer_norm(), linear(10)]",
    "[repeat({b}, [conv2d({a}, padding = 1), relu()]), adaptive_avg_pool2d(1), flatten(), linear(10)]",
    "mlp(widths = [{a}, {b}])",
    "convnet(channels = [{a}, {b}])",
    "resnet(width = {a}, stem = small)",
    "vit(patch = 2, layers = {b}, width = 8, heads = {h})",
)
TOKENS = (
    "gpt(layers = {b}, width = 8, heads = {h}, context = 16, vocab = 256, tie = {t})",
    "[embedding(width = {a}), lstm({a}), linear(256)]",
    "[embedding(width = 8), positional_embedding(), repeat({b}, [transformer_block(heads = {h})]), linear(256)]",
)


@st.composite
def fitting(draw: st.DrawFn) -> str:
    """A job whose parts are chosen for one another; most of them can be planned."""
    tokens = draw(st.booleans())
    network = draw(st.sampled_from(TOKENS if tokens else IMAGES)).format(
        a=draw(st.integers(1, 9)), b=draw(st.integers(1, 4)), h=draw(st.sampled_from([1, 2, 4])),
        t=draw(st.sampled_from(["true", "false"])),
    )  # fmt: skip
    source = draw(
        st.sampled_from(
            ["stdlib(context = 16)", "synthetic(samples = 300, vocab = 256, context = 16)"]
            if tokens
            else ["digits()", "synthetic(samples = 300, shape = [1, 8, 8], classes = 10)"]
        )
    )
    axes = {"data": draw(st.integers(1, 4))}
    if draw(st.booleans()):
        axes["pipeline"] = draw(st.sampled_from([1, 2, 3]))
        if tokens:
            axes |= {"tensor": draw(st.sampled_from([1, 2])), "context": draw(st.sampled_from([1, 2]))}
    world = 1
    for size in axes.values():
        world *= size
    microbatches = draw(st.sampled_from([1, 2, 4, 8]))
    batch = axes["data"] * microbatches * draw(st.integers(1, 4))
    nodes = draw(st.sampled_from([n for n in (1, 2) if world % n == 0]))
    lines = [f"{axis} = {size}" for axis, size in axes.items()] + [f"microbatches = {microbatches}"]
    if axes.get("pipeline", 1) > 1:
        lines.append(f"schedule = {draw(st.sampled_from(['gpipe', '1f1b', 'interleaved_1f1b', 'zbv', 'looped_bfs']))}")
    lines.append(f"zero = {draw(st.integers(0, 3))}")
    optimizer = draw(st.sampled_from(["sgd(lr = 0.1)", "sgd(momentum = 0.9)", "adamw()", "rmsprop()", "adagrad"]))
    return f"""
        model {{ network = {network}, loss = cross_entropy() }}
        data {{
          source = {source}
          batch = {batch}
          validation = {draw(st.sampled_from(["0", "10%", "0.25"]))}
          last_batch = {draw(st.sampled_from(["drop", "keep"]))}
          shuffle = {draw(st.sampled_from(["true", "false"]))}
        }}
        devices {{ nodes = {nodes}, cpus = {world // nodes} }}
        parallelism {{ {", ".join(lines)} }}
        memory {{ recompute = {draw(st.sampled_from(["none", "full", "selective", "every(2)"]))} }}
        train {{
          {draw(st.sampled_from(["steps = 5", "epochs = 2"]))}
          optimizer = {optimizer}
          precision = {draw(st.sampled_from(["fp32", "bf16", "fp16"]))}
          seed = {draw(st.integers(0, 3))}
        }}
    """


def analysed(job: JobSpec) -> tuple[Report, Analysis | None]:
    report = Report()
    return report, report.collect(analyse(job, Facts()))


def planned(analysis: Analysis) -> None:
    """Plans the job twice to the same bytes, stores the graph and restores it, and explains it; `compile_plan` proves
    it after each pass.
    """
    compiled = compile_plan(analysis)
    plan, stored = compiled.plan, json.loads(json.dumps(store(compiled.graph)))
    assert compile_plan(analysis).plan.text() == plan.text() == plan_view(restore(stored)).text()
    assert plan.hash in explain(plan)
    assert explain_rank(plan, plan.world_size - 1)


@unhurried
@given(job_specs())
def test_a_job_drawn_from_the_registry_gets_diagnostics_or_a_plan(job: JobSpec) -> None:
    report, analysis = analysed(job)
    assert all(d.code and d.message for d in report)
    render(report, color=True)
    to_json(report)
    if analysis is not None and not report.errors:
        planned(analysis)


@pytest.mark.slow
@unhurried
@given(job_texts())
def test_a_job_is_itself_after_formatting(text: str) -> None:
    document = parse(Source("a.plt", text), Report())
    assert document is not None
    formatted = format_document(document)
    again = parse(Source("b.plt", formatted), Report())
    assert again is not None
    assert format_document(again) == formatted
    assert load_text(formatted).job == load_text(text).job


@pytest.mark.slow
@unhurried
@given(fitting())
def test_a_job_that_fits_is_planned_and_shares_out_every_sample_once(text: str) -> None:
    job = load_text(text).job
    assert job is not None
    report, analysis = analysed(job)
    event("planned" if analysis is not None and not report.errors else "rejected")
    if analysis is None or report.errors:
        assert report.errors
        assert all(d.help or d.notes for d in report.errors), "every rejection says what to do"
        return
    planned(analysis)
    compiled = compile_plan(analysis)
    step, places = compiled.program().data, compiled.places()
    order = permutation(step, 1)
    steps = step.train_samples // step.batch + (1 if step.last else 0)
    ranks = {place.data_rank: place for place in places}
    for k in {0, steps - 1}:
        share = [micro_batches(step, place, compiled.program().microbatches, 1, k) for place in ranks.values()]
        seen = torch.cat([piece for pieces in share for piece in pieces])
        expected = order[k * step.batch : (k + 1) * step.batch]
        assert sorted(seen.tolist()) == sorted(expected.tolist())


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """Draws an example with pieces removed, doubled, swapped or invented."""
    text = draw(st.sampled_from(EXAMPLES)).read_text()
    for _ in range(draw(st.integers(1, 4))):
        a, b = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        b = min(b, a + 40)
        sign = st.sampled_from("(){}[]=,#\"'\n.")
        new = draw(st.one_of(st.just(""), st.just(text[a:b] * 2), st.text(max_size=6), sign))
        text = text[:a] + new + text[b:]
    return text


@pytest.mark.slow
@unhurried
@given(damaged())
def test_a_damaged_job_gets_diagnostics_or_a_plan(text: str) -> None:
    loaded = load_text(text, folder=str(EXAMPLES[0].parent))
    report = Report()
    analysis = inspect(loaded, report)
    render(report, color=False)
    assert report.errors or analysis is not None
    if analysis is not None and not report.errors:
        planned(analysis)
