"""Parameters that cannot be sharded are refused, if and only if they would be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.job_texts import job_text
from helpers.module_facts import FACTS, analysed

from dslc.compiler.ir.facts import Facts
from dslc.compiler.rules.analyse import analyse
from dslc.dsl.codes import explain
from dslc.dsl.diagnostics import Report
from dslc.dsl.language import calls as c
from dslc.dsl.language import optimizers as o
from dslc.dsl.language.blocks import DevicesSpec, ParallelismSpec, TrainSpec
from dslc.dsl.meaning.load import load_text

NUMBER = replace(FACTS, parameters=(*FACTS.parameters, ("temperature", (), True)))
LOW = TrainSpec(steps=5, optimizer=o.SGD(lr=0.1), precision=c.Bf16(level="O2"))


@pytest.mark.parametrize(
    ("blocks", "refused"),
    [
        ({"devices": DevicesSpec(cpus=2), "parallelism": ParallelismSpec(zero=3)}, True),
        ({"devices": DevicesSpec(cpus=2), "parallelism": ParallelismSpec(zero=1)}, False),
        ({"devices": DevicesSpec(cpus=2)}, False),
        ({"train": LOW}, True),
    ],
)
def test_a_parameter_without_rows(blocks: dict[str, Any], refused: bool) -> None:
    _, report = analysed(NUMBER, **blocks)
    assert [d.code for d in report.errors] == (["E0720"] if refused else [])
    _, report = analysed(FACTS, **blocks)
    assert not report.errors
    assert explain("E0720")


@pytest.mark.parametrize(
    ("parallelism", "train", "help"),
    [
        (ParallelismSpec(zero=3), {}, "; or `zero = 1`"),
        (ParallelismSpec(zero=2, replicas=2), {}, "; or `zero = 0`"),
        (ParallelismSpec(), {"train": LOW}, "; or `level = O1`"),
        (ParallelismSpec(zero=3), {"train": LOW}, ""),
        (ParallelismSpec(tensor=2), {}, ""),
        (ParallelismSpec(tensor=2, zero=1), {}, ""),
    ],
)
def test_the_other_way_that_is_advised_is_one(parallelism: ParallelismSpec, train: dict[str, Any], help: str) -> None:
    blocks: dict[str, Any] = {"devices": DevicesSpec(cpus=4), "parallelism": parallelism} | train
    _, report = analysed(NUMBER, **blocks)
    (found,) = (d for d in report.errors if d.code == "E0720")
    assert found.help == "give it one: `nn.Parameter(torch.ones(1))`" + help


@pytest.mark.parametrize(
    ("parallelism", "train", "help"),
    [
        (ParallelismSpec(zero=3), {}, "; or `zero = 1`"),
        (ParallelismSpec(zero=1, context=2), {}, "; or `zero = 0`"),
        (ParallelismSpec(zero=2, replicas=2), {}, "; or `zero = 0`"),
        (ParallelismSpec(zero=1), {"precision": c.Bf16(level="O2")}, "; or `zero = 0`"),
        (ParallelismSpec(tensor=2, zero=1), {}, ""),
    ],
)
def test_the_plan_that_is_advised_for_muon_has_whole_matrices(
    parallelism: ParallelismSpec, train: dict[str, Any], help: str
) -> None:
    muon = TrainSpec(steps=5, optimizer=o.Muon(), **train)
    _, report = analysed(FACTS, devices=DevicesSpec(cpus=4), parallelism=parallelism, train=muon)
    (refusal,) = (d for d in report.errors if d.code == "E0723")
    assert refusal.help == "`adamw` and `lion` treat each number alone" + help


MIXED = replace(FACTS, dtypes=((FACTS.parameters[0][0], "bfloat16"),))


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_parameters_of_two_dtypes(zero: int) -> None:
    blocks: dict[str, Any] = {"devices": DevicesSpec(cpus=2), "parallelism": ParallelismSpec(zero=zero)}
    _, report = analysed(MIXED, **blocks)
    assert [d.code for d in report.errors] == (["E0721"] if zero else [])
    name = FACTS.parameters[0][0]
    assert not report.errors or f"`{name}` is bfloat16" in report.errors[0].message
    frozen = replace(MIXED, parameters=((*FACTS.parameters[0][:2], False), *FACTS.parameters[1:]))
    _, report = analysed(frozen, **blocks)
    assert not report.errors


@pytest.mark.parametrize(
    ("parallelism", "train"),
    [
        (ParallelismSpec(pipeline=2, zero=1, replicas=8), {}),
        (ParallelismSpec(pipeline=2, zero=3, replicas=8), {}),
        (ParallelismSpec(zero=3, replicas=8), {"precision": c.Fp8(emulate=True, all_gather=True)}),
    ],
)
def test_more_replicas_than_ranks(parallelism: ParallelismSpec, train: dict[str, Any]) -> None:
    job = load_text(
        job_text(
            model={"network": "gpt(layers = 4, width = 64, heads = 4, context = 32, vocab = 256)"},
            data={"source": "synthetic(samples = 1000, vocab = 256, context = 32)", "batch": 64},
            devices={"cpus": 4},
            train={"steps": 10, "optimizer": "adam()"},
            memory={"limit": "1 GB"},
        )
    ).job
    assert job is not None
    job = replace(job, parallelism=parallelism, train=replace(job.train, **train))
    report = Report()
    assert report.collect(analyse(job, Facts())) is None
    assert "E0403" in [found.code for found in report.errors]
