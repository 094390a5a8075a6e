"""dslc: a compiler for distributed PyTorch training.

    import dslc

    for diagnostic in dslc.check("job.plt"):
        print(diagnostic.code, diagnostic.message)
    plan = dslc.compile("job.plt").plan
    result = dslc.run("job.plt", settings=["train.epochs=2"])
    result.metrics[-1]["loss"], result.module(batch)

Importing this package costs next to nothing: torch and networkx are imported by the functions that need them.
"""

from __future__ import annotations

from dslc.version import __version__

TYPE_CHECKING = False  # that of `typing`, which takes milliseconds: a Ctrl-C is answered only after this file
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dslc.api import RunResult
    from dslc.compiler.compile import Compiled
    from dslc.dsl.diagnostics import Diagnostic

__all__ = ["__version__", "check", "compile", "run"]


def check(path: str, settings: Sequence[str] = (), *, trace: bool = False) -> tuple[Diagnostic, ...]:
    """Returns every mistake and warning of a job, as `dslc check` finds them; none of them is an error if the job is
    valid.

    `settings` are what follows `--set` on the command line. With `trace`, functions that the job names as `python(…)`
    are called, in a process of their own.
    """
    from dslc import api

    return api.check(path, settings, trace=trace)


def compile(path: str, settings: Sequence[str] = (), *, trace: bool = False) -> Compiled:
    """Returns the plan of a job. Raises `dslc.dsl.diagnostics.JobError`, which holds all mistakes and prints them."""
    from dslc import api

    return api.compile(path, settings, trace=trace)


def run(path: str, settings: Sequence[str] = (), *, out: str | None = None) -> RunResult:
    """Trains, as `dslc run` does, and returns the metrics and the trained module to the caller.

    `path` may be a plan file, which takes no settings. The processes are started from a fresh interpreter, so it may be
    called from a notebook, or after torch has been used; nothing needs to be picklable, and `python("__main__:f")`
    finds a function defined in the notebook.
    Raises `JobError` if the job is at fault, `dslc.run_folder.Occupied` if `out` holds other things than a run or if
    another run is writing there, `dslc.api.TrainingError` if the training failed.
    """
    from dslc import api

    return api.run(path, settings, out=out)
