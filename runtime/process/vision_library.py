"""Lets `torchvision` be imported beside a build of torch that its compiled part was not made for.

torchvision's transforms and networks are written in Python, and it can do without its compiled part, but for two
registrations at its import: `operator torchvision::nms does not exist`. The wheels of the Python Package Index are made
for torch with CUDA, so that this happens with a torch for CPUs alone. Here the two operators are declared first;
whoever calls one (non-maximum suppression, of detectors) gets torchvision's own message.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_OPERATORS = ("nms", "qnms")
_declared: list[torch.library.Library] = []  # a library that is freed takes its operators along


class _Before:
    """A finder that finds nothing, and is asked before torchvision is imported for the first time."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(_Before)
            _declare_absent()
        return None


def let_torchvision_load() -> None:
    """Prepares a later import of torchvision, by whomever. It costs nothing if there is none."""
    if "torchvision" not in sys.modules and _Before not in sys.meta_path:
        sys.meta_path.insert(0, _Before)


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
