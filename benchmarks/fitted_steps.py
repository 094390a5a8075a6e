"""`python -m benchmarks fits`: how well constants of `dslc calibrate` and `--from RUN...` predict other trainings.

The steps are those of the small jobs of `dslc calibrate`, of the plans of docs/step-time.md that a fit covers, of
exchanges of weights, and of all plans that `auto` may choose for the ten jobs of docs/choosing.md, on four processes.
Each is trained once, and kept in measured/cpu_steps.jsonl: what the file has is not trained again.
`python -m benchmarks.fitted_steps` writes the table anew from the file, after a change of the model.

Beside other work, `chrt -r 5 python -m benchmarks fits` gives the trainings the cores when they want them.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.measured_plans import CASES
from benchmarks.page_blocks import write_block
from benchmarks.step_times import GROUPS, PAGE, ROOT, finish, flags, jobs_folder
from dslc.compiler.cost.estimate import fitted_step
from dslc.compiler.cost.fitted_times import CORE, fit_steps, left_out_errors, uncovered
from dslc.compiler.facts.calibration import CONSTANTS, CONSTANTS_VERSION, RunFit, fit_text, with_constants
from dslc.compiler.facts.user_calibrations import this_machine
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import LoadResult, load_each, load_text
from dslc.jobs.check_job import inspect
from dslc.jobs.step_fits import TimedStep, UnusableRunError, features_of, small_jobs, trained_step

KEPT = ROOT / "benchmarks" / "measured" / "cpu_steps.jsonl"
STEPS, LOGGED = 37, 4
TRAINED = ("train.epochs=none", f"train.steps={STEPS}", f"log.every={LOGGED} steps")
EXCHANGES = (
    "local_sgd(period = 4)", "diloco(period = 4)", "decentralized(peers = all, interval = 2)",
)  # fmt: skip
EXCHANGING: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("benchmarks/jobs/gpt.plt", ()),
    ("benchmarks/jobs/wide.plt", ("devices.nodes=1", "devices.cpus=2")),
)
RUNS, DRAWS = 4, 20  # of each of five jobs, and how often five are drawn


@dataclass(frozen=True)
class Training:
    """A training of a set: `small`, `table`, `exchanges` or `plans`. A small job has its text in place of a path."""

    set: str
    job: str
    settings: tuple[str, ...] = ()

    def loaded(self, folder: Path) -> LoadResult:
        if self.set == "small":
            return load_text(dict(small_jobs())[self.job], f"{self.job}.plt")
        source = ROOT / self.job if (ROOT / self.job).exists() else folder / self.job
        return load_each(str(source), [*TRAINED, *self.settings])[1][0]


def trainings(folder: Path) -> Iterator[Training]:
    """Yields all trainings; `folder` has the jobs that stand in no other."""
    for name, _ in small_jobs():
        yield Training("small", name)
    for group in GROUPS:
        for plan in () if group.link else group.plans:
            last = {each.partition("=")[0]: each for each in (*group.settings, *plan)}
            taken = {name: each for name, each in last.items() if name not in ("train.steps", "log.every")}
            yield Training("table", group.job, tuple(taken.values()))
    for job, settings in EXCHANGING:
        for exchange in EXCHANGES:
            yield Training("exchanges", job, (*settings, f"parallelism.gradients={exchange}"))
    here, catalogue = this_machine(), folder / "core.toml"
    fit = with_constants(
        RunFit(machine=here.processor, torch=here.torch, cores=here.cores, constants=CONSTANTS_VERSION), CORE
    )
    catalogue.write_text(fit_text("cpu", fit, "typical constants, which price all plans that a fit covers"))
    for case in CASES:
        source = ROOT / case.job if (ROOT / case.job).exists() else folder / case.job
        settings = (*case.written, *TRAINED, f'devices.catalogue="{catalogue}"', *case.auto)
        choice = json.loads(finish("choose", source, "--trace", "--json", *flags(settings)))
        allowed = set(choice["plans"][choice["chosen"]]["warnings"])
        for plan in choice["plans"]:
            if plan.get("step_time") is not None and set(plan["warnings"]) <= allowed:
                yield Training("plans", case.job, (*case.written, *plan["settings"]))


def kept() -> dict[Training, float]:
    """Returns the seconds of the steps that were measured."""
    lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    rows = map(json.loads, lines)
    return {Training(row["set"], row["job"], tuple(row["settings"])): row["seconds"] for row in rows}


def measure(folder: Path, seconds: float) -> None:
    """Trains what was not trained yet, in random order, and ends after some time."""
    import dslc.runtime.launch  # noqa: F401 - before ranks are forked

    begin, known = time.monotonic(), kept()
    missing = [each for each in dict.fromkeys(trainings(folder)) if each not in known]
    random.Random(1).shuffle(missing)
    for training in missing:
        if time.monotonic() - begin > seconds:
            break
        try:
            step = trained_step(training.job, training.loaded(folder), STEPS, LOGGED)
        except UnusableRunError as reason:
            print(f"{training.job} {' '.join(training.settings)}: {reason}")
            continue
        row = {"set": training.set, "job": training.job, "settings": training.settings, "seconds": step.seconds}
        with KEPT.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{1000 * step.seconds:7.1f} ms  {training.job} {' '.join(training.settings)}", flush=True)


@dataclass(frozen=True)
class Measured:
    training: Training
    step: TimedStep
    features: list[float]


def measured_steps(folder: Path) -> list[Measured]:
    """Returns the measured steps that a fit covers, with their features."""
    steps = []
    for training, seconds in kept().items():
        report = Report()
        analysis = inspect(training.loaded(folder), report, trace=True)
        assert analysis is not None and analysis.staging is not None, report.found
        if not uncovered(analysis.staging):
            name = " ".join((training.job, *training.settings))
            steps.append(Measured(training, TimedStep(name, analysis, seconds), features_of(analysis)))
    return steps


def constants_of(known: Sequence[Measured], typical: Sequence[float] = ()) -> list[float]:
    """Returns the constants that a fit to known steps has, beginning with typical ones."""
    near = typical or [CORE[name] for name in CONSTANTS]
    return fit_steps([each.features for each in known], [each.step.seconds for each in known], near)


def errors_by(known: Sequence[Measured], others: Sequence[Measured], typical: Sequence[float] = ()) -> list[float]:
    """Returns the errors of steps as the constants of known ones predict them."""
    constants = constants_of(known, typical)
    here = this_machine()
    machine = RunFit(machine=here.processor, torch=here.torch, cores=here.cores, constants=CONSTANTS_VERSION)
    fit = with_constants(machine, dict(zip(CONSTANTS, constants, strict=True)))
    errors = []
    for each in others:
        assert each.step.analysis.staging is not None
        errors.append(fitted_step(each.step.analysis.staging, each.step.analysis.costs, fit) / each.step.seconds - 1)
    return errors


def table_lines(steps: Sequence[Measured]) -> Iterator[str]:
    """Yields the table of docs/step-time.md."""
    sets = ("small", "table", "exchanges", "plans")
    small, table, exchanges, plans = ([each for each in steps if each.training.set == name] for name in sets)
    yield "| constants from | predicted | steps | median | 9 of 10 within | worst | bias |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    features, seconds = [each.features for each in small], [each.step.seconds for each in small]
    left_out = list(left_out_errors(features, seconds, [CORE[name] for name in CONSTANTS]))
    yield _row("`dslc calibrate`", "each of its jobs, by the others", left_out)
    yield _row("`dslc calibrate`", "plans of the table below", errors_by(small, table))
    yield _row("`dslc calibrate`", "exchanges of weights", errors_by(small, exchanges))
    yield _row("`dslc calibrate`", "plans of ten jobs, four processes on two cores", errors_by(small, plans))
    measured_here = constants_of(small)
    jobs = list(dict.fromkeys(each.training.job for each in plans))
    rows, together = [], []
    for job in jobs:
        mine, others = ([each for each in plans if (each.training.job == job) is own] for own in (True, False))
        errors = errors_by(others, mine, measured_here)
        together += errors
        rows.append(_row("", Path(job).stem, errors))
    for typical, after in (((), ""), (measured_here, " after `dslc calibrate`")):
        drawn: list[float] = []
        for draw in range(DRAWS):
            chance = random.Random(draw)
            half = set(chance.sample(jobs, (len(jobs) + 1) // 2))
            known = [
                each
                for job in sorted(half)
                for each in _drawn(chance, [each for each in plans if each.training.job == job])
            ]
            drawn += errors_by(known, [each for each in plans if each.training.job not in half], typical)
        yield _row(
            f"`--from` {RUNS} runs of each of {(len(jobs) + 1) // 2} jobs, drawn {DRAWS} times{after}",
            "plans of the other jobs",
            drawn,
        )
    yield _row("`--from` all plans of the other jobs after `dslc calibrate`", "plans of a job", together)
    yield from rows


def _drawn(chance: random.Random, steps: list[Measured]) -> list[Measured]:
    return chance.sample(steps, min(RUNS, len(steps)))


def _row(known: str, predicted: str, errors: Sequence[float]) -> str:
    sizes = sorted(map(abs, errors))
    figures = (median(sizes), sizes[9 * len(sizes) // 10], sizes[-1])
    shown = " | ".join(f"{100 * each:.0f}%" for each in figures)
    return f"| {known} | {predicted} | {len(sizes)} | {shown} | {100 * sum(errors) / len(errors):+.0f}% |"


def write_table(folder: Path) -> None:
    lines = list(table_lines(measured_steps(folder)))
    print("\n".join(lines))
    write_block(PAGE, "fits", "\n".join(lines) + "\n")


def main(seconds: float = 0.0) -> None:
    """Measures for at most some time, and writes the table."""
    with jobs_folder() as folder:
        if seconds:
            measure(folder, seconds)
        write_table(folder)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
