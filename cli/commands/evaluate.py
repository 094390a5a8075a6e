"""`dslc evaluate`: the metrics of a checkpoint over a whole split, on any devices."""

from __future__ import annotations

import argparse
import contextlib
import glob
import importlib.util
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from dslc.commands import export
from dslc.compiler.ir.program import EvaluateMode
from dslc.compiler.show.text_table import table
from dslc.dsl.meaning.load import load
from dslc.dsl.plain import plain
from dslc.jobs.inference import metrics, prepare_inference
from dslc.runs.load_one import load_trained
from dslc.runtime.process.records import finite
from dslc.terminal.exit_codes import GOOD, TRAINING_FAILED, CommandFailedError

# transformers imports a torchvision that may not have been made for this build of torch.
_START = """
from dslc.runtime.process.vision_library import let_torchvision_load
let_torchvision_load()
from lm_eval.__main__ import cli_evaluate
cli_evaluate()
"""


def tasks_and_options(text: str) -> tuple[str, list[str]]:
    """Returns the tasks and the harness's own options in the text of `--lm-eval`. Raises CommandFailedError."""
    try:
        tasks, *options = shlex.split(text) or [""]
    except ValueError as error:
        raise CommandFailedError(plain(f"--lm-eval is `{text}`: {error}")) from error
    if not tasks or tasks.startswith("-"):
        raise CommandFailedError(plain(f"--lm-eval is `{text}`: the tasks come first, `hellaswag,arc_easy --limit 10`"))
    if importlib.util.find_spec("lm_eval") is None:
        raise CommandFailedError("--lm-eval needs the evaluation harness: `pip install 'dslc[lm-eval]'` installs it")
    return tasks, options


def run_harness(folder: str, tasks: str, options: list[str], *, cpu: bool, quiet: bool) -> dict[str, object]:
    """Evaluates the model in `folder` on `tasks`; returns the metrics of each task.

    The harness prints its own table, unless `quiet`, and its messages. Raises CommandFailedError if it fails.
    """
    results = os.path.join(folder, "results")
    device = [] if "--device" in options or not cpu else ["--device", "cpu"]
    command = [sys.executable, "-c", _START, "run", "--model", "hf", "--model_args", f"pretrained={folder}"]
    command += ["--tasks", tasks, *device, *options, "--output_path", results]
    if subprocess.run(command, check=False, stdout=sys.stderr if quiet else None).returncode:
        raise CommandFailedError("the evaluation harness failed: its own messages are above", status=TRAINING_FAILED)
    files = glob.glob(os.path.join(glob.escape(results), "**", "results_*.json"), recursive=True)
    if not files:
        raise CommandFailedError("the evaluation harness wrote no results: name the tasks to evaluate")
    with open(files[0], encoding="utf-8") as file:
        metrics: dict[str, object] = json.load(file)["results"]
    return metrics


def main(arguments: argparse.Namespace) -> int:
    if arguments.lm_eval is not None:
        return _evaluate_by_harness(arguments)
    loaded, weights = load_trained(arguments.job, arguments.settings, arguments.checkpoint)
    split = arguments.split or "validation"
    ready, selected = prepare_inference(
        loaded, weights or arguments.checkpoint, EvaluateMode, split=split, raw=arguments.raw
    )
    samples = getattr(ready.program.data, f"{split}_samples")
    if not samples:
        raise CommandFailedError(
            f"there is nothing to evaluate on: the job holds no samples out (`--set data.{split}=10%`)"
        )
    results = metrics(ready)
    if arguments.json:
        step = selected.manifest.step if selected.manifest else None
        print(json.dumps({"checkpoint": selected.path, "step": step, "samples": samples, **finite(results)}))
        return GOOD
    print(plain(f"{selected} over {samples:,} {split} samples"))

    for line in table(row for name, value in results.items() for row in _rows(name, value)):
        print(f"  {line}")
    return GOOD


def _evaluate_by_harness(arguments: argparse.Namespace) -> int:
    """Exports the model into a folder that is removed afterwards, and has the harness evaluate it there."""
    if arguments.split is not None:
        raise CommandFailedError("--split chooses samples of the job, and --lm-eval takes those of its tasks: give one")
    tasks, options = tasks_and_options(arguments.lm_eval)
    job = load(arguments.job, arguments.settings).job
    with tempfile.TemporaryDirectory(prefix="dslc-evaluate-") as temporary:
        folder = os.path.join(temporary, "model")
        wanted = {"output": folder, "adapter": False, "max_shard_size": None}
        with contextlib.redirect_stdout(io.StringIO()):
            status = export.main(argparse.Namespace(**{**vars(arguments), **wanted}))
        if status != GOOD:
            return status
        cpu = job is not None and job.devices.gpus is None
        metrics = run_harness(folder, tasks, options, cpu=cpu, quiet=arguments.json)
    if arguments.json:
        print(json.dumps(finite(metrics)))
    return GOOD


def _rows(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yields the lines of a metric: one, or as many as a matrix has."""
    if not isinstance(value, list):
        yield name, f"{value:.6g}"
    elif value and isinstance(value[0], list):
        for number, row in enumerate(value):
            yield from _rows(f"{name}[{number}]", row)
    else:
        yield name, "  ".join(f"{number:.6g}" for number in value)
