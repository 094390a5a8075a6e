"""Shared by the modules that look at files: the errors for a file that is missing or of another kind."""

from __future__ import annotations

import os
import stat


class MissingDataError(Exception):
    """The data does not exist: the message, and the remedy."""

    code = "E0309"

    def __init__(self, message: str, help: str) -> None:
        super().__init__(message)
        self.help = help


class UnusableDataError(MissingDataError):
    """The data exists and cannot be used."""

    code = "E0311"


def size_of(file: str) -> int:
    """Returns the size of a regular file in bytes."""
    try:
        found = os.stat(file)
    except OSError as error:
        reason = "there is no" if isinstance(error, FileNotFoundError) else f"{error.strerror}:"
        raise MissingDataError(f"{reason} {file}", "paths are relative to the file that wrote them") from error
    if not stat.S_ISREG(found.st_mode):
        raise MissingDataError(f"{file} is not a file", "a file is needed here")
    return found.st_size


def folders_in(folder: str, help: str) -> list[str]:
    """Returns the names of the subfolders, sorted, without names that begin with a dot."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except FileNotFoundError as error:
        raise MissingDataError(f"there is no {folder}", help) from error
    except NotADirectoryError as error:
        raise UnusableDataError(f"{folder} is not a folder", help) from error
    except OSError as error:
        raise MissingDataError(f"{error.strerror}: {folder}", help) from error
