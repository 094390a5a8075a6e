"""`dslc choose`: the plans of a job that no other beats in both time and memory, and the one that `auto` takes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace

from dslc.compiler.facts.untrusted_files import replacing
from dslc.compiler.rules.choice.choice_text import HEAD, RIGHT, choice_json, count_line, plan_row
from dslc.compiler.rules.choice.choose import with_plan
from dslc.compiler.rules.choice.plan_choice import PlanChoice, PricedPlan
from dslc.compiler.show.explain import table
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.auto_fields import SEARCHED, auto_fields
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.load import load_each
from dslc.dsl.meaning.write import write
from dslc.dsl.plain import plain, plain_lines
from dslc.jobs.check_job import show
from dslc.jobs.choose_plan import explore_plans, price_written
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT, CommandFailedError

_SHOWN = 12  # plans of the front, of which the fastest and the smallest are shown


def main(arguments: argparse.Namespace) -> int:
    job = _load(arguments)
    fields = auto_fields(job) or SEARCHED
    report, begun = Report(), time.perf_counter()
    choice = explore_plans(job, report, trace=arguments.trace, fields=fields)
    seconds = time.perf_counter() - begun
    show(report)
    if choice is None or (choice.plan is None and not choice.plans):
        return JOB_AT_FAULT
    written = None if auto_fields(job) else price_written(job, trace=arguments.trace)
    if arguments.json:
        json.dump(choice_json(choice) | {"seconds": round(seconds, 3)}, sys.stdout, indent=2)
        print()
    else:
        print(plain_lines("\n".join(_lines(job, choice, written, seconds))))
    if choice.plan is None:
        return JOB_AT_FAULT
    if arguments.output:
        with replacing(arguments.output) as file:
            file.write(write(with_plan(job, choice.fields, choice.plan)))
        print(plain(f"{arguments.output} written: the job with the chosen plan"), file=sys.stderr)
    return GOOD


def _load(arguments: argparse.Namespace) -> JobSpec:
    """Returns the job; of a sweep the first combination. Raises CommandFailedError with the mistakes shown."""
    loaded, combinations = load_each(arguments.job, arguments.settings)
    if len(combinations) > 1:
        print("the job sweeps over several trainings: the plans are of the first", file=sys.stderr)
    if loaded.report.errors or combinations[0].job is None:
        show(loaded.report)
        raise CommandFailedError(status=JOB_AT_FAULT)
    return replace(combinations[0].job, sweep={})


def _lines(job: JobSpec, choice: PlanChoice, written: PricedPlan | None, seconds: float) -> list[str]:
    names = [path.partition(".")[2] for path in choice.fields]
    lines = [f"{job.source.name}: {count_line(choice)}; {seconds:.1f} s", f"searched: {', '.join(names)}"]
    front = choice.front
    shown = front if len(front) <= _SHOWN else [*front[: _SHOWN - 2], *front[-2:]]
    chosen = [choice.plan] if choice.plan is not None and choice.plan not in shown else []
    rows = [plan_row(plan, "->" if plan is choice.plan else "") for plan in [*chosen, *shown]]
    if written is not None and not written.code:
        rows.append(plan_row(written, "as written"))
    lines += ["", *(f"  {line}" for line in table(rows, RIGHT, HEAD))]
    if len(shown) < len(front):
        lines.append(f"  and {len(front) - len(shown)} more that no other beats in both time and memory")
    if written is not None and written.code:
        lines.append(f"  as written, the job is refused: {written.code}, {written.message}")
    if choice.plan is not None and choice.plan.source == "bound":
        lines += ["", "times are those of the data sheet, at best: they order plans, and predict none"]
    return lines
