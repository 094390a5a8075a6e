"""Graphs of traced modules: layers, ties, units, recomputation, and networks that do not fit the data or the memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.made_jobs import make_job
from helpers.module_facts import FACTS, IMAGES, analysed
from helpers.networks_drawn import fact, of, saved

from dslc.compiler.ir.facts import Facts, MachineFacts, SourceFacts
from dslc.compiler.ir.module_facts import ModelFacts
from dslc.compiler.placement.sharding import recomputed, units
from dslc.compiler.rules.analyse import analyse
from dslc.dsl.diagnostics import Report
from dslc.dsl.language import calls as c
from dslc.dsl.language import layers as s
from dslc.dsl.language.blocks import DevicesSpec, MemorySpec, ModelSpec, ParallelismSpec


def test_a_traced_module_is_the_list_of_its_layers() -> None:
    analysis, report = analysed(FACTS)
    assert analysis is not None and not report.errors
    graph = analysis.model
    assert graph is not None
    assert [node.name for node in graph.layers] == ["table", "blocks.0", "blocks.1", "head", ""]
    assert (graph.root, graph.inits, graph.unused, graph.reset) == (None, (), ("scale",), False)
    assert (graph.forward_flops, graph.backward_flops) == (500, 1000)
    assert (saved(graph, low=False), saved(graph, low=True)) == (320, 160)
    assert graph.parameters == 2**18 + 64 + 64 + 8 == sum(q.count for node in graph.layers for q in node.parameters)
    assert graph.ties == (("head.weight", "table.weight"),)
    head = graph.layers[3].parameters[0]
    assert (head.tied_to, head.shape, head.count) == ("table.weight", (2**10, 2**8), 0)
    assert graph.layers[1].buffers[0].name == "blocks.0.mask"
    # A module that takes and gives no tensor of its own keeps its place.
    assert graph.layers[4].input == graph.layers[4].output == fact(10)


def test_its_blocks_are_units_and_recomputed() -> None:
    analysis, _ = analysed(FACTS, memory=MemorySpec(recompute="full"))
    assert analysis is not None and analysis.model is not None
    assert recomputed(analysis.job, analysis.model) == ("blocks.0", "blocks.1")
    assert [unit.name for unit in units(analysis.model)] == ["blocks.0", "blocks.1", ""]
    untied = replace(FACTS, ties=(), layers=(*FACTS.layers[:3], replace(FACTS.layers[3], parameters=())))
    analysis, _ = analysed(untied)
    assert analysis is not None and analysis.model is not None
    assert [unit.name for unit in units(analysis.model)] == ["table", "blocks.0", "blocks.1", ""]


@pytest.mark.parametrize(
    "facts, source, code",
    [
        (FACTS, replace(IMAGES, classes=11), "E0210"),
        (FACTS, replace(IMAGES, target=fact(3, dtype="int64")), "E0215"),
        (FACTS, replace(IMAGES, vocab=101), "E0208"),
    ],
    ids=["too few classes", "one answer for many", "too small a vocabulary"],
)
def test_what_does_not_go_with_the_data_is_an_error(facts: ModelFacts, source: SourceFacts, code: str) -> None:
    analysis, report = analysed(facts, source)
    assert [d.code for d in report.errors] == [code]
    assert analysis is None or analysis.model is None


def reset(facts: ModelFacts, **blocks: Any) -> tuple[bool, list[str]]:
    devices = {"devices": DevicesSpec(cpus=2), "parallelism": ParallelismSpec(zero=3)}
    analysis, report = analysed(facts, **(devices | blocks))
    assert analysis is not None and analysis.model is not None
    return analysis.model.reset, [d.code for d in report if d.code in ("W0701", "E0804")]


def test_one_too_large_to_be_made_whole_is_made_by_parts() -> None:
    whole = 4 * (2**18 + 136)
    assert reset(FACTS) == (False, [])
    assert reset(FACTS, memory=MemorySpec(limit=whole)) == (False, [])
    assert reset(FACTS, memory=MemorySpec(limit=whole - 1)) == (True, ["W0701"])
    # Every rank holds it whole anyway: the limit itself is too low.
    assert reset(FACTS, memory=MemorySpec(limit=whole - 1), parallelism=ParallelismSpec()) == (False, [])
    cut = ParallelismSpec(tensor=2, tensor_plan=("table: vocabulary",))
    assert reset(FACTS, memory=MemorySpec(limit=whole - 1), parallelism=cut) == (True, ["W0701"])
    stuck = replace(FACTS, without_reset=("blocks.0", "blocks.1"))
    assert reset(stuck, memory=MemorySpec(limit=whole - 1)) == (True, ["E0804"])


def test_the_machines_own_memory_counts_in_a_run() -> None:
    network = of(s.PythonNetwork, function="mine:net")
    job = make_job(
        model=ModelSpec(network=network, loss=c.CrossEntropy()),
        devices=DevicesSpec(cpus=2),
        parallelism=ParallelismSpec(zero=3),
    )
    report = Report()
    analysis = report.collect(
        analyse(job, Facts(source=IMAGES, model=FACTS, machine=MachineFacts(cores=2, memory=2**20)))
    )
    assert analysis is not None and analysis.model is not None and analysis.model.reset
