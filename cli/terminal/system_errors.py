"""Errors of the operating system in words, with the remedy."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from dslc.dsl.plain import plain
from dslc.runtime.process import screen
from dslc.terminal.exit_codes import TRAINING_FAILED, WRONG_USAGE

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FOLDER = "name a folder that can be written with --out"
_REMEDIES = {
    errno.EROFS: _FOLDER,
    errno.EACCES: _FOLDER,
    errno.EPERM: _FOLDER,
    errno.ENOSPC: "make room there, or name another folder with --out",
    errno.EDQUOT: "make room there, or name another folder with --out",
    errno.ENOTDIR: "a file stands where a folder is to be: name another folder with --out",
    errno.EFBIG: "`ulimit -f unlimited`",
    errno.EMFILE: "`ulimit -n 4096`, or a job with fewer ranks on this machine",
    errno.ENFILE: "the machine has too many files open: end what else runs here",
    errno.EAGAIN: "too many processes: see `ulimit -u`",
    errno.ENOMEM: "the machine is out of memory: end what else runs here",
}
_WITHOUT_NAME = {
    errno.ENOSPC: "make room in the folder of temporary files (TMPDIR), and in /dev/shm, where processes share memory: "
    "`--shm-size=1g` for a container"
}


def in_words(error: OSError) -> str:
    """Returns the file, of a copy the target, and the reason in one line."""
    reason = error.strerror or str(error)
    said = f"{reason[:1].lower()}{reason[1:]}"
    file = error.filename if error.filename2 is None else error.filename2
    return f"{file}: {said}" if file is not None else said


def remedy(error: OSError, command: str) -> str:
    """Returns what to do about an error of a command; "" if the remedy is unknown."""
    number = error.errno or 0
    if error.filename is None:
        if number == errno.ENOENT and not _has_folder():
            return "the current folder is gone: `cd` to one that is there"
        if str(error.strerror).startswith("No usable temporary directory"):
            return "make room in one of them, or have TMPDIR name a folder that can be written"
        return _WITHOUT_NAME.get(number) or (_REMEDIES.get(number, "") if _REMEDIES.get(number) != _FOLDER else "")
    if command == "run":
        return _REMEDIES.get(number, "")
    return "make room there" if number in _FULL else ""


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def report_system_error(error: OSError, command: str, say: Callable[[str], None]) -> int:
    """Reports an error of the operating system, and returns the exit status. Raises `error` if it has no message."""
    streams = [name for name, called in screen.NAMES.items() if error.filename == called]
    help = "" if streams else remedy(error, command)
    if error.filename is None and not help:
        raise error
    for name in streams:
        screen.drop(getattr(sys, name))
    say(plain(f"dslc: {in_words(error)}") + (f"\nhelp: {help}" if help else ""))
    return TRAINING_FAILED if error.errno in _FULL and command == "run" else WRONG_USAGE
