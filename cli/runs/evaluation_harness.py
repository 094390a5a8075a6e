"""Hands an exported model to EleutherAI's `lm-evaluation-harness`, as `lm-eval run --model hf` does by hand."""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from typing import Any

from dslc.dsl.plain import plain
from dslc.terminal.exit_codes import TRAINING_FAILED, CommandFailedError

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


def run_harness(folder: str, tasks: str, options: list[str], *, cpu: bool, quiet: bool) -> dict[str, Any]:
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
        metrics: dict[str, Any] = json.load(file)["results"]
    return metrics
