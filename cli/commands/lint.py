"""`dslc lint`: what is wrong in configurations of other tools, as they are."""

from __future__ import annotations

import argparse
import os
import sys

from dslc.compiler.ir.memory import KINDS
from dslc.conversion.convert import convert
from dslc.conversion.draft import Draft
from dslc.conversion.job_text import job_text
from dslc.conversion.report_text import head_line
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load_text
from dslc.dsl.plain import plain
from dslc.jobs.check_job import inspect, show
from dslc.terminal.diagnostic_formats import github
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT, CommandFailedError


def _describe_memory(draft: Draft, model: str) -> str:
    """Returns the memory of a rank under the configuration's plan, with network and data of the job `model`."""
    from dslc.compiler.ir.number_text import byte_text

    text = job_text(draft, "the plan of a configuration", base=os.path.abspath(model))
    report = Report()
    analysis = inspect(load_text(text), report)
    if report.errors:
        show(report)
        raise CommandFailedError(status=JOB_AT_FAULT)
    if analysis is None or not analysis.costs:
        return "memory of a rank: unknown, because the network is not known without its code"
    memory = max((cost.memory for cost in analysis.costs), key=lambda memory: memory.peak)
    parts = ((kind, getattr(memory, kind)) for kind in KINDS)
    shares = ", ".join(f"{kind.replace('_', ' ')} {byte_text(size)}" for kind, size in parts if size)
    return f"memory of a rank: {byte_text(memory.peak)} ({shares})"


def main(arguments: argparse.Namespace) -> int:
    status = GOOD
    for path in arguments.files:
        draft = convert([path], tool=arguments.tool or "", devices=arguments.devices)
        if draft.tools:
            print(plain(head_line([path], draft)))
        if arguments.model and draft.tools and not draft.report.errors:
            print(plain(f"  {_describe_memory(draft, arguments.model)}"))
        if arguments.format == "github":
            sys.stdout.write(github({path: list(draft.report)}))
        else:
            show(draft.report)
        if draft.report.errors:
            status = JOB_AT_FAULT
    return status
