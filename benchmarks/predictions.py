"""`python -m benchmarks.predictions`: fits dslc's model of time to published runs, and compares it with others.

Writes the catalogues of `compiler/facts/catalogues` and the tables of docs/predictions.md: the constants, the errors of
runs that a fit left out, and torchtitan's runs, which no fit used. Takes ten minutes or so. Nothing is run; networks
of 8B are traced on the meta device. `--rows FILE` reads other runs of the same sources, with the same columns.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np

from benchmarks.page_blocks import write_block
from benchmarks.published import HERE, ROWS, Run, read_runs
from benchmarks.published_choices import bound_lines, choice_lines, odd_pair_lines
from benchmarks.published_fit import Array, errors, fit_foundry, fit_kernels, fit_megatron
from dslc.compiler.cost.estimate import StepEstimate, estimate
from dslc.compiler.facts.hardware import FITS, PublishedFit
from dslc.compiler.ir.facts import Facts
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.probe.collect_facts import collect_facts

JOBS = os.path.join(HERE, "jobs", "torchtitan")
PAGE = os.path.join(os.path.dirname(HERE), "docs", "predictions.md")
GiB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run of torchtitan. `tokens` a second on each device, `memory` in GiB of each."""

    what: str
    job: str
    settings: tuple[str, ...]
    tokens: float
    memory: float | None = None


# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (commit 31a17bf): H100 with 96 GB and a limit of 500 W.
_COMPILED = ("train.compile=true",)
_128_GPUS = ("devices.nodes=16", "data.batch=256")
H100 = (
    Row(
        what="8B, 8 GPUs, compiled (table 1)",
        job="llama3_8b",
        settings=_COMPILED,
        tokens=6667,
        memory=77.0,
    ),
    Row(what="8B, 8 GPUs, not compiled (table 1)", job="llama3_8b", settings=(), tokens=5762, memory=82.4),
    Row(
        what="8B, 128 GPUs, compiled (table 3)",
        job="llama3_8b",
        settings=(*_128_GPUS, *_COMPILED),
        tokens=6514,
        memory=62.0,
    ),
    Row(what="8B, 128 GPUs, not compiled (table 3)", job="llama3_8b", settings=_128_GPUS, tokens=5605, memory=67.0),
)

# The same with Float8 in the linear layers, which dslc does not support: its prediction is for bf16.
_INTERLEAVED = ("parallelism.schedule=interleaved_1f1b", "parallelism.virtual_stages=2")
FLOAT8 = (
    Row(what="70B, 256 GPUs, tensor 8 (table 4)", job="llama3_70b", settings=(), tokens=829, memory=71.9),
    Row(what="405B, 512 GPUs, 1F1B (table 5)", job="llama3_405b", settings=(), tokens=100, memory=82.5),
    Row(
        what="405B, 512 GPUs, interleaved (table 5)",
        job="llama3_405b",
        settings=_INTERLEAVED,
        tokens=128,
        memory=72.7,
    ),
    Row(
        what="the same with 16 micro-batches",
        job="llama3_405b",
        settings=(*_INTERLEAVED, "parallelism.microbatches=16"),
        tokens=128,
        memory=72.7,
    ),
    Row(
        what="405B, 512 GPUs, sequences of 32,768 (table 6)",
        job="llama3_405b",
        settings=("data.batch=64", "model.network.context=32768"),
        tokens=76,
        memory=75.3,
    ),
    Row(
        what="405B, 512 GPUs, sequences of 65,536, context 2 (table 6)",
        job="llama3_405b",
        settings=("data.batch=32", "model.network.context=65536", "parallelism.context=2"),
        tokens=47,
        memory=75.9,
    ),
)

# torchtitan, docs/performance.md (commit 0413364): A100 with 80 GB, 64 of them. No memory is given.
_A100 = ("devices.kind=a100_80g", "devices.nodes=8", "data.batch=64")
A100 = (
    Row(what="8B, products kept", job="llama3_8b", settings=_A100, tokens=2973),
    Row(
        what="8B, every second block again",
        job="llama3_8b",
        settings=(*_A100, "memory.recompute=every(2)"),
        tokens=2904,
    ),
    Row(
        what="70B, all blocks again",
        job="llama3_70b",
        settings=(*_A100, "parallelism.tensor=1"),
        tokens=331,
    ),
)


def analysed(row: Row) -> Analysis:
    """Analyses the row's job. Also if it would not fit: that is part of the comparison."""
    loaded = load(os.path.join(JOBS, f"{row.job}.plt"), list(row.settings))
    assert loaded.job is not None, loaded.report.found
    report = Report()
    found = report.collect(analyse(loaded.job, _facts(row.job), limits=False))
    assert found is not None, report.errors
    return found


@cache
def _facts(job: str) -> Facts:
    loaded = load(os.path.join(JOBS, f"{job}.plt"), [])
    assert loaded.job is not None
    return Report().collect(collect_facts(loaded.job, trace=True, run=False))


def tokens(found: Analysis, made: StepEstimate) -> float:
    """Returns the tokens a second on each device."""
    assert made.step_time is not None and found.staging is not None
    length = found.staging.model.input.shape[0]
    return found.job.data.batch * length / made.step_time / found.layout.world_size


def at_the_peak(found: Analysis) -> StepEstimate:
    """Returns the estimate of a step at the data sheet's figures."""
    assert found.staging is not None
    hardware = replace(found.layout.hardware, bandwidth=None)
    return estimate(replace(found.staging, layout=replace(found.layout, hardware=hardware)), found.costs)


def torchtitan_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a Markdown table of torchtitan's runs. No fit used them."""
    yield (
        "| run | parameters | published tokens/s | at the peak | predicted | error | published GiB | predicted GiB | "
        "error |"
    )
    yield "| --- |" + " ---: |" * 8
    for row in rows:
        found = analysed(row)
        assert found.model is not None and found.staging is not None
        guess = tokens(found, estimate(found.staging, found.costs))
        held = max(cost.memory.tensors for cost in found.costs) / GiB
        cells = [
            row.what,
            f"{found.model.parameters / 1e9:.1f} B",
            f"{row.tokens:,.0f}",
            f"{tokens(found, at_the_peak(found)):,.0f}",
            f"{guess:,.0f}",
            f"{guess / row.tokens - 1:+.0%}",
            f"{row.memory or ''}",
            f"{held:.1f}",
            f"{held / row.memory - 1:+.0%}" if row.memory else "",
        ]
        yield f"| {' | '.join(cells)} |"


# ----------------------------------------------------------------------------------------------------- held-out runs

Fitting = Callable[[Sequence[Run]], PublishedFit]


def held_out(runs: Sequence[Run], group: Callable[[Run], object], fitting: Fitting) -> Array:
    """Returns the errors of each run by a fit to the runs of other groups."""
    found = np.zeros(len(runs))
    for name in sorted({str(group(run)) for run in runs}):
        fit = fitting([run for run in runs if str(group(run)) != name])
        at = [number for number, run in enumerate(runs) if str(group(run)) == name]
        found[at] = errors(fit, [runs[number] for number in at])
    return found


def error_table(title: str, runs: Sequence[Run], found: Array, group: Callable[[Run], object]) -> Iterator[str]:
    """Yields a Markdown table of errors, predicted over published time, by groups of runs."""
    yield f"| {title} | runs | median | 9 of 10 within | worst | bias |"
    yield "| --- |" + " ---: |" * 5
    for name in (*sorted({group(run) for run in runs}, key=str), None):
        at = [number for number, run in enumerate(runs) if name is None or group(run) == name]
        shares = np.expm1(found[at])
        size = np.abs(shares)
        cells = [f"{share:.1%}" for share in (np.median(size), np.quantile(size, 0.9), size.max())]
        yield f"| {name or 'all'} | {len(at):,} | {' | '.join(cells)} | {np.median(shares):+.1%} |"


def constants_table(fits: Sequence[tuple[str, PublishedFit]]) -> Iterator[str]:
    yield f"| constant | {' | '.join(name for name, _ in fits)} |"
    yield "| --- |" + " ---: |" * len(fits)
    for field in fields(PublishedFit):
        if field.name not in ("kind", "width", "length"):
            yield f"| `{field.name}` | {' | '.join(f'{getattr(fit, field.name):.3g}' for _, fit in fits)} |"


def write_catalogue(fit: PublishedFit, *sources: str) -> None:
    """Writes the catalogue file of a kind, with its sources as comments."""
    lines = ["# Written by `python -m benchmarks.predictions`; compiler/facts/hardware.py says what each figure is."]
    lines += [f"# {source}" for source in sources]
    for field in fields(PublishedFit):
        value = getattr(fit, field.name)
        if field.name != "kind":
            lines.append(f"{field.name} = {list(value) if isinstance(value, tuple) else float(f'{value:.4g}')}")
    with open(os.path.join(FITS, f"{fit.kind}.toml"), "w") as file:
        file.write("\n".join(lines) + "\n")


def write_lines(name: str, lines: Iterator[str] | Sequence[str]) -> None:
    """Writes the block `name` of the page."""
    write_block(PAGE, name, "\n".join(("", *lines, "", "")))


def write_fits(runs: Sequence[Run]) -> None:
    """Fits the constants, writes their catalogues, and the tables of runs that a fit left out."""
    foundry = [run for run in runs if run.source == "mosaicml/llm-foundry"]
    vtrain = [run for run in runs if run.source == "VIA-Research/vTrain"]
    kernels, megatron = fit_kernels(), fit_megatron(vtrain)
    a100 = fit_foundry(foundry, kernels, megatron)
    h200 = replace(kernels, **{name: getattr(a100, name) for name in ("memory", "overlap", "latency")})
    others = (
        "latency: VIA-Research/vTrain, data/ground_truth_single.csv (commit f8dda8473), 1,440 runs by",
        "Megatron-DeepSpeed on one node of A100, fp16.",
        "loss, update, launch, rest: 403 kernels on one H200, torch 2.11, benchmarks/measured/h200_kernels.jsonl.",
    )
    for kind in ("a100_40g", "a100_80g"):
        write_catalogue(
            replace(a100, kind=kind),
            "products, memory, attention, overlap: mosaicml/llm-foundry, scripts/train/benchmarking/README.md",
            "(commit 8c8dd48f7), 139 runs on A100 of 40 and 80 GB, FSDP of torch 2, bf16, flash attention.",
            *others,
        )
    write_catalogue(
        h200,
        "products, attention, loss, update, launch, rest: 403 kernels on one H200, torch 2.11,",
        "benchmarks/measured/h200_kernels.jsonl; memory, overlap, latency: those of a100_40g.",
    )
    write_lines(
        "constants", list(constants_table((("A100", a100), ("H200", h200), ("A100, Megatron-DeepSpeed", megatron))))
    )
    left_out = held_out(foundry, lambda run: run.model, lambda rest: fit_foundry(rest, kernels, megatron))
    write_lines(
        "llm-foundry",
        [
            *error_table("model left out", foundry, left_out, lambda run: run.model),
            "",
            *error_table("devices", foundry, left_out, lambda run: f"{run.gpus:3} of {run.kind}"),
        ],
    )
    left_out = held_out(vtrain, lambda run: run.width, fit_megatron)
    write_lines(
        "vTrain",
        [
            *error_table("width left out", vtrain, left_out, lambda run: run.width),
            "",
            *error_table("axes", vtrain, left_out, lambda run: f"tensor {run.tensor}, pipeline {run.pipeline}"),
            "",
            *choice_lines(vtrain, left_out, errors(megatron, vtrain)),
            "",
            *bound_lines(vtrain, left_out),
            "",
            *odd_pair_lines(vtrain),
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictions", description=__doc__)
    parser.add_argument("--rows", default=ROWS, metavar="FILE", help="the published runs")
    parser.add_argument("--keep", action="store_true", help="keep the catalogues and the tables of left-out runs")
    arguments = parser.parse_args()
    if not arguments.keep:
        write_fits(read_runs(arguments.rows))
    write_lines("H100 in bf16", list(torchtitan_table(H100)))
    write_lines("A100 in bf16", list(torchtitan_table(A100)))
    write_lines("H100 in Float8", list(torchtitan_table(FLOAT8)))


if __name__ == "__main__":
    main()
