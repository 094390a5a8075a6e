"""The Python API behind `import dslc`: the same floors as the command, for programs and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dslc.compiler.compile import Compiled, compile_plan
from dslc.dsl.diagnostics import Diagnostic, JobError, Report
from dslc.dsl.meaning.load import load
from dslc.dsl.show import render
from dslc.front import inspect
from dslc.planned import is_plan_file, prepare_plan
from dslc.run_folder import make_folder
from dslc.runs import prepare, train

if TYPE_CHECKING:
    import torch


def _error(report: Report) -> JobError:
    return JobError(report, render(report, color=False).rstrip())


class TrainingError(Exception):
    """A training failed. The message names the rank, the step, the line of the job and the path of the log."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run. `metrics` are the lines of metrics.jsonl; `stopped_at` is the step of an interruption."""

    folder: str
    metrics: tuple[dict[str, Any], ...]
    module: torch.nn.Module
    stopped_at: int | None


def check(path: str, settings: Sequence[str] = (), *, trace: bool = False) -> tuple[Diagnostic, ...]:
    """See `dslc.check`."""
    from dslc.front import check_one

    return tuple(check_one(path, list(settings), trace=trace)[0])


def compile(path: str, settings: Sequence[str] = (), *, trace: bool = False) -> Compiled:
    """See `dslc.compile`."""
    report = Report()
    analysis = inspect(load(path, settings), report, trace=trace)
    if report.errors or analysis is None:
        raise _error(report)
    return compile_plan(analysis)


def run(path: str, settings: Sequence[str] = (), *, out: str | None = None) -> RunResult:
    """See `dslc.run`."""
    from dslc.runtime.checkpoint.weights import load_weights
    from dslc.runtime.launch import run_in_subprocess
    from dslc.runtime.model.build import build_model
    from dslc.runtime.process.failure import describe
    from dslc.runtime.process.records import read_metrics

    report = Report()
    if is_plan_file(path):
        ready = prepare_plan(path, settings, report)
    else:
        ready = prepare(load(path, settings), report)
    if ready is None:
        raise _error(report)
    if ready.loaded.combinations:
        raise ValueError("a job with a sweep is several runs: `dslc run`, or one call for each with `settings`")
    folder = make_folder(ready.program, out)
    outcome, _ = train(ready, folder, run_in_subprocess)
    if outcome.failure is not None:
        raise TrainingError(describe(outcome))
    if outcome.stopped_at == 0:  # asked twice: ended at once, without weights
        raise KeyboardInterrupt
    module = build_model(ready.program.model, "cpu")
    load_weights(module, folder)
    return RunResult(
        folder=folder, metrics=tuple(read_metrics(folder)), module=module.eval(), stopped_at=outcome.stopped_at
    )
