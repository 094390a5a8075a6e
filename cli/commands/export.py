"""`dslc export`: the whole weights of a checkpoint, under plain names, for torch without dslc."""

from __future__ import annotations

import argparse
import os
import sys

from dslc.checkpoints import Misfit, hold_against
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load_each
from dslc.dsl.plain import plain, plain_lines
from dslc.dsl.words import plural
from dslc.front import inspect, show
from dslc.status import GOOD, JOB_AT_FAULT, TRAINING_FAILED, WRONG_USAGE
from dslc.use import Refused, taken_for


def main(arguments: argparse.Namespace) -> int:
    if not arguments.output.endswith((".safetensors", ".pt")):
        print("dslc: weights are written as .safetensors or .pt", file=sys.stderr)
        return WRONG_USAGE
    folder = os.path.dirname(os.path.abspath(arguments.output))
    if not os.path.isdir(folder):
        print(plain(f"dslc: there is no folder {folder}"), file=sys.stderr)
        return WRONG_USAGE
    _, combinations = load_each(arguments.job, arguments.settings)
    report = Report()
    # Only a `.pt` needs the tied weights, for which a user's own module must be made.
    analysis = inspect(combinations[0], report, trace=arguments.output.endswith(".pt"))
    if report.errors or analysis is None:
        show(report.errors)
        return JOB_AT_FAULT
    try:
        taken = taken_for(analysis.job, arguments.checkpoint)
        hold_against(taken, analysis)
    except Refused as refused:
        return refused.status
    except Misfit as misfit:
        print(plain_lines(f"dslc: {misfit}"), file=sys.stderr)
        return JOB_AT_FAULT
    from dslc.runtime.checkpoint.export import export
    from dslc.runtime.checkpoint.state import CheckpointError

    try:
        count = export(
            taken.path, dict(analysis.model.ties) if analysis.model else {}, arguments.output, raw=arguments.raw
        )
    except (CheckpointError, OSError) as error:
        print(plain_lines(f"dslc: {error}"), file=sys.stderr)
        return TRAINING_FAILED
    size = os.path.getsize(arguments.output)
    print(plain(f"{arguments.output}: {plural(count, 'tensor')}, {plural(size, 'byte')}, of {taken}"))
    return GOOD
