"""Lets `torchvision` be imported beside a build of torch that its compiled part was not made for.

torchvision's transforms and networks are written in Python, and can do without its compiled part, except for two
operators at its import (`operator torchvision::nms does not exist`): the wheels of the Python Package Index are made
for torch with CUDA. Here these are declared first; whoever calls one gets torchvision's own message.

A torchvision that fails otherwise raises VisionLibraryError, which `true_cause` finds behind what libraries say that
import it: torchmetrics, transformers, peft.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

from dslc.runtime.process.error_text import causes

if TYPE_CHECKING:
    import torch

_OPERATORS = ("nms", "qnms")
_declared: list[torch.library.Library] = []  # a library that is freed takes its operators along


class VisionLibraryError(ImportError):
    """torchvision cannot be imported. Libraries that import it report their own failure, and hide this one."""

    remedy = "`pip install --upgrade torch torchvision` installs two that belong together; or uninstall torchvision"

    def __init__(self, error: BaseException) -> None:
        import torch

        try:
            version = f" {importlib.metadata.version('torchvision')}"
        except importlib.metadata.PackageNotFoundError:  # it was put there by hand
            version = ""
        line = str(error).strip().partition("\n")[0]
        super().__init__(
            f"torchvision{version} cannot be imported with torch {torch.__version__}: {type(error).__name__}: {line}"
        )


def true_cause(error: BaseException) -> BaseException:
    """Returns the VisionLibraryError that an exception follows from, else the exception itself."""
    return next((cause for cause in causes(error, contexts=True) if isinstance(cause, VisionLibraryError)), error)


class _Loader:
    """The loader of torchvision, whose exceptions say that it is torchvision that cannot be imported."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._loader.exec_module(module)
        except Exception as error:  # any kind: of code that was written for another torch
            raise VisionLibraryError(error) from error


class _Finder:
    """A finder for torchvision alone, which declares what its import needs."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        _declare_absent()
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


def let_torchvision_load() -> None:
    """Prepares a later import of torchvision, by whomever. It costs nothing if there is none."""
    if "torchvision" not in sys.modules and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def _declare_absent() -> None:
    found = PathFinder.find_spec("torchvision")
    if found is None or _declared:
        return
    import torch  # only here: `dslc check` finds the user's functions without it

    for folder in found.submodule_search_locations or ():
        compiled = os.path.join(folder, "_C.so")
        if os.path.exists(compiled):
            try:
                torch.ops.load_library(compiled)
                return
            except OSError:  # torchvision ignores it as well
                pass
    _declared.append(torch.library.Library("torchvision", "DEF"))
    for name in _OPERATORS:
        _declared[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
