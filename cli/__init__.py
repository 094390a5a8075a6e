"""dslc: a compiler for distributed PyTorch training.

    import dslc

    for diagnostic in dslc.check("job.plt"):
        print(diagnostic.code, diagnostic.message)
    plan = dslc.compile("job.plt").plan
    result = dslc.run("job.plt", set={"train.epochs": 2}, network=MyNetwork)
    result.metrics[-1]["loss"], result.module(batch)
    dslc.evaluate("job.plt", checkpoint=result.folder)

A job is the path of a file, or its text. `settings` are what follows `--set` on the command line, `set` the same as
values of Python: numbers, booleans, None, lists, paths; text stands as in a job. The objects `network`, `loss`,
`source`, `optimizer`, `lr_schedule`, `metrics`, `hooks` and `loggers` stand in place of `python("module:function")`:
functions, classes, lambdas, modules, data sets (docs/python.md). A job at fault raises `dslc.JobError`, whose text is
all its mistakes; a failed training `dslc.TrainingError`; another command that failed `dslc.CommandError`.

Importing this package costs next to nothing: torch and networkx are imported by the functions that need them.
"""

from __future__ import annotations

from dslc.version import __version__

TYPE_CHECKING = False  # that of `typing`, which takes milliseconds: a Ctrl-C is answered only after this file
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from dslc.api import RunResult, TrainingError, Verification
    from dslc.called import CommandError
    from dslc.compiler.compile import Compiled
    from dslc.dsl.diagnostics import Diagnostic, JobError

__all__ = [
    "CommandError",
    "JobError",
    "TrainingError",
    "__version__",
    "check",
    "compile",
    "evaluate",
    "export",
    "predict",
    "render",
    "run",
    "verify",
]


def __getattr__(name: str) -> object:
    if name == "JobError":
        from dslc.dsl.diagnostics import JobError

        return JobError
    if name == "TrainingError":
        from dslc.api import TrainingError

        return TrainingError
    if name == "CommandError":
        from dslc.called import CommandError

        return CommandError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def check(
    job: str,
    settings: Sequence[str] = (),
    *,
    set: Mapping[str, Any] | None = None,
    trace: bool = False,
    **objects: Any,
) -> tuple[Diagnostic, ...]:
    """Returns every mistake and warning of a job, as `dslc check` finds them; none of them is an error if the job is
    valid.

    With `trace`, or with objects, functions that the job names as `python(…)` are called, in a process of their own.
    """
    from dslc import api

    return api.check(job, settings, set=set, trace=trace, **objects)


def compile(
    job: str,
    settings: Sequence[str] = (),
    *,
    set: Mapping[str, Any] | None = None,
    trace: bool = False,
    **objects: Any,
) -> Compiled:
    """Returns the plan of a job. Raises `JobError`, which holds all mistakes and prints them."""
    from dslc import api

    return api.compile(job, settings, set=set, trace=trace, **objects)


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
    """Trains, as `dslc run` does, and returns the metrics and the trained module to the caller.

    `job` may be a plan file, which takes no settings. The processes are started from a fresh interpreter, so it may be
    called from a notebook, or after torch has been used. Objects go there by cloudpickle: what a module has by its
    name, what is defined in the program itself, lambdas and local classes too, by value; so does
    `python("__main__:f")`. With `quiet` nothing is printed. `callback` is called, in this process, with each record of
    `metrics.jsonl`; an exception of it ends the training after a step, and is raised.
    Raises `JobError` if the job is at fault, `dslc.run_folder.Occupied` if `out` holds other things than a run or if
    another run is writing there, `TrainingError` if the training failed, TypeError for an object that cannot be passed
    to another process.
    """
    from dslc import api

    return api.run(job, settings, out=out, set=set, quiet=quiet, callback=callback, **objects)


def evaluate(
    job: str,
    settings: Sequence[str] = (),
    *,
    checkpoint: str | None = None,
    set: Mapping[str, Any] | None = None,
    **objects: Any,
) -> dict[str, Any]:
    """Returns the metrics of a checkpoint over the whole validation split, by name, as `dslc evaluate` finds them.

    `checkpoint` is one, a folder of them, or a run directory; by default the job's newest. Raises `JobError` and
    `CommandError`.
    """
    from dslc import api

    return api.evaluate(job, settings, checkpoint=checkpoint, set=set, **objects)


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
    """Writes the outputs of a checkpoint for every sample of a split (`train`, `validation` or `all`) to `output`, an
    `.npz` or `.safetensors` file, whose path it returns. Raises `JobError` and `CommandError`.
    """
    from dslc import api

    return api.predict(job, output, settings, checkpoint=checkpoint, split=split, set=set, **objects)


def export(
    job: str,
    output: str,
    settings: Sequence[str] = (),
    *,
    checkpoint: str | None = None,
    set: Mapping[str, Any] | None = None,
    **objects: Any,
) -> str:
    """Writes the whole weights of a checkpoint to `output`, a `.safetensors` or `.pt` file; returns its path. Raises
    `JobError` and `CommandError`.
    """
    from dslc import api

    return api.export(job, output, settings, checkpoint=checkpoint, set=set, **objects)


def verify(
    job: str,
    settings: Sequence[str] = (),
    *,
    steps: int = 5,
    set: Mapping[str, Any] | None = None,
    **objects: Any,
) -> Verification:
    """Trains some steps under the plan, in one process and in a plain loop of torch, as `dslc verify` does; the result
    has `holds` and the `text` of the comparison. Raises `JobError` and `CommandError`.
    """
    from dslc import api

    return api.verify(job, settings, steps=steps, set=set, **objects)


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
    """Draws the plan to `output` (`.svg`, `.png`, `.dot` or `.html`), whose path it returns; `view` is `placement`,
    `graph` or `schedule`. Raises `JobError` and `CommandError`.
    """
    from dslc import api

    return api.render(job, output, settings, view=view, set=set, trace=trace, **objects)
