"""The error of ranks that are about to exchange different things, and its words."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from dslc.runtime.process.frame_ownership import is_users

_CALLERS = ("dslc.runtime.step.", "dslc.runtime.loop.", "dslc.runtime.pipeline.", "dslc.runtime.train")  # of networks
DIFFERENT_ORDER = (
    "each rank has to run the same modules in one order. A number of Python's or numpy's generators, the clock or the "
    "order of a set differs between ranks",
    "draw such a number from a generator that has the same seed on each rank; or, without synchronised batch norms, as "
    "a tensor, `torch.rand(()).item()`, which is seen before the training begins",
)


class RankOrderError(RuntimeError):
    """Ranks are about to exchange different things. `told` on the rank that reports it, `module` if it is known."""

    def __init__(self, message: str, *, told: bool, module: str | None, notes: Sequence[str]) -> None:
        super().__init__(message)
        self.told, self.module = told, module
        for note in notes:
            self.add_note(note)


def call_text(told: dict[str, object]) -> str:
    if told["used"] is not None:
        return f"rank {told['rank']} has come to the end of the network"
    name = f"`{told['name']}`" if told["name"] else "the network"
    return f"rank {told['rank']} calls {name}" + (f" ({told['place']})" if told["place"] else "")


def different_use(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """Returns in words the parameters that one of two ranks alone uses, and the first of them."""
    only = [name for name in one["used"] if name not in other["used"]]
    also = [name for name in other["used"] if name not in one["used"]]
    parts = [
        f"`{names[0]}`{more(names)} {'is' if len(names) == 1 else 'are'} used on rank {by['rank']}"
        f"{_call_site(by, names[0])} and not on rank {without['rank']}"
        for names, by, without in ((only, one, other), (also, other, one))
        if names
    ]
    return "; ".join(parts), (only or also)[0]


def module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _call_site(told: dict[str, Any], parameter: str) -> str:
    place = told["places"].get(parameter.rpartition(".")[0])
    return f" ({place})" if place else ""


def more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def place_of_call() -> str:
    """Returns the line of the user's code that is calling a module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_CALLERS):
        if is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
