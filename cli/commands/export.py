"""`dslc export`: the whole weights of a checkpoint, under plain names, for torch or `transformers` without dslc."""

from __future__ import annotations

import argparse
import os
import sys

from dslc.checkpoints import Misfit, Taken, hold_against
from dslc.compiler.graph.constants import transformers_step
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.layers import TransformersNetwork
from dslc.dsl.meaning.load import load_each
from dslc.dsl.plain import plain, plain_lines
from dslc.dsl.words import plural
from dslc.front import inspect, show
from dslc.status import GOOD, JOB_AT_FAULT, TRAINING_FAILED, WRONG_USAGE
from dslc.use import Refused, taken_for

_FILES = (".safetensors", ".pt")
_OTHERS = (".bin", ".ckpt", ".csv", ".json", ".npz", ".onnx", ".pth", ".pkl", ".h5")  # no names of folders


def main(arguments: argparse.Namespace) -> int:
    output = arguments.output.rstrip(os.sep) or os.sep
    wrong = _fault(output)
    if wrong:
        print(plain(f"dslc: {wrong}"), file=sys.stderr)
        return WRONG_USAGE
    _, combinations = load_each(arguments.job, arguments.settings)
    report = Report()
    # Only a `.pt` needs the tied weights, for which a user's own module must be made.
    analysis = inspect(combinations[0], report, trace=output.endswith(".pt"))
    if report.errors or analysis is None:
        show(report.errors)
        return JOB_AT_FAULT
    wrong = _fault_of_folder(analysis) if not output.endswith(_FILES) else ""
    if wrong:
        print(plain(f"dslc: {wrong}"), file=sys.stderr)
        return WRONG_USAGE
    try:
        taken = taken_for(analysis.job, arguments.checkpoint)
        hold_against(taken, analysis)
    except Refused as refused:
        return refused.status
    except Misfit as misfit:
        print(plain_lines(f"dslc: {misfit}"), file=sys.stderr)
        return JOB_AT_FAULT
    return _export(analysis, taken, output, arguments)


def _export(analysis: Analysis, taken: Taken, output: str, arguments: argparse.Namespace) -> int:
    from dslc.runtime.checkpoint.export import SHARD, export, export_folder
    from dslc.runtime.checkpoint.state import CheckpointError
    from dslc.runtime.model.model_error import ModelError

    job, raw = analysis.job, arguments.raw
    try:
        if output.endswith(_FILES):
            count = export(taken.path, dict(analysis.model.ties) if analysis.model else {}, output, raw=raw)
        else:
            assert isinstance(job.model.network, TransformersNetwork)
            step = transformers_step(job.model.network, analysis.source, job.folder, job.data.pad)
            count = export_folder(taken.path, step, output, arguments.max_shard_size or SHARD, raw=raw)
    except (CheckpointError, ModelError, OSError, ImportError) as error:
        print(plain_lines(f"dslc: {error}"), file=sys.stderr)
        return TRAINING_FAILED
    size = os.path.getsize(output)
    if os.path.isdir(output):
        size = sum(entry.stat().st_size for entry in os.scandir(output) if entry.name.endswith(".safetensors"))
    print(plain(f"{output}: {plural(count, 'tensor')}, {plural(size, 'byte')}, of {taken}"))
    return GOOD


def _fault(output: str) -> str:
    """Returns the reason why nothing can be written there; "" if there is none."""
    beside = os.path.dirname(os.path.abspath(output))
    if output.endswith(_OTHERS):
        return "weights are written as .safetensors or .pt, or into a folder as `save_pretrained` does"
    if not os.path.isdir(beside):
        return f"there is no folder {beside}"
    if output.endswith(_FILES) or not os.path.lexists(output):
        return ""
    return "" if os.path.isdir(output) and not os.listdir(output) else f"{output} is not an empty folder"


def _fault_of_folder(analysis: Analysis) -> str:
    if not isinstance(analysis.job.model.network, TransformersNetwork):
        return "a folder is written for a `transformers(…)` network; others are written as .safetensors or .pt"
    if analysis.source.input is None:
        return "the data, from which the head of the model follows, is not known: write .safetensors or .pt"
    return ""
