"""The Python interface, `import dslc`: the same floors as the command, for programs and notebooks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dslc.dsl.diagnostics import Diagnostic, JobError, Report
from dslc.dsl.meaning.load import LoadResult, load, load_text
from dslc.dsl.show import render as shown_text
from dslc.jobs.check_job import check_one, inspect
from dslc.probe.gpus import restore_visible
from dslc.python_api.html_views import diagnostics_html, run_html
from dslc.python_api.python_objects import object_settings, settings_of
from dslc.runs.run_folder import make_folder
from dslc.runtime.process.records import Record, read_metrics
from dslc.runtime.process.user_code import hand_over, search_path
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT

if TYPE_CHECKING:
    import torch

    from dslc.compiler.compile import Compiled
import time

from dslc.python_api.html_views import loss_curve, progress_html
from dslc.runtime.process.records import NOTES, Follower

EVERY = 0.5  # seconds between two updates
Update = Callable[[str], None]


def notebook_output() -> Update | None:
    """Returns what shows HTML in the present cell of a notebook, in place of what it showed before; None elsewhere."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if not hasattr(shell, "kernel"):
        return None
    handle = ipython.display.display(ipython.display.HTML(""), display_id=True)
    return lambda page: handle.update(ipython.display.HTML(page))


class LiveProgress:
    """Shows the records of a training, at most every `EVERY` seconds, and its notes."""

    def __init__(self, update: Update, steps: int, folder: str) -> None:
        self._update, self._steps = update, steps
        self._notes, self._shown_notes = Follower(os.path.join(folder, NOTES)), list[str]()
        self._records: list[Record] = []
        self._at = -EVERY

    def record(self, record: Record) -> None:
        """Takes a record, and shows it unless another was shown a moment ago."""
        self._records.append(record)
        if time.monotonic() - self._at >= EVERY:
            self._show("")

    def close(self, end: str) -> None:
        """Shows how the training ended."""
        self._show(end)

    def _show(self, end: str) -> None:
        self._at = time.monotonic()
        self._shown_notes += [line.rstrip() for line in self._notes.new()]
        last = {record["split"]: record for record in self._records}
        step = max((record["step"] for record in last.values()), default=0)
        curve = loss_curve(self._records)
        self._update(progress_html(step, self._steps, last, curve, self._shown_notes, end))


__all__ = [
    "CommandError",
    "JobError",
    "TrainingError",
    "check",
    "compile",
    "evaluate",
    "export",
    "predict",
    "render",
    "run",
    "verify",
]


def _error(report: Report) -> JobError:
    return JobError(report, shown_text(report, color=False).rstrip())


class TrainingError(Exception):
    """A training failed. The message names the rank, the step, the line of the job and the path of the log."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run. `metrics` are the lines of metrics.jsonl; `stopped_at` is the step of an interruption."""

    folder: str
    metrics: tuple[Record, ...]
    module: torch.nn.Module
    stopped_at: int | None

    def _repr_html_(self) -> str:
        return run_html(self.folder, self.metrics)


class Diagnostics(tuple[Diagnostic, ...]):
    """The diagnostics of a job, which a notebook shows with their lines."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return diagnostics_html(self)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of `dslc.verify`: `holds` if the plan trains as one process and a plain loop do; `text` says how."""

    holds: bool
    text: str

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.text)


def is_text(job: str) -> bool:
    """True for the text of a job, which no path looks like."""
    return "\n" in job or "{" in job


def _load_job(job: str, settings: Sequence[str]) -> LoadResult:
    return load_text(job, settings=settings) if is_text(job) else load(job, settings)


@contextlib.contextmanager
def _all_settings(
    settings: Sequence[str], values: Mapping[str, object] | None, objects: Mapping[str, object]
) -> Iterator[list[str]]:
    """Yields all settings: settings from the objects come first, so that others may change the objects' arguments."""
    if isinstance(settings, str):
        raise TypeError("`settings` is a list of texts: `settings=['train.epochs=2']`")
    try:
        with object_settings(objects) as first:
            yield [*first, *settings, *settings_of(values or {})]
    finally:
        restore_visible()  # a job may have taken free GPUs


@contextlib.contextmanager
def _as_file(job: str) -> Iterator[str]:
    """Yields the path of a job; a text is written beside what it names, into the current folder, meanwhile."""
    if not is_text(job):
        yield job
        return
    with tempfile.NamedTemporaryFile("w", suffix=".plt", prefix="job-", dir=".", encoding="utf-8") as file:
        file.write(job)
        file.flush()
        yield os.path.relpath(file.name)


def check(
    job: str,
    settings: Sequence[str] = (),
    *,
    set: Mapping[str, object] | None = None,
    trace: bool = False,
    **objects: object,
) -> tuple[Diagnostic, ...]:
    """Returns every mistake and warning of a job, as `dslc check` finds them; none is an error if the job is valid.

    With `trace`, or with objects, functions that the job names as `python(…)` are called, in a process of their own.
    """
    with _all_settings(settings, set, objects) as laid, _as_file(job) as path:
        return Diagnostics(check_one(path, laid, trace=trace or any(each is not None for each in objects.values()))[0])


def compile(
    job: str,
    settings: Sequence[str] = (),
    *,
    set: Mapping[str, object] | None = None,
    trace: bool = False,
    **objects: object,
) -> Compiled:
    """Returns the plan of a job. Raises `JobError`, which holds all mistakes and prints them."""
    from dslc.compiler.compile import compile_plan

    report = Report()
    with _all_settings(settings, set, objects) as laid:
        traced = trace or any(each is not None for each in objects.values())
        analysis = inspect(_load_job(job, laid), report, trace=traced)
    if report.errors or analysis is None:
        raise _error(report)
    return compile_plan(analysis)


def run(
    job: str,
    settings: Sequence[str] = (),
    *,
    out: str | None = None,
    set: Mapping[str, object] | None = None,
    quiet: bool = False,
    callback: Callable[[Record], object] | None = None,
    **objects: object,
) -> RunResult:
    """Trains, as `dslc run` does, and returns the metrics and the trained module to the caller.

    `job` may be a plan file, which takes no settings. The processes are started from a fresh interpreter, so it may be
    called from a notebook, or after torch has been used. Objects go there by cloudpickle: objects of a module by name;
    objects defined in the program itself by value, lambdas and local classes too. So does `python("__main__:f")`. With
    `quiet` nothing is printed. `callback` is called, in this process, with each record of `metrics.jsonl`; an exception
    of it ends the training after a step, and is raised. Raises `JobError` if the job is at fault;
    `dslc.runs.run_folder.FolderInUseError` if `out` holds other things or another run is writing there; `TrainingError`
    if the training failed; TypeError for an object that cannot be passed to another process.
    """
    with _all_settings(settings, set, objects) as laid:
        return _run(job, laid, out, quiet, callback)


def _run(
    job: str, settings: list[str], out: str | None, quiet: bool, callback: Callable[[Record], object] | None
) -> RunResult:
    from dslc.jobs.plan_file_input import is_plan_file, prepare_plan
    from dslc.jobs.prepare_run import check_batches, prepare, train
    from dslc.runtime.checkpoint.weights import load_weights
    from dslc.runtime.launch import run_in_subprocess
    from dslc.runtime.model.meta_model import build_model
    from dslc.runtime.process.failure import describe

    report = Report()
    if not is_text(job) and is_plan_file(job):
        ready = prepare_plan(job, settings, report)
    else:
        ready = prepare(_load_job(job, settings), report)
    if ready is not None:
        check_batches(ready, report)
    if ready is None or report.errors:
        raise _error(report)
    if ready.loaded.combinations:
        raise ValueError("a job with a sweep is several runs: `dslc run`, or one call for each with `settings`")
    folder = make_folder(ready.program, out)
    output = None if quiet else notebook_output()
    progress = LiveProgress(output, ready.program.steps, folder) if output is not None else None
    receiver = _passed_to(callback, progress)
    outcome, _ = train(
        ready, folder, partial(run_in_subprocess, quiet=quiet or progress is not None, callback=receiver)
    )
    if progress is not None:
        failed = outcome.failure is not None
        progress.close("failed" if failed else "done" if outcome.stopped_at is None else "stopped")
    if outcome.failure is not None:
        raise TrainingError(describe(outcome))
    if outcome.stopped_at == 0:  # asked twice: ended at once, without weights
        raise KeyboardInterrupt
    module = build_model(ready.program.model, "cpu")
    load_weights(module, folder)
    return RunResult(
        folder=folder, metrics=tuple(read_metrics(folder)), module=module.eval(), stopped_at=outcome.stopped_at
    )


def _passed_to(
    callback: Callable[[Record], object] | None, progress: LiveProgress | None
) -> Callable[[Record], object] | None:
    """Returns what receives each record: the caller's function, the progress of a notebook, or both."""
    if progress is None or callback is None:
        return progress.record if progress is not None else callback

    def receive(record: Record) -> None:
        progress.record(record)
        callback(record)

    return receive


def evaluate(
    job: str,
    settings: Sequence[str] = (),
    *,
    checkpoint: str | None = None,
    split: str = "validation",
    set: Mapping[str, object] | None = None,
    **objects: object,
) -> Record:
    """Returns the metrics of a checkpoint over a whole split, `validation` or `test`, by name, as `dslc evaluate` does.
    `checkpoint` is one, a folder of them, or a run directory; by default the job's newest. Raises `JobError` and
    `CommandError`.
    """
    with _all_settings(settings, set, objects) as laid, _as_file(job) as path:
        shown, _ = run_command("evaluate", path, laid, ["--json", "--split", split, *_checkpoint_options(checkpoint)])
    found: Record = json.loads(shown)
    return {name: value for name, value in found.items() if name not in ("checkpoint", "step", "samples")}


def predict(
    job: str,
    output: str,
    settings: Sequence[str] = (),
    *,
    checkpoint: str | None = None,
    split: str = "validation",
    set: Mapping[str, object] | None = None,
    **objects: object,
) -> str:
    """Writes the outputs of a checkpoint for every sample of a split (`train`, `validation`, `test` or `all`) to
    `output`, and returns its path. The `.npz` or `.safetensors` file holds `output`, or `output.NAME` for each tensor
    of a structure, and `index`, the numbers of the samples. Raises `JobError` and `CommandError`.
    """
    with _all_settings(settings, set, objects) as laid, _as_file(job) as path:
        run_command("predict", path, laid, ["-o", output, "--split", split, *_checkpoint_options(checkpoint)])
    return output


def export(
    job: str,
    output: str,
    settings: Sequence[str] = (),
    *,
    checkpoint: str | None = None,
    set: Mapping[str, object] | None = None,
    **objects: object,
) -> str:
    """Writes a checkpoint's whole weights to a `.safetensors` or `.pt` file. Raises `JobError`, `CommandError`."""
    with _all_settings(settings, set, objects) as laid, _as_file(job) as path:
        run_command("export", path, laid, ["-o", output, *_checkpoint_options(checkpoint)])
    return output


def verify(
    job: str,
    settings: Sequence[str] = (),
    *,
    steps: int = 5,
    set: Mapping[str, object] | None = None,
    **objects: object,
) -> Verification:
    """Trains some steps under the plan, in one process and in a plain loop of torch, as `dslc verify` does; the result
    has `holds` and the `text` of the comparison. Raises `JobError` and `CommandError`.
    """
    with _all_settings(settings, set, objects) as laid, _as_file(job) as path:
        shown, holds = run_command("verify", path, laid, ["--steps", str(steps)], may_disagree=True)
    return Verification(holds=holds, text=shown)


def render(
    job: str,
    output: str,
    settings: Sequence[str] = (),
    *,
    view: str = "placement",
    set: Mapping[str, object] | None = None,
    trace: bool = False,
    **objects: object,
) -> str:
    """Draws the plan to `output` (`.svg`, `.png`, `.dot` or `.html`), whose path it returns; `view` is `placement`,
    `graph` or `schedule`. Raises `JobError` and `CommandError`.
    """
    more = ["--trace"] if trace or any(each is not None for each in objects.values()) else []
    with _all_settings(settings, set, objects) as laid, _as_file(job) as path:
        run_command("render", path, laid, ["-o", output, "--view", view, *more])
    return output


def _checkpoint_options(checkpoint: str | None) -> list[str]:
    return [] if checkpoint is None else ["--checkpoint", checkpoint]


_START = """
import sys
from dslc.runtime.process.user_code import take_over
from dslc.main import main
if sys.argv[1]:
    take_over(sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""


class CommandError(Exception):
    """A command ended badly; the text is what it said."""


def run_command(
    command: str, path: str, settings: Sequence[str], options: Sequence[str], *, may_disagree: bool = False
) -> tuple[str, bool]:
    """Runs `dslc COMMAND PATH …`; returns its output, and whether it ended well, as it must unless it `may_disagree`
    with a job that has no mistake. Raises JobError, CommandError, KeyboardInterrupt.
    """
    words = [command, path, *options]
    for setting in settings:
        words += ["--set", setting]
    with tempfile.TemporaryDirectory(prefix="dslc-") as folder:
        functions = os.path.join(folder, "functions.pkl")
        hand_over(_named(settings), functions)
        # -P: no module of the current folder hides those of Python and torch.
        child = subprocess.run(
            [sys.executable, "-P", "-c", _START, functions if os.path.exists(functions) else "", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path())},
            check=False,
        )
    if child.returncode == 130:
        raise KeyboardInterrupt
    if child.returncode == JOB_AT_FAULT:
        _raise_mistakes(path, settings)
        if may_disagree and child.stdout:
            return child.stdout, False
    if child.returncode != GOOD:
        raise CommandError(child.stderr.strip() or child.stdout.strip() or f"exit status {child.returncode}")
    return child.stdout, True


def _named(settings: Sequence[str]) -> list[str]:
    """Returns the functions that settings name; the functions of this program are handed over."""
    return [text.split('"')[1] for text in " ".join(settings).split("python(")[1:] if text.startswith('"')]


def _raise_mistakes(path: str, settings: Sequence[str]) -> None:
    """Raises JobError if the job has mistakes, found anew here; returns if the fault is another."""
    report: Report = check_one(path, list(settings), trace=True)[0]
    if report.errors:
        raise _error(report)
