"""Paths that a job names: absolute where they are used, as they were written where a plan is written.

A plan file lies beside its job and may be moved with it: `portable` makes a path relative to the job's folder if it was
written so. `resolved` makes it absolute again, in the folder where the job lies then.
"""

from __future__ import annotations

import os


class ResolvedPath(str):
    """An absolute path, and the text that names it in the job."""

    written: str

    def __new__(cls, path: str, written: str = "") -> ResolvedPath:
        made = super().__new__(cls, path)
        made.written = written
        return made


def portable(path: str, folder: str, origin: str | None = None) -> str:
    """Returns a path as it stands in a plan: `./…` or `../…` from `folder` if the job has it relative, `~/…` if it is
    written so, else as it is.

    `origin` is the path of the job that this one was found by (a pattern, the folder around it), if it is another.
    """
    named = path if origin is None else origin
    written = named.written if isinstance(named, ResolvedPath) else os.sep
    if written.startswith("~"):
        home = os.path.expanduser("~")
        return os.path.join("~", os.path.relpath(path, home)) if os.path.isabs(home) else str(path)
    if os.path.isabs(written):
        return str(path)
    made = os.path.relpath(path, folder)
    return made if is_path(made) else os.path.join(os.curdir, made)


def is_path(text: str) -> bool:
    """True for a path where a bare name may stand as well: it begins with `./`, `../`, `/` or `~`."""
    return text.startswith(("./", "../", "/", "~"))


def resolved(path: str, folder: str) -> str:
    """Returns the absolute path of a path that `portable` wrote; the empty one stays empty."""
    return os.path.normpath(os.path.join(folder, os.path.expanduser(path))) if path else path
