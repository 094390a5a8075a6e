"""`python -m benchmarks choose`: searches plans for Llama on 8 to 512 H100, and writes the table of docs/choosing.md.

Nothing is run, and no GPU is needed. The networks are `llama(…)` of the sizes of Llama 3.1; batches, precision and
optimizer are those of torchtitan's tables (predictions.py). A published set-up is priced as the same job with its
values written. Seconds are those of one core.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from benchmarks.page_blocks import write_block
from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.rules.choice.choice_text import time_cell
from dslc.compiler.rules.choice.plan_choice import PlanChoice, PricedPlan
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.load import load
from dslc.jobs.choose_plan import explore_plans, price_written

HERE = os.path.dirname(os.path.abspath(__file__))
PAGE = os.path.join(os.path.dirname(HERE), "docs", "choosing.md")
RUNNERS_UP = 2
_SIZES = {
    "8B": "layers = 32, width = 4096, hidden = 14_336, heads = 32, kv_heads = 8",
    "70B": "layers = 80, width = 8192, hidden = 28_672, heads = 64, kv_heads = 8",
    "405B": "layers = 126, width = 16_384, hidden = 53_248, heads = 128, kv_heads = 8",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network on a number of GPUs, 8 on each node; `published` are the settings of torchtitan's plan."""

    size: str
    gpus: int
    batch: int
    published: tuple[str, ...] = ()

    def job(self, *settings: str) -> JobSpec:
        """Returns the job with nothing of a plan but the settings."""
        network = f"model.network=llama({_SIZES[self.size]}, context = 8192, vocab = 128_256)"
        nodes = (f"devices.nodes={self.gpus // 8}", f"data.batch={self.batch}")
        plain = ("parallelism.tensor=none", "parallelism.zero=none", "memory.recompute=none")
        path = os.path.join(HERE, "jobs", "torchtitan", "llama3_70b.plt")
        loaded = load(path, [network, *nodes, *plain, *settings])
        assert loaded.job is not None, loaded.report.found
        return loaded.job


_SHARDED = ("parallelism.zero=3", "memory.recompute=selective")
CASES = (
    Case(size="8B", gpus=8, batch=16, published=_SHARDED),
    Case(size="8B", gpus=64, batch=128),
    Case(size="8B", gpus=128, batch=256, published=_SHARDED),
    Case(size="8B", gpus=512, batch=1024),
    Case(size="70B", gpus=64, batch=128),
    Case(
        size="70B",
        gpus=256,
        batch=512,
        published=("parallelism.tensor=8", "parallelism.zero=3", "memory.recompute=full"),
    ),
    Case(size="70B", gpus=512, batch=1024),
    Case(size="405B", gpus=128, batch=64),
    Case(
        size="405B",
        gpus=512,
        batch=256,
        published=(
            "parallelism.tensor=8",
            "parallelism.pipeline=8",
            "parallelism.zero=1",
            "parallelism.microbatches=8",
            "memory.recompute=full",
        ),
    ),
)


def _search(case: Case) -> tuple[PlanChoice, PricedPlan | None, float]:
    """Returns the choice for a case, the published plan's figures and the seconds of the search."""
    report, begun = Report(), time.process_time()
    choice = explore_plans(case.job(), report, trace=False)
    seconds = time.process_time() - begun
    assert choice is not None, report.found
    return choice, price_written(case.job(*case.published), trace=False) if case.published else None, seconds


def _cells(plan: PricedPlan) -> str:
    return f"{plan.text()} | {time_cell(plan)} | {byte_text(plan.peak)}"


def _rows(case: Case, choice: PlanChoice, published: PricedPlan | None, seconds: float) -> list[str]:
    head = f"| {case.size} | {case.gpus}"
    how = f"{len(choice.plans):,} of {choice.space:,}"
    if choice.plan is None:
        return [f"{head} | none fits | | | | {how} | {seconds:.0f} s |"]
    rows = [f"{head} | {_cells(choice.plan)} | chosen | {how} | {seconds:.0f} s |"]
    rows += [f"| | | {_cells(plan)} | {choice.why_not(plan)} | | |" for plan in choice.runners_up(RUNNERS_UP)]
    if published is not None:
        why = "published" if published.fits else f"published, on GPUs of 96 GB: {choice.why_not(published)}"
        rows.append(f"| | | {_cells(published)} | {why} | | |")
    return rows


def main() -> None:
    """Writes the table, and prints it."""
    lines = [
        "| Llama | GPUs | plan | step time | memory | | analysed | search |",
        "| --- | ---: | --- | ---: | ---: | --- | ---: | ---: |",
    ]
    for case in CASES:
        rows = _rows(case, *_search(case))
        print("\n".join(rows), flush=True)
        lines += rows
    write_block(PAGE, "plans", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
