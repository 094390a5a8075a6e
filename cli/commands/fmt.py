"""`dslc fmt`: one canonical layout."""

from __future__ import annotations

import argparse
import os
import sys

from dslc.dsl.diagnostics import Report
from dslc.dsl.format import format_document
from dslc.dsl.parser import parse
from dslc.dsl.source import Source
from dslc.front import show, unreadable
from dslc.main import GOOD, JOB_AT_FAULT


def main(arguments: argparse.Namespace) -> int:
    status = GOOD
    for path in arguments.jobs:
        try:
            text = sys.stdin.read() if path == "-" else _read(path)
        except (OSError, UnicodeDecodeError) as error:
            unreadable(path, error)
            status = JOB_AT_FAULT
            continue
        report = Report()
        document = parse(Source("<stdin>" if path == "-" else path, text), report)
        if report.errors or document is None:
            show(report)
            status = JOB_AT_FAULT
            continue
        made = format_document(document)
        if path == "-":
            sys.stdout.write(made)
        elif made != text:
            if arguments.check:
                print(f"{path} is not formatted: `dslc fmt {path}` does it", file=sys.stderr)
                status = JOB_AT_FAULT
            else:
                _replace(path, made)
                print(f"{path} formatted", file=sys.stderr)
    return status


def _read(path: str) -> str:
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


def _replace(path: str, text: str) -> None:
    """Writes beside the file and renames, so that a crash never leaves half a job."""
    beside = f"{path}.{os.getpid()}.tmp"
    with open(beside, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    os.replace(beside, path)
