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
from dslc.compiler.facts.calibration import CONSTANTS, CONSTANTS_VERSION, RunFit, with_constants
from dslc.compiler.facts.user_calibrations import this_machine
from dslc.compiler.ir.program import TrainMode
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import LoadResult, load_text
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
  {parallelism}
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
_LSTM = "[embedding(width = 64), lstm(64), linear(256)]"
_LLAMA = "llama(layers = 2, width = 64, heads = 4, hidden = 172, context = 64, vocab = 256)"


@dataclass(frozen=True)
class _SmallJob:
    """A job that is trained for its step, on each of `processes`; `batch` is of one process."""

    name: str
    network: str
    data: str
    batch: int
    optimizer: str
    parallelism: str = ""
    processes: tuple[int, ...] = (1, 2)


_SMALL_JOBS = (
    _SmallJob("dense 128", _DENSE.format(128), _IMAGES, 64, _ADAMW),
    _SmallJob("dense 1024", _DENSE.format(1024), _IMAGES, 32, _SGD),
    _SmallJob("gpt 2 x 64", _GPT.format(2, 64), _TOKENS, 8, _ADAMW),
    _SmallJob("gpt 4 x 128", _GPT.format(4, 128), _TOKENS, 8, _ADAMW),
    _SmallJob("convolutions 16", _CONVOLUTIONS.format(16, 32), _IMAGES, 32, _SGD),
    _SmallJob("convolutions 32", _CONVOLUTIONS.format(32, 64), _IMAGES, 64, _ADAMW),
    _SmallJob("resnet", "resnet(depth = 18, width = 8, stem = small)", _IMAGES, 16, _SGD),
    _SmallJob("lstm", _LSTM, _TOKENS, 8, _ADAMW),
    _SmallJob("dense 1024", _DENSE.format(1024), _IMAGES, 32, _ADAMW, "zero = 3", (2,)),
    _SmallJob("gpt 4 x 128", _GPT.format(4, 128), _TOKENS, 16, _SGD, "zero = 1", (2,)),
    _SmallJob("gpt 2 x 256", _GPT.format(2, 256), _TOKENS, 8, _ADAMW, "zero = 3", (2,)),
    _SmallJob("llama", _LLAMA, _TOKENS, 8, _ADAMW, "zero = 1", (2,)),
    _SmallJob("gpt 4 x 128", _GPT.format(4, 128), _TOKENS, 8, _ADAMW, "microbatches = 4", (2,)),
    _SmallJob("gpt 2 x 64", _GPT.format(2, 64), _TOKENS, 8, _ADAMW, "zero = 3, microbatches = 4", (2,)),
    _SmallJob("gpt 4 x 128", _GPT.format(4, 128), _TOKENS, 8, _ADAMW, "pipeline = 2, microbatches = 4", (2,)),
    _SmallJob("gpt 2 x 64", _GPT.format(2, 64), _TOKENS, 8, _ADAMW, "pipeline = 2, microbatches = 8", (2,)),
    _SmallJob("gpt 2 x 64", _GPT.format(2, 64), _TOKENS, 8, _ADAMW, "tensor = 2", (2,)),
    _SmallJob("llama", _LLAMA, _TOKENS, 8, _ADAMW, "tensor = 2", (2,)),
    # On fewer cores than four, processes take turns.
    _SmallJob("gpt 4 x 128", _GPT.format(4, 128), _TOKENS, 4, _ADAMW, "", (4,)),
    _SmallJob("dense 256", _DENSE.format(256), _IMAGES, 16, _SGD, "zero = 2", (4,)),
    _SmallJob("convolutions 16", _CONVOLUTIONS.format(16, 32), _IMAGES, 16, _SGD, "", (4,)),
)
_SMALL_TRAININGS = tuple(
    (job, processes)
    for processes in (1, 2, 4)
    for job in _SMALL_JOBS
    if processes in job.processes and processes <= 2 * (os.cpu_count() or 1)
)
SMALL_TRAININGS = len(_SMALL_TRAININGS)


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
    """Trains small jobs on this machine, on one to four processes, and yields their steps; before each, its name."""
    for name, text in small_jobs():
        yield name
        yield _train_small(name, text)


def small_jobs() -> Iterator[tuple[str, str]]:
    for job, processes in _SMALL_TRAININGS:
        parallelism = job.parallelism.replace(", ", "\n  ")
        name = f"{job.name} on {processes}{' with ' * bool(parallelism)}{job.parallelism}"
        values = {"network": job.network, "data": job.data, "batch": job.batch * processes, "optimizer": job.optimizer}
        yield name, _JOB.format(**values, processes=processes, parallelism=parallelism)


def _train_small(name: str, text: str) -> TimedStep:
    """Trains a small job. Raises KeyboardInterrupt."""
    loaded = load_text(text, f"{name}.plt")
    assert loaded.job is not None, loaded.report.found
    return trained_step(name, loaded, _STEPS, _LOGGED)


def trained_step(name: str, loaded: LoadResult, steps: int, log_every: int) -> TimedStep:
    """Trains a job for some steps, and returns the time of one. Raises UnusableRunError and KeyboardInterrupt."""
    from dslc.runtime.measure.report import step_time
    from dslc.runtime.process.records import read_metrics

    report = Report()
    ready = prepare(loaded, report)
    if ready is None:
        raise UnusableRunError("; ".join(each.message for each in report.errors))
    program = replace(ready.program, mode=TrainMode(), steps=steps, log_every=log_every, tensorboard=False)
    folder = tempfile.mkdtemp(prefix="dslc-calibrate-")
    try:
        outcome = launch_quietly(program, ready.places, folder)
        if outcome.failure is not None:
            raise UnusableRunError(f"{name} failed: {outcome.failure.message}")
        seconds = step_time(read_metrics(folder))
    finally:
        shutil.rmtree(folder)
    assert seconds is not None, "it logs several steps"
    return _timed(name, ready.compiled.analysis, seconds)


def _timed(name: str, analysis: Analysis, seconds: float) -> TimedStep:
    """Returns a step. Raises UnusableRunError if a fit does not cover its plan."""
    gap = "networks that were not traced" if analysis.staging is None else uncovered(analysis.staging)
    if gap:
        raise UnusableRunError(f"{name} is left out: a fit does not cover {gap}")
    return TimedStep(name, analysis, seconds)


def fit_of(steps: Sequence[TimedStep], typical: Sequence[float] = ()) -> tuple[RunFit, list[float]]:
    """Returns the fit to steps on this machine, and the error of each step by a fit to the others.

    On CPUs constants that the steps tell little about stay near `typical` ones, by default of a core of a server.
    """
    features, seconds = [features_of(each.analysis) for each in steps], [each.seconds for each in steps]
    on_cores = all(each.analysis.layout.device == "cpu" for each in steps)
    near = (typical or [CORE[name] for name in CONSTANTS]) if on_cores else ()
    fit = replace(run_fit(_machine(), features, seconds, near), typical=tuple(typical))
    return fit, list(left_out_errors(features, seconds, near))


def typical_constants(known: RunFit | None) -> list[float]:
    """Returns the constants that a fit to past runs begins with: of small jobs on this machine, if it has any."""
    if known is None:
        return [CORE[name] for name in CONSTANTS]
    return list(known.typical) or [getattr(known, name) or CORE[name] for name in CONSTANTS]


def features_of(analysis: Analysis) -> list[float]:
    """Returns the seconds of a step by each constant alone, at 1."""
    assert analysis.staging is not None
    fits = [with_constants(_machine(), {name: 1.0}) for name in CONSTANTS]
    return [fitted_step(analysis.staging, analysis.costs, fit) for fit in fits]


def _machine() -> RunFit:
    here = this_machine()
    return RunFit(machine=here.processor, torch=here.torch, cores=here.cores, constants=CONSTANTS_VERSION)
