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

# ruff: noqa: F403, F405 - the names are those of `__all__`
from __future__ import annotations

from dslc.terminal.version import __version__

TYPE_CHECKING = False  # that of `typing`, which takes milliseconds: a Ctrl-C is answered only after this file
if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from dslc.python_api.functions import *

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
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dslc.python_api import functions

    return getattr(functions, name)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Adds `%%plt` to a notebook, for `%load_ext dslc`."""
    from dslc.python_api.ipython_extension import register

    register(shell)


def __dir__() -> list[str]:
    return __all__
