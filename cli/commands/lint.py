"""`dslc lint`: what is wrong in configurations of other tools, as they are."""

from __future__ import annotations

import argparse

from dslc.conversion.convert import convert
from dslc.conversion.report_text import github_annotations, head_line
from dslc.dsl.plain import plain
from dslc.jobs.check_job import show
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT


def main(arguments: argparse.Namespace) -> int:
    status = GOOD
    for path in arguments.files:
        draft = convert([path], tool=arguments.tool or "", devices=arguments.devices)
        if draft.tools:
            print(plain(head_line([path], draft)))
        if arguments.format == "github":
            for line in github_annotations(draft.report):
                print(plain(line))
        else:
            show(draft.report)
        if draft.report.errors:
            status = JOB_AT_FAULT
    return status
