"""`python -m benchmarks plans`: measures every plan that `auto` may choose, for the table of docs/choosing.md.

Each job is calibrated once on four processes, as a user would do it. Then each plan of its search space trains, but for
plans with a warning that the chosen one does not have. There are two rounds: all of them, and once more
those that are close to the fastest. The chosen plan is compared with the fastest one, and the predicted order of plans
with the measured one.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.page_blocks import write_block
from benchmarks.step_times import ROOT, TRAINED, finish, flags, jobs_folder

PAGE = ROOT / "docs" / "choosing.md"
CLOSE = 1.15  # times the fastest plan: those up to here are measured again
KEPT = 4  # runs of a job, for `dslc calibrate --from`
APART = 1.1  # measured times that differ by less have no order


@dataclass(frozen=True)
class Case:
    """A job whose fields of the plan are left to the compiler."""

    job: str
    searched: tuple[str, ...]
    settings: tuple[str, ...] = ()

    @property
    def written(self) -> tuple[str, ...]:
        return ("devices.cpus=4", *self.settings)

    @property
    def auto(self) -> tuple[str, ...]:
        """The settings that leave the searched fields to the compiler."""
        return tuple(f"{field}=auto" for field in self.searched)


_SHARDED = ("parallelism.zero", "parallelism.microbatches")
_SPLIT = ("parallelism.data", "parallelism.pipeline", *_SHARDED)
CASES = (
    Case("benchmarks/jobs/gpt.plt", _SPLIT, ("data.batch=8",)),
    Case("benchmarks/jobs/gpt.plt", ("parallelism.zero", "memory.recompute")),
    Case("benchmarks/jobs/convnet.plt", _SPLIT, ("data.batch=32",)),
    Case("examples/vit.plt", _SPLIT, ("data.batch=4", "train.lr_schedule=none")),
    Case("examples/blocks.plt", _SPLIT, ("data.batch=4",)),
    Case("examples/lstm.plt", _SHARDED),
    Case("examples/llama_cpu.plt", _SPLIT, ("parallelism.tensor=1", "data.batch=8")),
    Case("benchmarks/jobs/wide.plt", _SPLIT, ("devices.nodes=1", "data.batch=8")),
    Case("examples/own/own.plt", _SHARDED, ("evaluate.every=100 epochs", "data.batch=16")),
    Case("llama.plt", _SPLIT, ("data.batch=4",)),
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


def measure(case: Case, source: Path, folder: Path) -> list[MeasuredPlan]:
    """Returns each admissible plan of a job with its times, the chosen one first. Some runs are left in `folder`."""
    catalogue = folder.with_suffix(".toml")
    finish("calibrate", source, "-o", catalogue, *flags((*case.written, *case.auto)))
    settings = (*case.written, *TRAINED, f'devices.catalogue="{catalogue}"')
    choice = _choice(source, (*settings, *case.auto))
    chosen = choice["plans"][choice["chosen"]]
    plans = [
        MeasuredPlan(tuple(plan["settings"]), plan["step_time"], [])
        for plan in choice["plans"]
        if plan.get("source") == "measured" and set(plan["warnings"]) <= set(chosen["warnings"])
    ]
    plans.sort(key=lambda plan: plan.settings != tuple(chosen["settings"]))
    folder.mkdir()
    spread = len(plans) // KEPT + 1
    for number, plan in enumerate(plans):
        out = folder / str(number)
        plan.measured.append(_step(source, (*settings, *plan.settings), out))
        if number % spread:
            shutil.rmtree(out)
    fastest = min(plan.seconds for plan in plans)
    for plan in [plan for plan in plans if plan is plans[0] or plan.seconds < CLOSE * fastest]:
        plan.measured.append(_step(source, (*settings, *plan.settings), folder / "again"))
        shutil.rmtree(folder / "again")
    return plans


def _choice(source: Path, settings: tuple[str, ...]) -> dict[str, Any]:
    choice: dict[str, Any] = json.loads(finish("choose", source, "--trace", "--json", *flags(settings)))
    return choice


def _step(source: Path, settings: tuple[str, ...], out: Path) -> float:
    finish("run", source, "--out", out, *flags(settings))
    seconds: float = json.loads((out / "report.json").read_text())["step_time"]["measured"]
    return seconds


def errors_from_runs(measured: list[tuple[Case, Path, list[MeasuredPlan]]], folder: Path) -> str:
    """Says how well `dslc calibrate --from` with the kept runs of every second job predicts plans of the other jobs."""
    runs = [run for number in range(0, len(measured), 2) for run in sorted((folder / str(number)).iterdir())]
    catalogue = folder / "fit.toml"
    print(finish("calibrate", "--from", *runs, "-o", catalogue))
    errors: list[float] = []
    for case, source, plans in measured[1::2]:
        settings = (*case.written, *TRAINED, f'devices.catalogue="{catalogue}"', *case.auto)
        times = {tuple(plan["settings"]): plan.get("step_time") for plan in _choice(source, settings)["plans"]}
        here = [abs(times[plan.settings] / plan.seconds - 1) for plan in plans if times[plan.settings]]
        print(f"    {source.stem}: {len(here)} of {len(plans)} plans, off by {100 * median(here):.0f}% at the median")
        errors += here
    tenth = sorted(errors)[9 * len(errors) // 10]
    figures = f"off by {100 * median(errors):.0f}% at the median, and 9 of 10 by less than {100 * tenth:.0f}%"
    return f"By constants from {len(runs)} of these runs, {len(errors):,} plans of the other jobs are {figures}."


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
    measured: list[tuple[Case, Path, list[MeasuredPlan]]] = []
    with jobs_folder() as folder:
        for number, case in enumerate(CASES):
            source = ROOT / case.job if (ROOT / case.job).exists() else folder / case.job
            plans = measure(case, source, folder / str(number))
            measured.append((case, source, plans))
            lines.append(row(case, plans))
            print(lines[-1], flush=True)
            for plan in sorted(plans, key=lambda plan: plan.seconds):
                print(f"    {1000 * plan.seconds:7.1f} {1000 * plan.predicted:7.1f}  {plan.text()}", flush=True)
            here = order(plans)
            right, apart = right + here[0], apart + here[1]
            print(f"    order: {here[0]} of {here[1]} pairs", flush=True)
        summary = (
            f"Of {apart:,} pairs of plans of one job whose times are more than 10% apart, {right:,} are in the right "
            f"order.\n\n{errors_from_runs(measured, folder)}"
        )
    print(summary)
    write_block(PAGE, "measured", "\n".join(lines) + f"\n\n{summary}\n")
