"""Fits the constants of a machine to the steps of trainings: of past runs, or of small jobs that are trained for it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dslc.compiler.cost.estimate import fitted_step
from dslc.compiler.cost.fitted_times import CORE, left_out_errors, run_fit, uncovered
from dslc.compiler.facts.calibration import CONSTANTS, RunFit, with_constants
from dslc.compiler.facts.user_calibrations import this_machine
from dslc.compiler.ir.program import TrainMode
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load_text
from dslc.jobs.check_job import inspect
from dslc.jobs.plan_file_input import job_of, open_plan
from dslc.jobs.prepare_run import launch_quietly, prepare

LEAST_RUNS = 3
_STEPS, _LOGGED = 24, 6

_JOB = """model {{
  network = {network}
  loss    = cross_entropy()
}}
data {{
  source = synthetic(samples = 4096, {data})
  batch  = {batch}
}}
devices {{
  cpus = {processes}
}}
parallelism {{
  zero = {zero}
}}
train {{
  steps     = 24
  optimizer = {optimizer}
}}
"""
_TOKENS, _IMAGES = "vocab = 256, context = 64", "shape = [3, 32, 32], classes = 10"
_ADAMW, _SGD = "adamw(lr = 0.001)", "sgd(lr = 0.01, momentum = 0.9)"
_DENSE = "[flatten(), linear({0}), relu(), linear({0}), relu(), linear({0}), relu(), linear(10)]"
_GPT = "gpt(layers = {}, width = {}, heads = 4, context = 64, vocab = 256)"
_CONVOLUTIONS = (
    "[conv2d({0}, padding = 1), batch_norm(sync = false), relu(), max_pool2d(2), conv2d({1}, padding = 1), "
    "batch_norm(sync = false), relu(), adaptive_avg_pool2d(1), flatten(), linear(10)]"
)
# Network, data, batch for one process, optimizer, `zero`.
_SMALL_JOBS = (
    (_DENSE.format(128), _IMAGES, 64, _ADAMW, 0),
    (_DENSE.format(1024), _IMAGES, 32, _SGD, 0),
    (_DENSE.format(1024), _IMAGES, 32, _ADAMW, 3),
    (_GPT.format(2, 64), _TOKENS, 8, _ADAMW, 0),
    (_GPT.format(4, 128), _TOKENS, 8, _ADAMW, 0),
    (_GPT.format(4, 128), _TOKENS, 16, _SGD, 1),
    (_GPT.format(2, 256), _TOKENS, 8, _ADAMW, 3),
    (_CONVOLUTIONS.format(16, 32), _IMAGES, 32, _SGD, 0),
    (_CONVOLUTIONS.format(32, 64), _IMAGES, 64, _ADAMW, 0),
    ("resnet(depth = 18, width = 8, stem = small)", _IMAGES, 16, _SGD, 0),
)
SMALL_TRAININGS = len(_SMALL_JOBS) * 2 - sum(zero > 0 for *_, zero in _SMALL_JOBS)


@dataclass(frozen=True)
class TimedStep:
    """The measured step of a training."""

    name: str
    analysis: Analysis
    seconds: float


class UnusableRunError(Exception):
    """A run whose step cannot be fitted to."""


def step_of_run(folder: str, report: Report) -> TimedStep:
    """Returns the step of a run directory. Raises UnusableRunError; mistakes of its plan are in the report."""
    path = os.path.join(folder, "plan.json")
    try:
        with open(os.path.join(folder, "report.json"), encoding="utf-8") as file:
            seconds = json.load(file)["step_time"]["measured"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnusableRunError(f"{folder} has no report of a run: {error}") from None
    if not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise UnusableRunError(f"{folder} logged too few steps to tell their time")
    plan = open_plan(path, report)
    analysis = inspect(job_of(plan, path), report, trace=True) if plan is not None else None
    if analysis is None or report.errors:
        raise UnusableRunError(f"{folder} has a plan that cannot be analysed here")
    return _timed(folder, analysis, float(seconds))


def steps_of_small_jobs() -> Iterator[str | TimedStep]:
    """Trains small jobs on this machine, on one process and on two, and yields their steps; before each, its name."""
    for processes in range(1, min(2, os.cpu_count() or 1) + 1):
        for network, data, batch, optimizer, zero in _SMALL_JOBS:
            if zero and processes == 1:
                continue
            name = f"{network.partition('(')[0].partition('[')[2] or network.partition('(')[0]} on {processes}"
            yield name
            values = {"network": network, "data": data, "batch": batch * processes, "optimizer": optimizer}
            yield _train_small(name, _JOB.format(**values, processes=processes, zero=zero))


def _train_small(name: str, text: str) -> TimedStep:
    """Trains a small job. Raises KeyboardInterrupt."""
    from dslc.runtime.measure.report import step_time
    from dslc.runtime.process.records import read_metrics

    loaded, report = load_text(text, f"{name}.plt"), Report()
    assert loaded.job is not None, loaded.report.found
    ready = prepare(loaded, report)
    if ready is None:
        raise UnusableRunError("; ".join(each.message for each in report.errors))
    program = replace(ready.program, mode=TrainMode(), steps=_STEPS, log_every=_LOGGED, tensorboard=False)
    folder = tempfile.mkdtemp(prefix="dslc-calibrate-")
    try:
        outcome = launch_quietly(program, ready.places, folder)
        if outcome.failure is not None:
            raise UnusableRunError(f"{name} failed: {outcome.failure.message}")
        seconds = step_time(read_metrics(folder))
    finally:
        shutil.rmtree(folder)
    assert seconds is not None, "it logs each sixth step"
    return _timed(name, ready.compiled.analysis, seconds)


def _timed(name: str, analysis: Analysis, seconds: float) -> TimedStep:
    """Returns a step. Raises UnusableRunError if a fit does not cover its plan."""
    gap = "networks that were not traced" if analysis.staging is None else uncovered(analysis.staging)
    if gap:
        raise UnusableRunError(f"{name} is left out: a fit does not cover {gap}")
    return TimedStep(name, analysis, seconds)


def fit_of(steps: Sequence[TimedStep]) -> tuple[RunFit, list[float]]:
    """Returns the fit to steps on this machine, and the error of each step by a fit to the others."""
    here = this_machine()
    machine = RunFit(machine=here.processor, torch=here.torch, cores=here.cores)
    features = [[_feature(each.analysis, with_constants(machine, {name: 1.0})) for name in CONSTANTS] for each in steps]
    seconds = [each.seconds for each in steps]
    on_cores = all(each.analysis.layout.device == "cpu" for each in steps)
    typical = [CORE[name] for name in CONSTANTS] if on_cores else []
    return run_fit(machine, features, seconds, typical), list(left_out_errors(features, seconds, typical))


def _feature(analysis: Analysis, fit: RunFit) -> float:
    assert analysis.staging is not None
    return fitted_step(analysis.staging, analysis.costs, fit)
