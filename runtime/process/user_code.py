"""Finds the user's functions that a job names as `python("module:function")`."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeAlias

from dslc.compiler.facts.untrusted_files import recreate_file
from dslc.compiler.ir.program import PythonFunction
from dslc.runtime.process.vision_library import let_torchvision_load

GIVEN = "dslc_given"  # the module of objects that a program gives in place of `python(…)`
HANDED_OVER = ("__main__", GIVEN)  # modules whose objects go to other processes by value: no file has them
UserObject: TypeAlias = Any  # what the user's code makes: a hook, a metric, a data set, or any other object


def hand_over(functions: Iterable[str], path: str) -> None:
    """Writes the objects of `HANDED_OVER` that the `functions` name, for `take_over` in another process; removes the
    file if there are none. Raises what cloudpickle raises.
    """
    named: dict[str, set[str]] = {}
    for function in functions:
        module, _, name = function.partition(":")
        if module in HANDED_OVER:
            named.setdefault(module, set()).add(name.partition(".")[0])
    objects: dict[str, dict[str, object]] = {}
    for module, names in named.items():
        there = vars(sys.modules.get(module, ModuleType(module)))
        objects[module] = {name: there[name] for name in sorted(names) if name in there}
    if not objects:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        return
    import cloudpickle  # type: ignore[import-untyped]

    with open(recreate_file(path), "wb") as file:
        cloudpickle.dump(objects, file)


def take_over(path: str) -> None:
    import cloudpickle

    with open(path, "rb") as file:
        objects = cloudpickle.load(file)
    for module, named in objects.items():
        vars(sys.modules.setdefault(module, ModuleType(module))).update(named)


def search_path() -> list[str]:
    """Returns the folders where this process finds modules; the current one, a notebook's first, comes last."""
    return [path for path in sys.path if path] + ([os.getcwd()] if "" in sys.path else [])


def search_first(folder: str) -> None:
    """Puts a folder first on `sys.path` and leaves it there: for modules, and for objects of their classes in files."""
    if folder and folder not in sys.path[:1]:
        sys.path.insert(0, folder)


def load_function(named: PythonFunction) -> Callable[..., Any]:
    """Returns the function with its keyword arguments bound. Puts the job's folder first on `sys.path` and leaves it
    there. Raises ImportError, naming the line of the job, if the module or the function does not exist, and what the
    module itself raises.
    """
    search_first(named.folder)
    module_name, _, path = named.function.partition(":")
    if module_name == GIVEN and not hasattr(sys.modules.get(GIVEN), path.partition(".")[0]):
        raise ImportError(f"`{path}` was given by a program: give it again, as in `dslc.run(job, {path} = …)`")
    where = f"{named.line}: " if named.line else ""
    let_torchvision_load()
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise ImportError(f"{where}there is no module `{error.name}`") from error
    for name in path.split("."):
        if not hasattr(found, name):
            close = difflib.get_close_matches(name, [each for each in dir(found) if not each.startswith("_")], 1)
            meant = f": did you mean `{close[0]}`?" if close else ""
            raise ImportError(f"{where}`{module_name}` has no `{path}`{meant}")
        found = getattr(found, name)
    return functools.partial(found, **named.arguments) if named.arguments else found
