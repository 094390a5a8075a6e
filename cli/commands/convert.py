"""`dslc convert`: a job from the configuration of another tool, with the outcome of every key."""

from __future__ import annotations

import argparse
import os
import sys

from dslc.compiler.facts.untrusted_files import replacing
from dslc.conversion.convert import convert
from dslc.conversion.job_text import job_text
from dslc.conversion.report_text import head_line, key_lines
from dslc.dsl.meaning.load import load_text
from dslc.dsl.plain import plain, plain_lines
from dslc.jobs.check_job import show
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT


def main(arguments: argparse.Namespace) -> int:
    draft = convert(arguments.files, tool=arguments.tool or "", devices=arguments.devices)
    show(draft.report)
    if draft.report.errors:
        return JOB_AT_FAULT
    names = ", ".join(os.path.basename(path) for path in arguments.files)
    text = job_text(draft, plain(f"Converted from {names} by dslc convert."))
    load_result = load_text(text, arguments.output or "job.plt")
    if load_result.report.errors:  # what the tool would refuse too, such as Nesterov's momentum without a momentum
        show(load_result.report)
        return JOB_AT_FAULT
    lines = "\n".join([head_line(arguments.files, draft), *key_lines(draft)])
    if arguments.output:
        with replacing(arguments.output) as file:
            file.write(text)
        print(plain_lines(lines))
        print(plain(f"{arguments.output} written; next: name your network and data there, then dslc check"))
    else:
        print(plain_lines(lines), file=sys.stderr)
        sys.stdout.write(text)
    return GOOD
