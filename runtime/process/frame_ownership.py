"""Tells whose code a line of a traceback is: dslc's, torch's, Python's, another library's, or the user's.

Model: decided by the folder of the file. dslc's floors lie side by side in a checkout and below one another in a wheel;
both are recognized.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache

_PACKAGES = ("dslc", "dslc.dsl", "dslc.compiler", "dslc.runtime", "dslc.grammar")
_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def is_ours(file: str) -> bool:
    return os.path.realpath(file).startswith(_floors())


def is_torchs(file: str) -> bool:
    return os.path.realpath(file).startswith(_inside(sys.modules["torch"].__path__[0]))


def is_pythons(file: str) -> bool:
    return file.startswith(_LIBRARY) and not is_installed(file)


@lru_cache
def is_users(file: str) -> bool:
    """True for a file of the user's own: none of the others."""
    return not (file.startswith("<") or is_installed(file) or is_pythons(file) or is_ours(file))


def is_installed(file: str) -> bool:
    return f"{os.sep}site-packages{os.sep}" in file


def _floors() -> tuple[str, ...]:
    """Returns the folders of dslc, as far as they are loaded."""
    packages = [sys.modules[name] for name in _PACKAGES if name in sys.modules]
    return tuple(_inside(path) for module in packages for path in getattr(module, "__path__", ()))


@lru_cache
def _inside(folder: str) -> str:
    return os.path.join(os.path.realpath(folder), "")
