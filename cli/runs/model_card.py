"""The model card of an exported folder: what trained, how far, by which job and plan. Hubs show it as the first page.

Model: weights lie in a run directory, whose `plan.json`, with the job as written, and `metrics.jsonl` say what trained
them. Weights from elsewhere have a card without these parts.
"""

from __future__ import annotations

import os
import re

from dslc.compiler.plan_file import PlanFile, PlanFileError, read_plan
from dslc.compiler.show.explain import explain
from dslc.dsl.bounds import PLAN
from dslc.dsl.files import TooLarge, read_bytes
from dslc.dsl.plain import plain, plain_lines
from dslc.dsl.words import plural
from dslc.runs.checkpoints import SelectedWeights
from dslc.runtime.process.records import NAME as METRICS
from dslc.runtime.process.records import Record, overview_numbers, readable_records

_PIPELINES = {  # the hub's name of what a model does, by the job's word for its head
    "causal_lm": "text-generation",
    "masked_lm": "fill-mask",
    "seq2seq_lm": "text2text-generation",
    "sequence_classification": "text-classification",
    "token_classification": "token-classification",
    "question_answering": "question-answering",
    "image_classification": "image-classification",
}
_WIDTH = 120  # columns of the plan


def model_card(name: str, weights: SelectedWeights, *, task: str, start: str, library: str) -> str:
    """Returns the card of a job's weights. `task` is the job's word for the head, `start` the file or folder from which
    the training began, both "" if there is none. `library` loads the folder: transformers or peft.
    """
    manifest = weights.manifest
    run = _run_folder(weights.path)
    plan = _plan(run) if run else None
    lines = ["---", f"library_name: {library}"]
    lines += [f"pipeline_tag: {_PIPELINES[task]}"] if task in _PIPELINES else []
    lines += ["tags:", "- dslc", "---", "", f"# {plain(name)}", ""]
    trained_with = f" with dslc {plan.dslc}" if plan else " with dslc"
    if manifest:
        step = f"step {manifest.step:,} of {manifest.steps:,}" if manifest.steps else f"step {manifest.step:,}"
        lines.append(f"Trained{trained_with} to {step}, on {plural(manifest.samples, 'sample')}.")
    else:
        lines.append(f"Trained{trained_with}.")
    if start:
        lines += ["", f"The training began with the weights of `{plain(os.path.basename(start))}`."]
    if run:
        lines += _metric_lines(run, manifest.step if manifest else None)
    if plan:
        settings = [f"# --set {setting}" for setting in plan.source.settings]
        lines += _block("Job", "\n".join([*settings, plan.source.files[-1][1]]))
        lines += _block("Plan", explain(plan.plan, _WIDTH))
    return "\n".join(lines) + "\n"


def _run_folder(path: str) -> str:
    """Returns the run directory of a checkpoint or of final weights; "" if they are in none."""
    folder = os.path.dirname(os.path.abspath(path))
    candidates = (folder, os.path.dirname(folder))
    return next((run for run in candidates if os.path.isfile(os.path.join(run, METRICS))), "")


def _plan(run: str) -> PlanFile | None:
    """Returns the plan of a run; None if this version cannot read it."""
    try:
        return read_plan(read_bytes(os.path.join(run, "plan.json"), PLAN.most).decode())
    except (PlanFileError, TooLarge, OSError, ValueError):
        return None


def _metric_lines(run: str, step: int | None) -> list[str]:
    """Returns a table of the last metrics up to a step."""
    last: dict[str, Record] = {}
    for record in readable_records(run):
        if step is None or record["step"] <= step:
            last[record["split"]] = record
    rows = [
        f"| {split} | {plain(metric).replace('|', '/')} | {value:.4g} | {record['step']:,} |"
        for split, record in last.items()
        for metric, value in overview_numbers(record)
        if value is not None and metric != "lr"
    ]
    return (
        ["", "## Metrics", "", "| split | metric | value | step |", "| --- | --- | --- | --- |", *rows] if rows else []
    )


def _block(title: str, text: str) -> list[str]:
    """Returns a section with a block of code, whose fence is longer than each in the text."""
    fence = "~" * max(4, 1 + max(map(len, re.findall("~+", text)), default=0))
    return ["", f"## {title}", "", f"{fence}text", plain_lines(text).rstrip(), fence]
