"""The folder of a run: its name, the check that a run may write into it, and its lock.

Model: a run directory is recognized by the lock file that every run leaves in it, one of an older version by
`plan.json` and `program.json`. A folder that holds anything else is refused: a run overwrites `metrics.jsonl`,
`weights.safetensors` and other names. Names that begin with a dot are ignored, and so are other run directories, and
checkpoints that were copied there to resume from. A run directory that holds a run is refused too, unless the job says
`resume = auto`.

Contract: one training at a time writes into a run directory, or into a `checkpoint.dir`. The lock is `flock` on the
lock file, which names its holder; the system releases it when the process that took it ends, in any way. Forked
children release it, so that none of them, left behind, keeps the folder locked.

Limits: on a file system without locks two runs are not kept apart; a message says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Iterator

from dslc.compiler.facts.untrusted_files import naming
from dslc.compiler.ir.number_text import path_text
from dslc.compiler.ir.program import JobProgram
from dslc.dsl.plain import plain
from dslc.dsl.words import shorten_list
from dslc.runtime.checkpoint.files import checkpoints_in
from dslc.terminal.exit_codes import CommandFailedError

LOCK = ".dslc-lock"
_SHOWN = 3  # names of other files in a message, at most
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
_held: set[int] = set()  # descriptors of the lock files that this process has locked


class FolderInUseError(CommandFailedError):
    """A folder that a run may not write into; the text says why, and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(plain(message))


def make_folder(program: JobProgram, out: str | None) -> str:
    """Makes the run directory and returns its absolute path: `out`, or `runs/<job>/<time>`. Raises FolderInUseError."""
    if out is not None:
        folder = os.path.abspath(os.path.expanduser(out))
        refuse_others(folder, out, goes_on=program.checkpoint.resume == "auto")
        os.makedirs(folder, exist_ok=True)
        return folder
    stem = os.path.abspath(os.path.join("runs", program.job, time.strftime("%Y-%m-%d_%H-%M-%S")))
    for n in itertools.count(1):
        folder = stem if n == 1 else f"{stem}-{n}"
        with contextlib.suppress(FileExistsError):  # of a run that began in the same second
            os.makedirs(folder)
            return folder
    raise AssertionError("there is a next number")


@contextlib.contextmanager
def claim_folder(folder: str, program: JobProgram | None, *, goes_on: bool = False) -> Iterator[None]:
    """Keeps other runs out of a folder, which is made, and out of the `checkpoint.dir` of `program`, while the context
    lasts. Without a program (the folder of a sweep) only sub-folders are written there. A run that is there is taken
    for this one if it `goes_on`. Raises FolderInUseError.
    """
    with contextlib.ExitStack() as locks:
        locks.enter_context(_locked(folder, "--out"))
        if program is None:
            yield
            return
        if not goes_on:
            refuse_run(folder, program)  # now that no other run can begin
        checkpoint = program.checkpoint
        if checkpoint.folder and checkpoint.is_enabled:
            locks.enter_context(_locked(checkpoint.folder, "checkpoint.dir"))
        yield


def holder(folder: str) -> str:
    """Returns the run that has locked a folder, in words; "" if none has, or there is no folder."""
    try:
        descriptor = _open_lock(os.path.join(folder, LOCK))
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return _holder(descriptor)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
    finally:
        os.close(descriptor)
    return ""


# ------------------------------------------------------------------------------------------------ what is there already


def refuse_run(folder: str, program: JobProgram) -> None:
    """Raises FolderInUseError instead of overwriting a run; a job that says `resume = auto` resumes it."""
    if program.checkpoint.resume != "auto" and os.path.exists(os.path.join(folder, "plan.json")):
        raise FolderInUseError(
            f"{path_text(folder)} holds a run already: `--set checkpoint.resume=auto` continues it; otherwise "
            "name another folder with --out, or remove it"
        )


def refuse_others(folder: str, shown: str, *, goes_on: bool) -> None:
    """Raises FolderInUseError if a folder holds something else than a run, which a run would overwrite."""
    if not os.path.lexists(folder) or _is_run(folder):
        return
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    names = [name for name in names if not _is_run(os.path.join(folder, name))]
    if goes_on and names == ["checkpoints"] and checkpoints_in(os.path.join(folder, "checkpoints")):
        return
    if names:
        raise FolderInUseError(
            f"{shown} is not a run directory and holds other files ({shorten_list(names, _SHOWN)}), which a run "
            f"could overwrite: name a new or an empty folder, as `--out {os.path.join(shown, 'run')}`"
        )


def _is_run(folder: str) -> bool:
    known = (LOCK, "plan.json", "program.json")
    lock, plan, program = (os.path.exists(os.path.join(folder, name)) for name in known)
    return lock or (plan and program)


# ---------------------------------------------------------------------------------------------------------- the lock


@contextlib.contextmanager
def _locked(folder: str, named: str) -> Iterator[None]:
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, LOCK)
    descriptor = _open_lock(path, os.O_CREAT)
    try:
        _lock(descriptor, path, named)
    except BaseException:
        os.close(descriptor)
        raise
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:  # else this is a forked child, which has released it
            _held.discard(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing it does not release it if a forked child still has it
            os.close(descriptor)


def _open_lock(path: str, flags: int = 0) -> int:
    """Opens a lock file, and no link to a file elsewhere, whose content would be replaced. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o644)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", path)


def _lock(descriptor: int, path: str, named: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FolderInUseError(
            f"a run is writing into {path_text(os.path.dirname(path))} already: {_holder(descriptor)}; wait for it to "
            f"end, or stop it (`kill` with that number), or name another folder with {named}"
        ) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        said = f"dslc: {path} cannot be locked ({error.strerror}): start no second run here"
        print(plain(said), file=sys.stderr)
    told = {"pid": os.getpid(), "host": socket.gethostname(), "began": time.strftime("%Y-%m-%d %H:%M:%S")}
    with naming(path):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(told).encode(), 0)


def _holder(descriptor: int) -> str:
    """Returns the holder of a lock, from the file; "" for a file that is just being written."""
    found = re.fullmatch(rb'\{"pid": (\d+), "host": "([^"]*)", "began": "([^"]*)"\}', os.pread(descriptor, 4096, 0))
    if found is None:
        return "another process"
    process, host, began = (text.decode(errors="replace") for text in found.groups())
    return f"process {process} on {host}, since {began}"


def _let_go() -> None:
    """Releases the lock in a forked child: it stays with the process that took it."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
