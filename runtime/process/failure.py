"""How a training ended, and why: what each rank says when it fails, and which of it is the cause.

Model: a rank that fails says on the board (stop.py) when, at which step, the exception, the lines of its traceback and
the place in the job that it concerns. The others then find their connections closed and fail too, within the same
moment. The launcher reads what all of them said, how the processes ended before it ended any, and which of them are
stopped, and takes in this order

    the run directory, where that is gone
    an exception that is not about a lost connection, the earliest
    a process that ended without a word: by a signal, or with an exit status of its own
    a process that is stopped
    a collective that waited longer than the job's timeout, the earliest
    the earliest lost connection

Contract: `cause` gives one `Failure`, with everything that a message needs, in a length that a terminal can take.
Nothing here raises because of what a rank said or did not say, or because of what its exception is like.

Limits: whether an exception is about a lost connection is read from its text, as torch gives it no type of its own. The
kernel does not say why it killed a process; that memory ran out is a guess, and worded as one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from dslc.compiler.ir.program import JobProgram, ModuleStep
from dslc.runtime.process.error_text import READ, error_text, narrow
from dslc.runtime.process.job_line import line_of
from dslc.runtime.process.records import NAME, NOTES
from dslc.runtime.process.stop import Board
from dslc.runtime.process.whose_code import is_ours, is_pythons, is_torchs

Kind = Literal["error", "ended", "timeout", "lost"]

_FRAMES = 3  # of the traceback, in a message
_LINES = 12  # of the text of an exception, in a message
_LAST = 3  # lines of a log, before a crash, in a message
_CRASH = "Fatal Python error: "  # what Python's faulthandler begins with
_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|[Ss]ocket closed|closed by peer|Application timeout caused pair "
    r"closure|failed to recv|recvValue failed|sendBytes failed|remote process exited|Connection was likely closed",
)
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_FULL = 1 << 16  # bytes: no room for a file
_TIMEOUT = re.compile(r"Timed out waiting|[Tt]imed out after|Watchdog caught collective operation timeout")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank's failure, or that of the whole (`rank` None). `step` counts from 1; 0 is before the first step.
    `frames` are lines of its traceback."""

    rank: int | None
    step: int
    kind: Kind
    message: str  # "RuntimeError: mat1 and mat2 shapes cannot be multiplied", or what became of the process
    line: str = ""  # "digits.plt:8:13": the place in the job, where it is known
    frames: tuple[str, ...] = ()
    log: str = ""  # the path of the rank's log
    notes: tuple[str, ...] = ()
    time: float = 0.0  # seconds since the epoch


@dataclass(frozen=True, kw_only=True)
class Ends:
    """How the processes of the ranks were when one had failed, before the launcher ended those that were left.

    `statuses` are exit statuses by rank, -N for signal N, None of those that were alive; `stopped` are ranks; `folder`
    says whether the run directory was there.
    """

    statuses: Mapping[int, int | None] = field(default_factory=dict)
    stopped: tuple[int, ...] = ()
    folder: bool = True


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a training. Exactly one of these holds: it is done, it was stopped, it failed.

    `steps` is the number of steps completed. `stopped_at` is the step after which Ctrl-C ended it, None if it did not;
    0 if it ended at once, by a second Ctrl-C. `failure` is why it failed.
    """

    run_dir: str
    steps: int
    stopped_at: int | None = None
    failure: Failure | None = None

    @property
    def done(self) -> bool:
        return self.stopped_at is None and self.failure is None


def log_path(run_dir: str, rank: int) -> str:
    """Where a rank writes all that it prints."""
    return os.path.join(run_dir, "logs", f"rank-{rank}.log")


# -------------------------------------------------------------------------------------------------------- in words


def describe(outcome: Outcome) -> str:
    """What to tell the user, several lines; empty for a training that is done."""
    if outcome.failure is not None:
        return _of_a_failure(outcome.failure)
    if outcome.stopped_at is None:
        return ""
    if outcome.stopped_at == 0:
        return f"ended at once; weights were not written. The logs: {outcome.run_dir}/logs"
    return f"stopped after step {outcome.stopped_at}; the weights of that step are in {outcome.run_dir}"


def _of_a_failure(failure: Failure) -> str:
    when = f"at step {failure.step}" if failure.step else "before the first step"
    where = f" ({failure.line})" if failure.line else ""
    who = f" on rank {failure.rank}" if failure.rank is not None else ""
    lines = [f"training failed{who} {when}{where}"]
    lines += [f"  {line}" for line in failure.frames]
    lines += [f"  {line}" for line in failure.message.splitlines()]
    lines += [f"note: {note}" for note in failure.notes]
    lines += [f"the whole log: {failure.log}"] if failure.log else []
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- on a rank


def record(
    run_dir: str, rank: int, step: int, error: BaseException, job: JobProgram, model: nn.Module | None
) -> Failure:
    """Why this rank fails. All of it goes into the log as well, as far as that can be written."""
    now = time.time()
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
        sys.stderr.flush()
    error = _cause(error)
    return Failure(
        rank=rank,
        step=step,
        kind=_kind(error),
        message=_message(error),
        line=_place(error, job, model),
        frames=_frames(error),
        log=log_path(run_dir, rank),
        notes=(*_own_notes(error), *_of_storage(error, (run_dir, job.checkpoint.folder))),
        time=now,
    )


def say(board: Board, rank: int, failure: Failure) -> None:
    """Leaves it on the board, for the launcher."""
    board.say(rank, json.dumps(dataclasses.asdict(failure), ensure_ascii=False))


def _own_notes(error: BaseException) -> tuple[str, ...]:
    return tuple(getattr(error, "__notes__", ())) if _explains_itself(error) else ()


def _of_storage(error: BaseException, folders: Iterable[str]) -> tuple[str, ...]:
    """Which of the folders are on a device that is full, where something could not be written. torch's writers drop the
    reason; on the way from rank to rank its context is lost."""
    if not isinstance(error, OSError | RuntimeError) or getattr(error, "errno", None) == errno.EDQUOT:
        return ()
    notes = []
    for folder in filter(None, folders):
        with contextlib.suppress(OSError, AttributeError):
            found = os.statvfs(folder)
            if found.f_bavail * found.f_frsize < _FULL or (found.f_files and not found.f_favail):
                notes.append(f"no space is left on the device of {folder}")
    return tuple(notes)


def show_stacks(board: Board, ranks: int, own: int) -> None:
    """After a timeout: has the other ranks of this node write into their logs where they are."""
    for rank in range(ranks):
        process = board.process(rank)
        if rank != own and process and hasattr(signal, "SIGUSR1"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGUSR1)
    time.sleep(0.2)  # they write within microseconds; after this they are ended


def _cause(error: BaseException) -> BaseException:
    """What torch's pipeline has wrapped into an error that says where it was raised and not why."""
    while error.__cause__ is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if not frames or not frames[-1].filename.startswith(_STAGES):
            break
        error = error.__cause__
    return error


def _kind(error: BaseException) -> Kind:
    text = error_text(error)
    if isinstance(error, SystemExit):
        return "error"
    if getattr(error, "told", True) is False:  # all ranks end alike, and another one tells (nonfinite.py)
        return "lost"
    if isinstance(error, RuntimeError | ConnectionError) or type(error).__module__.startswith("torch"):
        if _TIMEOUT.search(text):
            return "timeout"
        if _LOST.search(text) and _within_torch(error):
            return "lost"
    return "error"


def _within_torch(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and (is_torchs(frames[-1].filename) or is_ours(frames[-1].filename))


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return narrow(f"the user's code left by sys.exit({_shown(error.code)})")
    if _explains_itself(error):
        return _bounded(error_text(error))
    if isinstance(error, OSError) and error.errno in _STORAGE and error.filename is not None:
        return _bounded(f"{error.filename}: {error.strerror}")
    return _bounded("".join(traceback.format_exception_only(error)))


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _bounded(text: str) -> str:
    """At most so many lines, and so many letters of each."""
    lines = text[: _LINES * READ].rstrip().splitlines()
    over = text.count("\n") + 1 - _LINES
    more = [f"… ({over:,} line{'s' * (over > 1)} more)"] if len(lines) > _LINES else []
    return "\n".join([narrow(line) for line in lines[:_LINES]] + more)


_STAGES = os.path.join(os.path.dirname(torch.__file__), "distributed", "pipelining") + os.sep


def _explains_itself(error: BaseException) -> bool:
    """Whether it is one of our own, whose text is meant for the user."""
    return type(error).__module__.startswith("dslc.")


def _frames(error: BaseException) -> tuple[str, ...]:
    """The innermost frames of the user's own, else the innermost of all, as a traceback prints them."""
    if _explains_itself(error):
        return ()
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not is_torchs(f.filename) and not is_ours(f.filename) and f.filename[:1] != "<"]
    lines: list[str] = []
    for frame in (own or frames)[-_FRAMES:]:
        lines.append(f'File "{frame.filename}", line {frame.lineno}, in {frame.name}')
        if frame.line:
            lines.append(f"  {frame.line}")
    return tuple(narrow(line) for line in lines)


def _place(error: BaseException, job: JobProgram, model: nn.Module | None) -> str:
    """The line of the job that it concerns: of the module that it names, its own mark, or of the innermost module that
    was called."""
    named = getattr(error, "module", None)
    if named is not None and _explains_itself(error):
        return _line_of_module(job, named)
    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    called = [names[id(self)] for self in _selves(error) if id(self) in names]
    return line_of(error) or (_line_of_module(job, called[-1]) if called else "")


def _selves(error: BaseException) -> list[object]:
    """The objects whose methods were at work, the innermost last."""
    return [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]


def _line_of_module(job: JobProgram, name: str) -> str:
    if job.model.python is not None:
        return job.model.python.line
    step: ModuleStep | None = job.model.root
    line = step.line if step else ""
    for part in name.split(".") if name else ():
        step = next((child for child in step.children if child.name == part), None) if step else None
        line = step.line if step and step.line else line
    return line


# -------------------------------------------------------------------------------------------------- on the launcher


def forget(run_dir: str, goes_on: bool = False) -> None:
    """Takes away what an earlier training in this run directory wrote down, but for the records of one that may be
    gone on with."""
    for name in (NOTES, "weights.safetensors", *(() if goes_on else (NAME,))):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(run_dir, name))


def cause(run_dir: str, board: Board, ranks: int, ends: Ends, timeout: float) -> Failure:
    """The failure that ended the training."""
    if not ends.folder:
        message = f"{run_dir} was removed while the training ran"
        return Failure(rank=None, step=board.step(0), kind="ended", message=message)
    recorded = [failure for rank in range(ranks) if (failure := said(board, rank)) is not None]
    by_kind = {kind: [f for f in recorded if f.kind == kind] for kind in ("error", "timeout", "lost")}
    silent = [rank for rank in range(ranks) if not board.done(rank) and all(f.rank != rank for f in recorded)]
    ended = [_ended(run_dir, board, rank, status) for rank in silent if (status := ends.statuses.get(rank)) is not None]
    stopped = [_stopped(run_dir, board, rank, ends.stopped, timeout) for rank in ends.stopped if rank in silent]
    for found in (by_kind["error"], ended, stopped, by_kind["timeout"], by_kind["lost"]):
        if found:
            first = min(found, key=lambda failure: failure.time)
            if first.kind == "timeout":
                return dataclasses.replace(first, notes=_of_a_timeout(run_dir, board, silent, timeout))
            return first
    return _ended(run_dir, board, silent[0] if silent else 0, None)


def said(board: Board, rank: int) -> Failure | None:
    """The failure of which a rank has told, if it has."""
    words = board.said(rank)
    if not words or board.done(rank):
        return None
    told: dict[str, Any] = json.loads(words)
    return Failure(**{**told, "frames": tuple(told["frames"]), "notes": tuple(told["notes"])})


def is_final(failure: Failure | None) -> bool:
    """Whether nothing that other ranks may still say is more of a cause."""
    return failure is not None and failure.kind != "lost"


def _stopped(run_dir: str, board: Board, rank: int, stopped: tuple[int, ...], timeout: float) -> Failure:
    message = "the process is stopped, as by SIGSTOP, Ctrl-Z or a debugger: nobody has let it go on"
    others = f"; so are ranks {', '.join(map(str, stopped))}" if len(stopped) > 1 else ""
    return Failure(
        rank=rank,
        step=board.step(rank),
        kind="ended",
        message=message,
        log=log_path(run_dir, rank),
        notes=(f"that lasted longer than `launch.timeout` ({timeout:g} s){others}",),
    )


def _ended(run_dir: str, board: Board, rank: int, status: int | None) -> Failure:
    notes: tuple[str, ...] = ()
    if status is None:
        message = "the process is gone"
    elif status < 0:
        with contextlib.suppress(ValueError):
            status = signal.Signals(-status)
        name = status.name if isinstance(status, signal.Signals) else f"signal {-status}"
        message = f"the process was ended by {name}"
        if name == "SIGKILL":
            notes = ("the system does this when memory runs out (see dmesg)",)
        elif name == "SIGTERM":
            notes = (
                "it was sent from outside, as `kill` and batch systems do; to the launcher it is a request to stop",
            )
        else:
            notes = _last_words(log_path(run_dir, rank))
    else:
        message = f"the process left with exit status {status}, without an exception"
    return Failure(
        rank=rank, step=board.step(rank), kind="ended", message=message, log=log_path(run_dir, rank), notes=notes
    )


def _last_words(path: str) -> tuple[str, ...]:
    """What a process said as a signal ended it, and where its main thread was then, by the log that it leaves."""
    said, found, stacks = _end_of(path).rpartition(_CRASH)
    if not found:
        return ()
    lines = [line.strip() for line in said.splitlines() if line.strip()][-_LAST:]
    return (*(f"the last it wrote: {line}" for line in lines), f"it was in {_where(stacks)}")


def _end_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - READ))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _of_a_timeout(run_dir: str, board: Board, silent: list[int], timeout: float) -> tuple[str, ...]:
    waited = f"a collective waited longer than `launch.timeout` ({timeout:g} s)"
    where = [
        f"rank {rank} did not come: it is in step {board.step(rank)}, {_where(_end_of(path))} (all of it: {path})"
        for rank, path in ((rank, log_path(run_dir, rank)) for rank in silent)
    ]
    return (waited, *where)


def _where(log: str) -> str:
    """Where the main thread of a rank was, from what `show_stacks` or a crash made it write into its log."""
    _, found, stack = log.rpartition("most recent call first")
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack) if found else []
    own = [frame for frame in frames if not any(foreign(frame[0]) for foreign in (is_torchs, is_ours, is_pythons))]
    if not frames:
        return "a place that is not known"
    file, line, function = (own or frames)[0]
    return f'File "{file}", line {line}, in {function}'
