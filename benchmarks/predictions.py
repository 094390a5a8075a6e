"""`python -m benchmarks.predictions`: dslc's predictions for trainings whose figures torchtitan has published.

Prints the tables of docs/predictions.md. The published figures are data here, each with its source; the predictions
come from the job files in jobs/torchtitan with the settings of the row. Nothing is run; the networks of 8B are traced
on the meta device, which takes a minute or two.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from dslc.compiler.cost.estimate import estimate
from dslc.compiler.ir.facts import Facts
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.probe.collect_facts import collect_facts

JOBS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "jobs", "torchtitan")
GiB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run. `tokens` a second on each device, `memory` in GiB of each. `reference`: the run from which the
    efficiency of its table's devices is taken."""

    what: str
    job: str
    settings: tuple[str, ...]
    tokens: float
    memory: float | None = None
    reference: bool = False


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
        reference=True,
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
FLOAT8 = (
    Row(what="70B, 256 GPUs, tensor 8 (table 4)", job="llama3_70b", settings=(), tokens=829, memory=71.9),
    Row(what="405B, 512 GPUs, 1F1B (table 5)", job="llama3_405b", settings=(), tokens=100, memory=82.5),
    Row(
        what="405B, 512 GPUs, interleaved (table 5)",
        job="llama3_405b",
        settings=(
            "parallelism.schedule=interleaved_1f1b",
            "parallelism.virtual_stages=2",
            "parallelism.microbatches=16",
        ),
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
    Row(what="8B, products kept", job="llama3_8b", settings=_A100, tokens=2973, reference=True),
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
    found = analyse(loaded.job, _facts(row.job), report, limits=False)
    assert found is not None, report.errors
    return found


@cache
def _facts(job: str) -> Facts:
    loaded = load(os.path.join(JOBS, f"{job}.plt"), [])
    assert loaded.job is not None
    return Report().collect(collect_facts(loaded.job, trace=True, run=False))


def tokens(row: Row, found: Analysis, efficiency: float) -> float:
    """Returns the tokens a second on each device, if products reach that fraction of its peak."""
    assert found.staging is not None
    layout = replace(found.layout, hardware=replace(found.layout.hardware, efficiency=efficiency))
    made = estimate(replace(found.staging, layout=layout), found.costs)
    assert made.step_time is not None
    return found.job.data.batch * found.staging.model.input.shape[0] / made.step_time / layout.world_size


def efficiency_of(row: Row, found: Analysis) -> float:
    """Returns the fraction of the peak at which the prediction equals the published figure, by bisection, as it is not
    proportional.
    """
    low, high = 0.01, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens(row, found, middle) < row.tokens else (low, middle)
    return high


def table(rows: tuple[Row, ...], efficiency: float | None = None) -> Iterator[str]:
    """Yields a Markdown table. The efficiency is that of the reference among the rows, unless it is given."""
    found = {row: analysed(row) for row in rows}
    reference = next((row for row in rows if row.reference), None)
    if reference is not None:
        efficiency = efficiency_of(reference, found[reference])
    assert efficiency is not None
    yield f"Efficiency {efficiency:.3f}, " + (f"from `{reference.what}`." if reference else "from the table before.")
    yield ""
    yield (
        "| run | parameters | published tokens/s | at the peak | published / peak | predicted | error | "
        "published GiB | predicted GiB | error |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row, analysis in found.items():
        bound, guess = (tokens(row, analysis, share) for share in (1.0, efficiency))
        assert analysis.model is not None
        cells = [
            row.what,
            f"{analysis.model.parameters / 1e9:.1f} B",
            f"{row.tokens:,.0f}",
            f"{bound:,.0f}",
            f"{row.tokens / bound:.2f}",
            f"{guess:,.0f}",
            "(reference)" if row.reference else f"{guess / row.tokens - 1:+.0%}",
        ]
        held = max(cost.memory.tensors for cost in analysis.costs) / GiB
        cells += [f"{row.memory}" if row.memory else "", f"{held:.1f}"]
        cells.append(f"{held / row.memory - 1:+.0%}" if row.memory else "")
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    print("## H100, bf16\n", *table(H100), sep="\n")
    reference = H100[0]
    share = efficiency_of(reference, analysed(reference))
    print("\n## H100, published with Float8, predicted in bf16\n", *table(FLOAT8, share), sep="\n")
    print("\n## A100, bf16\n", *table(A100), sep="\n")


if __name__ == "__main__":
    main()
