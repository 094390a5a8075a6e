"""Expands patterns of file names such as `data/*.bin`, with a bound on the folders' entries that it looks at."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterator

ENTRIES = 200_000  # entries of folders that one pattern may look at


class TooManyEntriesError(Exception):
    """A pattern would look at more than `ENTRIES` entries of folders."""


def files_matching(pattern: str) -> list[str]:
    """Returns what `sorted(glob.glob(pattern))` does. Raises TooManyEntriesError.

    A `*` for a folder follows links, so that a pattern of many of them may never end.
    """
    parts = re.sub("/+", "/", pattern).split("/")
    paths, budget = [""], [ENTRIES]
    for n, part in enumerate(parts):
        last = n == len(parts) - 1
        if not glob.has_magic(part):
            paths = [path + part + ("" if last else "/") for path in paths]
        else:
            paths = [found for path in paths for found in _matches(path, part, budget, folders=not last)]
    return sorted(path for path in paths if os.path.lexists(path))


def _matches(path: str, part: str, budget: list[int], *, folders: bool) -> Iterator[str]:
    """Yields the entries of the folder `path` that match one part of a pattern; with `folders`, folders alone."""
    try:
        with os.scandir(path or os.curdir) as entries:
            for entry in entries:
                budget[0] -= 1
                if budget[0] < 0:
                    raise TooManyEntriesError(f"it looks at more than {ENTRIES:,} files and folders")
                hidden = entry.name.startswith(".") and not part.startswith(".")
                if hidden or not fnmatch.fnmatchcase(entry.name, part):
                    continue
                if not folders:
                    yield path + entry.name
                elif entry.is_dir():
                    yield f"{path}{entry.name}/"
    except OSError:
        return  # glob passes over folders that cannot be read
