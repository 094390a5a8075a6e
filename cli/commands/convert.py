"""`dslc convert`: a job from the configuration of another tool, with the outcome of every key."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile

from dslc.compiler.facts.untrusted_files import replacing
from dslc.conversion.convert import convert
from dslc.conversion.draft import Draft
from dslc.conversion.job_text import job_text
from dslc.conversion.report_text import head_line, key_lines
from dslc.dsl.meaning.load import load_text
from dslc.dsl.plain import plain, plain_lines
from dslc.jobs.check_job import show
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT, TRAINING_FAILED, CommandFailedError

_STEPS = 12  # of a proof


def _prove(draft: Draft, arguments: argparse.Namespace) -> int:
    """Trains with the other tool and with the job, and prints both curves."""
    from dslc.proof.prove import prove, show_proof
    from dslc.proof.run_tool import LOG, ToolError

    steps = _STEPS if arguments.steps is None else arguments.steps
    if steps < 2:
        raise CommandFailedError("--steps takes a number of at least 2: one step shows no update")
    if not arguments.output:
        print(plain(head_line(arguments.files, draft)))
    folder = tempfile.mkdtemp(prefix="dslc-proof-")
    log = os.path.join(folder, LOG)
    print(f"training {steps} steps with the tool, which may compile first, and the job: {log}", file=sys.stderr)
    try:
        proof = prove(
            draft,
            model=arguments.model or "",
            python=arguments.python or sys.executable,
            steps=steps,
            folder=folder,
        )
    except ToolError as error:
        raise CommandFailedError(str(error), TRAINING_FAILED) from None
    finally:
        if sys.exc_info()[0] is None or not os.path.exists(log):
            shutil.rmtree(folder)  # or the log of what failed is kept
    show_proof(proof)
    return GOOD


def main(arguments: argparse.Namespace) -> int:
    if not arguments.prove and (arguments.model or arguments.python or arguments.steps is not None):
        raise CommandFailedError("--model, --python and --steps belong to --prove")
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
    elif not arguments.prove:
        print(plain_lines(lines), file=sys.stderr)
        sys.stdout.write(text)
    return _prove(draft, arguments) if arguments.prove else GOOD
