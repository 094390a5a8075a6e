"""The Python API behind `import dslc`: the same floors as the command, for programs and notebooks."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dslc.called import run_command
from dslc.compiler.compile import Compiled, compile_plan
from dslc.dsl.diagnostics import Diagnostic, JobError, Report
from dslc.dsl.meaning.load import Loaded, load, load_text
from dslc.dsl.show import render as shown_text
from dslc.front import inspect
from dslc.given import given, settings_of
from dslc.planned import is_plan_file, prepare_plan
from dslc.run_folder import make_folder
from dslc.runs import prepare, train

if TYPE_CHECKING:
    import torch


def _error(report: Report) -> JobError:
    return JobError(report, shown_text(report, color=False).rstrip())


class TrainingError(Exception):
    """A training failed. The message names the rank, the step, the line of the job and the path of the log."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run. `metrics` are the lines of metrics.jsonl; `stopped_at` is the step of an interruption."""

    folder: str
    metrics: tuple[dict[str, Any], ...]
    module: torch.nn.Module
    stopped_at: int | None


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of `dslc.verify`: `holds` if the plan trains as one process and a plain loop do; `text` says how."""

    holds: bool
    text: str


def is_text(job: str) -> bool:
    """True for the text of a job, which no path looks like."""
    return "\n" in job or "{" in job


def _loaded(job: str, settings: Sequence[str]) -> Loaded:
    return load_text(job, settings=settings) if is_text(job) else load(job, settings)


@contextlib.contextmanager
def _given(
    settings: Sequence[str], values: Mapping[str, Any] | None, objects: Mapping[str, Any]
) -> Iterator[list[str]]:
    """Yields all settings: those of the objects first, so that others may change their arguments."""
    if isinstance(settings, str):
        raise TypeError("`settings` is a list of texts: `settings=['train.epochs=2']`")
    with given(objects) as first:
        yield [*first, *settings, *settings_of(values or {})]


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
    set: Mapping[str, Any] | None = None,
    trace: bool = False,
    **objects: Any,
) -> tuple[Diagnostic, ...]:
    """See `dslc.check`."""
    from dslc.front import check_one

    with _given(settings, set, objects) as laid, _as_file(job) as path:
        return tuple(check_one(path, laid, trace=trace or any(each is not None for each in objects.values()))[0])


def compile(
    job: str,
    settings: Sequence[str] = (),
    *,
    set: Mapping[str, Any] | None = None,
    trace: bool = False,
    **objects: Any,
) -> Compiled:
    """See `dslc.compile`."""
    report = Report()
    with _given(settings, set, objects) as laid:
        traced = trace or any(each is not None for each in objects.values())
        analysis = inspect(_loaded(job, laid), report, trace=traced)
    if report.errors or analysis is None:
        raise _error(report)
    return compile_plan(analysis)


def run(
    job: str,
    settings: Sequence[str] = (),
    *,
    out: str | None = None,
    set: Mapping[str, Any] | None = None,
    quiet: bool = False,
    callback: Callable[[dict[str, Any]], object] | None = None,
    **objects: Any,
) -> RunResult:
    """See `dslc.run`."""
    with _given(settings, set, objects) as laid:
        return _run(job, laid, out, quiet, callback)


def _run(
    job: str,
    settings: list[str],
    out: str | None,
    quiet: bool,
    callback: Callable[[dict[str, Any]], object] | None,
) -> RunResult:
    from dslc.runtime.checkpoint.weights import load_weights
    from dslc.runtime.launch import run_in_subprocess
    from dslc.runtime.model.build import build_model
    from dslc.runtime.process.failure import describe
    from dslc.runtime.process.records import read_metrics

    report = Report()
    if not is_text(job) and is_plan_file(job):
        ready = prepare_plan(job, settings, report)
    else:
        ready = prepare(_loaded(job, settings), report)
    if ready is None:
        raise _error(report)
    if ready.loaded.combinations:
        raise ValueError("a job with a sweep is several runs: `dslc run`, or one call for each with `settings`")
    folder = make_folder(ready.program, out)
    outcome, _ = train(ready, folder, partial(run_in_subprocess, quiet=quiet, callback=callback))
    if outcome.failure is not None:
        raise TrainingError(describe(outcome))
    if outcome.stopped_at == 0:  # asked twice: ended at once, without weights
        raise KeyboardInterrupt
    module = build_model(ready.program.model, "cpu")
    load_weights(module, folder)
    return RunResult(
        folder=folder, metrics=tuple(read_metrics(folder)), module=module.eval(), stopped_at=outcome.stopped_at
    )


def evaluate(
    job: str,
    settings: Sequence[str] = (),
    *,
    checkpoint: str | None = None,
    set: Mapping[str, Any] | None = None,
    **objects: Any,
) -> dict[str, Any]:
    """See `dslc.evaluate`."""
    with _given(settings, set, objects) as laid, _as_file(job) as path:
        shown, _ = run_command("evaluate", path, laid, ["--json", *_of(checkpoint)])
    found: dict[str, Any] = json.loads(shown)
    return {name: value for name, value in found.items() if name not in ("checkpoint", "step", "samples")}


def predict(
    job: str,
    output: str,
    settings: Sequence[str] = (),
    *,
    checkpoint: str | None = None,
    split: str = "validation",
    set: Mapping[str, Any] | None = None,
    **objects: Any,
) -> str:
    """See `dslc.predict`."""
    with _given(settings, set, objects) as laid, _as_file(job) as path:
        run_command("predict", path, laid, ["-o", output, "--split", split, *_of(checkpoint)])
    return output


def export(
    job: str,
    output: str,
    settings: Sequence[str] = (),
    *,
    checkpoint: str | None = None,
    set: Mapping[str, Any] | None = None,
    **objects: Any,
) -> str:
    """See `dslc.export`."""
    with _given(settings, set, objects) as laid, _as_file(job) as path:
        run_command("export", path, laid, ["-o", output, *_of(checkpoint)])
    return output


def verify(
    job: str,
    settings: Sequence[str] = (),
    *,
    steps: int = 5,
    set: Mapping[str, Any] | None = None,
    **objects: Any,
) -> Verification:
    """See `dslc.verify`."""
    with _given(settings, set, objects) as laid, _as_file(job) as path:
        shown, holds = run_command("verify", path, laid, ["--steps", str(steps)], may_disagree=True)
    return Verification(holds=holds, text=shown)


def render(
    job: str,
    output: str,
    settings: Sequence[str] = (),
    *,
    view: str = "placement",
    set: Mapping[str, Any] | None = None,
    trace: bool = False,
    **objects: Any,
) -> str:
    """See `dslc.render`."""
    more = ["--trace"] if trace or any(each is not None for each in objects.values()) else []
    with _given(settings, set, objects) as laid, _as_file(job) as path:
        run_command("render", path, laid, ["-o", output, "--view", view, *more])
    return output


def _of(checkpoint: str | None) -> list[str]:
    return [] if checkpoint is None else ["--checkpoint", checkpoint]
