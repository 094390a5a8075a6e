"""`python -m benchmarks plans`: measures every plan that `auto` may choose, for the table of docs/choosing.md.

Each job is calibrated as a user would do it, once, on four processes. Then each plan of its search space trains, in two
rounds: all of them, and once more those that are close to the fastest. The chosen plan is compared with the fastest
one, and the predicted order of plans with the measured one.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean

from benchmarks.step_times import ROOT, TRAINED, finish, flags, jobs_folder

PAGE = ROOT / "docs" / "choosing.md"
MARKS = ("<!-- measured, written by `python -m benchmarks plans` -->\n", "<!-- end of measured -->")
CLOSE = 1.15  # times the fastest plan: those up to here are measured again
APART = 1.1  # measured times that differ by less have no order


@dataclass(frozen=True)
class Case:
    """A job whose fields of the plan are left to the compiler."""

    job: str
    searched: tuple[str, ...]
    settings: tuple[str, ...] = ()

    @property
    def auto(self) -> tuple[str, ...]:
        """The settings that leave the searched fields to the compiler."""
        return tuple(f"{field}=auto" for field in self.searched)


_SHARDED = ("parallelism.zero", "parallelism.microbatches")
_SPLIT = ("parallelism.data", "parallelism.pipeline", *_SHARDED)
CASES = (
    Case("benchmarks/jobs/gpt.plt", _SPLIT, ("data.batch=8",)),
    Case("benchmarks/jobs/gpt.plt", (*_SHARDED, "memory.recompute")),
    Case("benchmarks/jobs/convnet.plt", _SPLIT, ("data.batch=32",)),
    Case("examples/vit.plt", _SPLIT, ("data.batch=8",)),
    Case("examples/blocks.plt", _SPLIT, ("data.batch=8",)),
    Case("examples/lstm.plt", _SHARDED),
    Case("examples/llama_cpu.plt", _SPLIT, ("parallelism.tensor=1", "data.batch=8")),
    Case("benchmarks/jobs/wide.plt", _SPLIT, ("devices.nodes=1", "data.batch=8")),
    Case("examples/own/own.plt", _SHARDED, ("evaluate.every=100 epochs", "data.batch=16")),
    Case("llama.plt", _SPLIT, ("data.batch=8",)),
)


@dataclass
class MeasuredPlan:
    """A plan by its settings, with the seconds of a step."""

    settings: tuple[str, ...]
    predicted: float
    measured: list[float]

    @property
    def seconds(self) -> float:
        return mean(self.measured)

    def text(self) -> str:
        return ", ".join(each.partition(".")[2].replace("=", " ") for each in self.settings)


def measure(case: Case, folder: Path) -> list[MeasuredPlan]:
    """Returns each admissible plan of a job with its times, the chosen one first."""
    source = ROOT / case.job if (ROOT / case.job).exists() else folder / case.job
    catalogue = folder / "here.toml"
    settings = ("devices.cpus=4", *case.settings)
    finish("calibrate", source, "-o", catalogue, *flags((*settings, *case.auto)))
    settings = (*settings, *TRAINED, f'devices.catalogue="{catalogue}"')
    choice = json.loads(finish("choose", source, "--json", *flags((*settings, *case.auto))))
    plans = [
        MeasuredPlan(tuple(plan["settings"]), plan["step_time"], [])
        for plan in choice["plans"]
        if "code" not in plan and plan["source"] == "measured"
    ]
    plans.sort(key=lambda plan: plan.settings != tuple(choice["chosen"]["settings"]))
    for plan in plans:
        plan.measured.append(_step(source, (*settings, *plan.settings), folder))
    fastest = min(plan.seconds for plan in plans)
    for plan in [plan for plan in plans if plan is plans[0] or plan.seconds < CLOSE * fastest]:
        plan.measured.append(_step(source, (*settings, *plan.settings), folder))
    return plans


def _step(source: Path, settings: tuple[str, ...], folder: Path) -> float:
    out = folder / "run"
    finish("run", source, "--out", out, *flags(settings))
    seconds: float = json.loads((out / "report.json").read_text())["step_time"]["measured"]
    shutil.rmtree(out)
    return seconds


def row(case: Case, plans: list[MeasuredPlan]) -> str:
    chosen, fastest = plans[0], min(plans, key=lambda plan: plan.seconds)
    slowest = max(plan.seconds for plan in plans)
    name = case.job.removesuffix(".plt").rpartition("/")[2]
    beyond = 100 * (chosen.seconds / fastest.seconds - 1)
    cells = (
        name,
        f"{len(plans)}",
        chosen.text(),
        f"{1000 * chosen.seconds:.1f} ms",
        "the same" if chosen is fastest else fastest.text(),
        f"{1000 * fastest.seconds:.1f} ms",
        f"{beyond:+.0f}%",
        f"{1000 * slowest:.0f} ms",
    )
    return f"| {' | '.join(cells)} |"


def order(plans: list[MeasuredPlan]) -> tuple[int, int]:
    """Returns the pairs of plans whose order is predicted rightly, and the pairs whose times are apart."""
    right = apart = 0
    for one, other in combinations(plans, 2):
        fast, slow = sorted((one, other), key=lambda plan: plan.seconds)
        if slow.seconds > APART * fast.seconds:
            apart += 1
            right += fast.predicted < slow.predicted
    return right, apart


def write_measured() -> None:
    """Measures all jobs and writes the table."""
    lines = [
        "| job | plans | chosen | takes | fastest | takes | beyond | slowest |",
        "| --- | ---: | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    right = apart = 0
    with jobs_folder() as folder:
        for case in CASES:
            plans = measure(case, folder)
            lines.append(row(case, plans))
            print(lines[-1], flush=True)
            for plan in sorted(plans, key=lambda plan: plan.seconds):
                print(f"    {1000 * plan.seconds:7.1f} {1000 * plan.predicted:7.1f}  {plan.text()}", flush=True)
            here = order(plans)
            right, apart = right + here[0], apart + here[1]
            print(f"    order: {here[0]} of {here[1]} pairs", flush=True)
    summary = (
        f"Of {apart:,} pairs of plans of one job whose times are more than 10% apart, {right:,} are in the right order."
    )
    print(summary)
    table = "\n".join(lines) + f"\n\n{summary}\n"
    page = PAGE.read_text(encoding="utf-8")
    begin, end = map(re.escape, MARKS)
    page = re.sub(f"{begin}.*?{end}", lambda _: f"{MARKS[0]}{table}{MARKS[1]}", page, flags=re.DOTALL)
    PAGE.write_text(page, encoding="utf-8")
