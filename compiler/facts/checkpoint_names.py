"""The names of checkpoints in a folder, for the rules, the command and the runtime."""

from __future__ import annotations

import os
import re

MANIFEST = "manifest.json"  # a file in every checkpoint
NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def names_in(folder: str) -> list[str]:
    """Returns the names of the checkpoints in a folder, the oldest first. Raises OSError if it cannot be listed."""
    found = (NAME.fullmatch(name) for name in os.listdir(folder))
    return [each[0] for each in sorted(filter(None, found), key=lambda each: int(each[1]))]


def checkpoint_folder(place: str) -> str:
    """Returns the folder of checkpoints inside a run directory; any other place as it is."""
    inside = os.path.join(place, "checkpoints")
    try:
        own = os.path.exists(os.path.join(place, MANIFEST)) or names_in(place)
    except OSError:
        return place
    return inside if not own and os.path.isdir(inside) else place
