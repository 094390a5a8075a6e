"""Finds the user's functions that a job names as `python("module:function")`."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from dslc.compiler.ir.program import PythonFunction


def load_function(named: PythonFunction) -> Callable[..., Any]:
    """Returns the function with its keyword arguments bound. Puts the job's folder first on `sys.path` and leaves it
    there.

    Raises ImportError, naming the line of the job, if the module or the function does not exist. An exception that the
    module itself raises passes through.
    """
    if named.folder and named.folder not in sys.path[:1]:
        sys.path.insert(0, named.folder)
    module_name, _, path = named.function.partition(":")
    where = f"{named.line}: " if named.line else ""
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise ImportError(f"{where}there is no module `{error.name}`") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise ImportError(f"{where}`{module_name}` has no `{path}`")
        found = getattr(found, name)
    return functools.partial(found, **named.arguments) if named.arguments else found
