"""`dslc fmt`: one canonical layout."""

from __future__ import annotations

import argparse
import sys

from dslc.dsl.bounds import BYTES
from dslc.dsl.diagnostics import Report
from dslc.dsl.files import overwrite
from dslc.dsl.meaning.load import decoded, read_text
from dslc.dsl.plain import plain
from dslc.dsl.source import Source
from dslc.dsl.syntax.format import format_document
from dslc.dsl.syntax.parser import parse
from dslc.jobs.check_job import show
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT


def main(arguments: argparse.Namespace) -> int:
    status = GOOD
    for path in arguments.jobs:
        if not _format(path, check=arguments.check):
            status = JOB_AT_FAULT
    return status


def _format(path: str, *, check: bool) -> bool:
    """Formats one job, or shows why it cannot; returns true if all is well."""
    report = Report()
    text = _text(path, report)
    document = parse(Source("<stdin>" if path == "-" else path, text), report) if text is not None else None
    if report.errors or document is None:
        show(report)
        return False
    formatted = format_document(document)
    if check and formatted != text:
        print(plain(f"{path} is not formatted: `dslc fmt {path}` does it"), file=sys.stderr)
        return False
    if path == "-" and not check:
        sys.stdout.write(formatted)
    elif formatted != text:
        overwrite(path, formatted)
        print(plain(f"{path} formatted"), file=sys.stderr)
    return True


def _text(path: str, report: Report) -> str | None:
    """Returns the text of the job, line ends and all; None with the reason in the report."""
    if path != "-":
        return read_text(path, path, path, None, report)
    return decoded(sys.stdin.buffer.read(BYTES.most + 1), "<stdin>", "<stdin>", None, report)
