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

    def __init__(self, message: str, *, is_reported: bool, module: str | None, notes: Sequence[str]) -> None:
        super().__init__(message)
        self.told, self.module = is_reported, module
        for note in notes:
            self.add_note(note)


def call_text(call: dict[str, object]) -> str:
    if call["used"] is not None:
        return f"rank {call['rank']} has come to the end of the network"
    name = f"`{call['name']}`" if call["name"] else "the network"
    return f"rank {call['rank']} calls {name}" + (f" ({call['place']})" if call["place"] else "")


def different_use(one: dict[str, Any], another: dict[str, Any]) -> tuple[str, str]:
    """Returns in words the parameters that one of two ranks alone uses, and the first of them."""
    only = [name for name in one["used"] if name not in another["used"]]
    also = [name for name in another["used"] if name not in one["used"]]
    parts = [
        f"`{names[0]}`{more(names)} {'is' if len(names) == 1 else 'are'} used on rank {user_report['rank']}"
        f"{_call_site(user_report, names[0])} and not on rank {other_report['rank']}"
        for names, user_report, other_report in ((only, one, another), (also, another, one))
        if names
    ]
    return "; ".join(parts), (only or also)[0]


def module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _call_site(report: dict[str, Any], parameter: str) -> str:
    place = report["places"].get(parameter.rpartition(".")[0])
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
