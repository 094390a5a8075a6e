"""`dslc choose`: the plans of a job that no other beats in both time and memory, and the plan that `auto` takes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from typing import Any

from dslc.compiler.facts.untrusted_files import replacing
from dslc.compiler.ir.number_text import byte_text, time_text
from dslc.compiler.rules.choice.choice_text import HEAD, RIGHT, choice_json, count_line, plan_row
from dslc.compiler.rules.choice.choose import with_plan
from dslc.compiler.rules.choice.plan_choice import PlanChoice, PricedPlan
from dslc.compiler.show.picture import SUFFIXES
from dslc.compiler.show.picture import write as write_picture
from dslc.compiler.show.plan_scatter import draw_choice
from dslc.compiler.show.text_table import table
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.auto_fields import SEARCHED, auto_fields
from dslc.dsl.meaning.write import write
from dslc.dsl.plain import plain, plain_lines
from dslc.jobs.check_job import show
from dslc.jobs.choose_plan import explore_plans, price_written
from dslc.runs.load_one import load_first
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT, CommandFailedError

_SHOWN = 12  # plans of the front, of which the fastest and the smallest are shown


def main(arguments: argparse.Namespace) -> int:
    if arguments.picture and os.path.splitext(arguments.picture)[1] not in SUFFIXES:
        raise CommandFailedError(plain(f"{arguments.picture}: a picture is {', '.join(SUFFIXES)}"))
    job = _load(arguments)
    if arguments.devices:
        return _compare_counts(job, arguments)
    fields = auto_fields(job) or SEARCHED
    report, start = Report(), time.perf_counter()
    choice = explore_plans(job, report, trace=arguments.trace, fields=fields)
    seconds = time.perf_counter() - start
    show(report)
    if choice is None or (choice.plan is None and not choice.plans):
        return JOB_AT_FAULT
    written_plan = None if auto_fields(job) else price_written(job, trace=arguments.trace)
    if arguments.json:
        json.dump(choice_json(choice) | {"seconds": round(seconds, 3)}, sys.stdout, indent=2)
        print()
    else:
        print(plain_lines("\n".join(_lines(job, choice, written_plan, seconds))))
    if choice.plan is None:
        return JOB_AT_FAULT
    if arguments.picture:
        write_picture(draw_choice(job.source.name, choice), arguments.picture)
        print(plain(f"{arguments.picture} written"), file=sys.stderr)
    if arguments.output:
        with replacing(arguments.output) as file:
            file.write(write(with_plan(job, choice.fields, choice.plan)))
        print(plain(f"{arguments.output} written: the job with the chosen plan"), file=sys.stderr)
    return GOOD


def _load(arguments: argparse.Namespace) -> JobSpec:
    """Returns the job; of a sweep the first combination. Raises CommandFailedError with the mistakes shown."""
    load_result = load_first(arguments.job, arguments.settings)
    if load_result.report.errors or load_result.job is None:
        show(load_result.report)
        raise CommandFailedError(status=JOB_AT_FAULT)
    return replace(load_result.job, sweep={})


def _lines(job: JobSpec, choice: PlanChoice, written_plan: PricedPlan | None, seconds: float) -> list[str]:
    names = [path.partition(".")[2] for path in choice.fields]
    lines = [f"{job.source.name}: {count_line(choice)}; {seconds:.1f} s", f"searched: {', '.join(names)}"]
    front = choice.front
    shown_plans = front if len(front) <= _SHOWN else [*front[: _SHOWN - 2], *front[-2:]]
    hidden_choice = [choice.plan] if choice.plan is not None and choice.plan not in shown_plans else []
    rows = [plan_row(plan, "->" if plan is choice.plan else "") for plan in [*hidden_choice, *shown_plans]]
    if written_plan is not None and not written_plan.code:
        rows.append(plan_row(written_plan, "as written"))
    lines += ["", *(f"  {line}" for line in table(rows, RIGHT, HEAD))]
    if len(shown_plans) < len(front):
        lines.append(f"  and {len(front) - len(shown_plans)} more that no other beats in both time and memory")
    if written_plan is not None and written_plan.code:
        lines.append(f"  as written, the job is refused: {written_plan.code}, {written_plan.message}")
    if choice.plan is not None and choice.plan.source == "bound":
        lines += ["", "times are those of the data sheet, at best: they order plans, and predict none"]
    return lines


# ------------------------------------------------------------------------------------------------- counts of devices


def _compare_counts(job: JobSpec, arguments: argparse.Namespace) -> int:
    """Prints the chosen plan of each count of devices, with what it costs in time and in device hours."""
    if arguments.output or arguments.json or arguments.picture:
        raise CommandFailedError("`--devices` compares several counts: it takes no `-o`, `--json` or `--picture`")
    rows, status = [], JOB_AT_FAULT
    for count in _counts(arguments.devices):
        report = Report()
        choice = explore_plans(
            _with_devices(job, count), report, trace=arguments.trace, fields=auto_fields(job) or SEARCHED
        )
        plan = choice.plan if choice else None
        if plan is None or plan.step_time is None:
            rows.append((str(count), *(f"none: {error.code}, {error.message}" for error in report.errors[:1])))
            continue
        status = GOOD
        device_time = plan.step_time * count
        hours = f"{device_time * job.train.steps / 3600:,.3g}" if job.train.steps else ""
        best = "at best " if plan.source == "bound" else ""
        row = (
            plan.text(),
            f"{best}{time_text(plan.step_time)}",
            byte_text(plan.peak),
            f"{best}{time_text(device_time)}",
            hours,
        )
        rows.append((str(count), *row))
    head = ("devices", "plan", "step time", "memory", "device time of a step", "device hours")
    print(plain_lines("\n".join(table(rows, (0, 2, 3, 4, 5), head))))
    return status


def _counts(text: str) -> list[int]:
    """Returns the counts of a range `8..64`, each twice the one before. Raises CommandFailedError for another text."""
    lowest, dots, highest = text.partition("..")
    if (
        len(text) > 20
        or not (lowest.isdecimal() and (highest.isdecimal() or not dots))
        or not 1 <= int(lowest) <= int(highest or lowest) <= 2**20
    ):
        raise CommandFailedError(plain(f"`--devices {text}` is no count and no range of counts such as 8..64"))
    counts = [int(lowest)]
    while dots and counts[-1] * 2 <= int(highest):
        counts.append(counts[-1] * 2)
    return counts


def _with_devices(job: JobSpec, count: int) -> JobSpec:
    """Returns the job on another count of devices, with as many on a node as it has. Raises CommandFailedError."""
    devices, field = job.devices, "cpus" if job.devices.gpus is None else "gpus"
    per_node = getattr(devices, field) or 1
    if not isinstance(per_node, int) or per_node < 1:
        raise CommandFailedError("`--devices` needs a job that says how many devices a node has: `gpus = 8`")
    if count > per_node and count % per_node:
        raise CommandFailedError(f"{count} devices are no whole number of nodes of {per_node}")
    nodes = max(1, count // per_node)
    changes: dict[str, Any] = {"nodes": nodes, field: count // nodes}
    return replace(job, devices=replace(devices, **changes))
