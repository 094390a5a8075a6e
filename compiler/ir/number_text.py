"""Formats numbers and paths: bytes in powers of 1024, shares in percent, times in a suitable unit."""

from __future__ import annotations

import os


def byte_text(count: float) -> str:
    """Formats bytes: `1.50 GiB`; whole bytes below a KiB. Two to three significant places."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"


def count_text(count: float) -> str:
    """Formats a count: `1.07 B` for 1.07e9; whole below a thousand."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(count) >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def flop_text(count: float) -> str:
    """Formats floating-point operations: `1.07 TFLOP`."""
    for size, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}FLOP"
    return f"{count:.0f} FLOP"


def percent_text(share: float) -> str:
    return f"{100 * share:.3g}%"


def time_text(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 60:
        return f"{seconds / 60:.3g} min"
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def step_text(measured: float, expected: float) -> str:
    """Formats the time of a step beside the predicted one."""
    return f"{time_text(measured)} a step, expected {time_text(expected)}"


def path_text(path: str) -> str:
    """Returns a path relative to the current folder, or as it is if it does not lie below that."""
    short = os.path.relpath(path)
    return path if short.startswith("..") else short
