"""Samples, shares and steps."""

from __future__ import annotations

import pytest
from helpers.job_texts import job_text
from helpers.made_jobs import make_job

from dslc.compiler.compile import compile_plan
from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.placement.epochs import near_divisors
from dslc.compiler.placement.layout import lay_out
from dslc.compiler.placement.workload import Workload, in_steps, measure_out
from dslc.compiler.rules.analyse import analyse
from dslc.dsl.diagnostics import Report
from dslc.dsl.language import calls as c
from dslc.dsl.language import optimizers as o
from dslc.dsl.language.blocks import DataSpec, DevicesSpec, ParallelismSpec, TrainSpec
from dslc.dsl.language.registry import Quantity
from dslc.dsl.meaning.load import load_text


def workload_of(
    samples: int, data: DataSpec, cpus: int = 1, microbatches: int = 1
) -> tuple[Workload | None, list[str]]:
    job = make_job(
        data=data,
        devices=DevicesSpec(cpus=cpus),
        parallelism=ParallelismSpec(microbatches=microbatches),
        train=TrainSpec(epochs=3, optimizer=o.SGD()),
    )
    report = Report()
    layout = report.collect(lay_out(job))
    assert layout is not None
    found = report.collect(measure_out(job, layout, SourceFacts(samples=samples)))
    return found, [d.code for d in report]


@pytest.mark.parametrize(
    ("samples", "batch", "last_batch", "expected"),
    [
        (100, 32, "drop", (3, 0, 9)),
        (100, 32, "keep", (4, 4, 12)),
        (96, 32, "keep", (3, 0, 9)),
        (20, 32, "keep", (1, 20, 3)),
    ],
)
def test_an_epoch(samples: int, batch: int, last_batch: str, expected: tuple[int, int, int]) -> None:
    found, _ = workload_of(samples, DataSpec(source=c.Digits(), batch=batch, last_batch=last_batch))
    assert found is not None
    assert (found.steps_per_epoch, found.last, found.steps) == expected


def test_the_held_out_share_is_rounded_to_samples() -> None:
    found, _ = workload_of(1797, DataSpec(source=c.Digits(), batch=64, validation=0.2))
    assert found is not None
    assert (found.train, found.validation, found.split) == (1438, 359, "random")


@pytest.mark.parametrize(
    ("samples", "data", "cpus", "microbatches", "code"),
    [
        (100, DataSpec(source=c.Digits(), batch=10), 3, 1, "E0301"),
        (100, DataSpec(source=c.Digits(), batch=12), 2, 4, "E0302"),
        (10, DataSpec(source=c.Digits(), batch=12), 2, 1, "E0303"),
        (25, DataSpec(source=c.Digits(), batch=12, last_batch="keep"), 2, 1, "E0304"),
        (100, DataSpec(source=c.Digits(), batch=12, validation=0.001), 1, 1, "E0305"),
    ],
)
def test_what_cannot_be_shared_out(samples: int, data: DataSpec, cpus: int, microbatches: int, code: str) -> None:
    assert workload_of(samples, data, cpus, microbatches) == (None, [code])


@pytest.mark.parametrize(("axis", "code"), [({"data": 2}, "E0304"), ({"pipeline": 2}, "E0307")])
@pytest.mark.parametrize(("length", "comes"), [("steps = 2", False), ("steps = 3", True), ("epochs = 1", True)])
def test_a_short_batch_that_does_not_come_is_no_fault(
    axis: dict[str, int], code: str, length: str, comes: bool
) -> None:
    axes = ", ".join(f"{name} = {size}" for name, size in axis.items())
    loaded = load_text(
        f"""
        model {{ network = [linear(4), relu(), linear(2)], loss = cross_entropy() }}
        data {{ source = synthetic(shape = [4], samples = 25), batch = 12, last_batch = keep }}
        devices {{ cpus = 2 }}
        parallelism {{ {axes} }}
        train {{ {length}, optimizer = sgd() }}
        """
    )
    assert loaded.job is not None
    report = Report()
    analysis = report.collect(analyse(loaded.job, Facts()))
    assert [d.code for d in report.errors] == ([code] if comes else [])
    if analysis is not None:
        assert (analysis.workload.last, analysis.workload.last_trained, analysis.workload.steps_per_epoch) == (1, 0, 3)
        plan = compile_plan(analysis).plan  # which is proved: no share of it is empty
        assert plan.data.last == 1 and not plan.data.last_shares


def test_micro_batches_do_not_hide_the_short_batch() -> None:
    loaded = load_text(
        """
        model { network = [linear(4), relu(), linear(2)], loss = cross_entropy() }
        data { source = synthetic(shape = [4], samples = 25), batch = 10, last_batch = keep }
        devices { cpus = 2 }
        parallelism { pipeline = 2, microbatches = 3 }
        train { epochs = 1, optimizer = sgd() }
        """
    )
    assert loaded.job is not None
    report = Report()
    report.collect(analyse(loaded.job, Facts()))
    assert {d.code for d in report.errors} == {"E0302", "E0307"}


def test_times_in_steps() -> None:
    found, _ = workload_of(100, DataSpec(source=c.Digits(), batch=10))
    assert found is not None
    assert in_steps(Quantity(2, "epochs"), found) == 20
    assert in_steps(Quantity(0.5, "epochs"), found) == 5
    assert in_steps(Quantity(7, "steps"), found) == 7


def test_micro_batches_far_above_the_share_are_told_of_the_share_itself() -> None:
    assert next(near_divisors(8, 100_000)) == 8


@pytest.mark.parametrize(
    "mixture",
    [
        "weights = [1e-320, 1.0], stopping_strategy = all_exhausted",  # as many samples as no number has
        "weights = [1e308, 1e308], samples = 100",  # whose sum is no number
        "weights = [1e-300, 1e300]",
    ],
)
def test_weights_of_a_mixture_that_are_too_far_apart(mixture: str) -> None:
    source = "synthetic(samples = 1000, shape = [4], classes = 3)"
    job = load_text(
        job_text(data={"source": f"mixture([{source}, {source}], {mixture})", "batch": 10}, train={"steps": 5})
    ).job
    assert job is not None
    report = Report()
    report.collect(analyse(job, Facts()))
    assert [found.code for found in report.errors] == ["E0327"]
    assert "too far apart" in report.errors[0].message
