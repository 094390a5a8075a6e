"""What looking at files has in common: what is said of one that is not there, or is not what its name says."""

from __future__ import annotations

import os
import stat


class Absent(Exception):
    """The data is not there: the message, and what to do."""

    code = "E0309"

    def __init__(self, message: str, help: str) -> None:
        super().__init__(message)
        self.help = help


class Broken(Absent):
    """The data is there and cannot be used."""

    code = "E0311"


def size_of(file: str, help: str = "paths are relative to the file that wrote them") -> int:
    """Bytes of a regular file."""
    try:
        found = os.stat(file)
    except OSError as error:
        reason = "there is no" if isinstance(error, FileNotFoundError) else f"{error.strerror}:"
        raise Absent(f"{reason} {file}", help) from error
    if not stat.S_ISREG(found.st_mode):
        raise Absent(f"{file} is no file", "a file is needed here")
    return found.st_size


def folders_in(folder: str, help: str) -> list[str]:
    """The names of the folders in a folder, sorted; those that begin with a dot are left out."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except FileNotFoundError as error:
        raise Absent(f"there is no {folder}", help) from error
    except NotADirectoryError as error:
        raise Broken(f"{folder} is no folder", help) from error
    except OSError as error:
        raise Absent(f"{error.strerror}: {folder}", help) from error
