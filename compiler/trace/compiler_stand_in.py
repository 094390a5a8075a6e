"""Keeps torch's compiler out of a process that compiles nothing.

Much of torch asks the compiler whether it is at work, and the first question imports it: 800 modules, 0.8 s a process.
A stand-in answers these questions in its place; any other question imports the compiler. Functions that are marked for
the compiler to pass over would import it at their first call, too: they are given the mark beforehand.

Contract: when the compiler is imported after all, the stand-in and the marks are taken away first. Nothing is done in a
process that has it already (by a user's module that compiles itself).

Limits: it relies on names inside torch. If they are missing torch loads its compiler.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from types import FunctionType, ModuleType
from typing import Any

from dslc.compiler.trace.private_torch import (
    COMPILER,
    COMPILER_MARK,
    COMPILER_SETTINGS,
    TorchFakeTensorMode,
    custom_operator_functions,
    put_in_place_of_compiler,
    take_away,
)


class _StandIn(ModuleType):
    """A module of the compiler that is not imported before it is asked for something else than `answers`."""

    def __init__(self, name: str, answers: dict[str, object]) -> None:
        super().__init__(name)
        vars(self).update(answers)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(importlib.import_module(self.__name__), name, value)


def _closure_values(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            yield cell.cell_contents


def _disable(function: Callable[..., Any] | None = None, *arguments: Any, **named: Any) -> object:
    """Stands for the decorator by which the compiler passes over a function: over torch's own, there is no need."""
    if getattr(function, "__module__", "").startswith("torch."):
        return function
    return importlib.import_module(COMPILER).disable(function, *arguments, **named)


_SETTINGS = _StandIn(f"{COMPILER}.config", COMPILER_SETTINGS)
_UTILITIES = _StandIn(f"{COMPILER}.utils", {"get_optimize_ddp_mode": lambda: "ddp_optimizer"})
_COMPILER = _StandIn(COMPILER, {"config": _SETTINGS, "utils": _UTILITIES, "disable": _disable})
_BY_NAME: dict[str, ModuleType] = {COMPILER: _COMPILER, _SETTINGS.__name__: _SETTINGS}


_make_mode = TorchFakeTensorMode.__init__


@functools.wraps(_make_mode)
def _make_mode_without_compiler(*arguments: Any, **named: Any) -> None:
    """Makes a mode without memory, whose constructor imports the compiler by name."""
    if COMPILER in sys.modules:
        return _make_mode(*arguments, **named)
    sys.modules.update(_BY_NAME)
    try:
        return _make_mode(*arguments, **named)
    finally:
        for name in _BY_NAME:
            del sys.modules[name]


class _CompilerImport(MetaPathFinder):
    """Takes stand-in and marks away when the compiler is imported: it is among Python's finders, and finds nothing."""

    def __init__(self) -> None:
        self.marked: list[FunctionType] = []

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == COMPILER:
            take_away(_COMPILER)
            while self.marked:
                delattr(self.marked.pop(), COMPILER_MARK)


_compiler_import = _CompilerImport()


def leave_out_compiler(modules: tuple[str, ...]) -> None:
    """Puts the stand-in in the compiler's place, and marks the functions that functions and methods of the `modules`
    wrap, which are those that are loaded and whose names begin so, and the functions of custom operators. A no-op in a
    process that has imported the compiler.
    """
    if COMPILER in sys.modules:
        return
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith(modules)]
    values = [value for module in loaded for value in vars(module).values()]
    values += [each for value in values if isinstance(value, type) for each in vars(value).values()]
    values += custom_operator_functions()
    functions = [value for value in values if isinstance(value, FunctionType)]
    for function in functions:
        for wrapped in _closure_values(function):
            if isinstance(wrapped, FunctionType) and not hasattr(wrapped, COMPILER_MARK):
                setattr(wrapped, COMPILER_MARK, wrapped)
                _compiler_import.marked.append(wrapped)
                functions.append(wrapped)
    if _compiler_import not in sys.meta_path:
        sys.meta_path.insert(0, _compiler_import)
    put_in_place_of_compiler(_COMPILER)
    TorchFakeTensorMode.__init__ = _make_mode_without_compiler  # type: ignore[method-assign]
