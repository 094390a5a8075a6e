"""The end of a training and its cause: each rank reports its failure, and the launcher finds the cause among the
reports.

Model: a rank that fails writes to the board (stop.py) the time, the step, the exception, the lines of its traceback and
the line of the job that it concerns. The other ranks then lose their connections to it and fail in the same moment. The
launcher reads all reports, the exit statuses of the processes before it ended any itself, and which processes are
stopped. The cause is the first of these: the run directory is gone; an exception that is not about a lost connection,
the earliest; a process that ended without a report, by a signal or with an exit status of its own; a process that is
stopped; a collective that waited longer than the job's timeout, the earliest; the earliest lost connection.

Contract: `cause` returns one `Failure` with everything that a message needs, short enough for a terminal. Nothing here
raises because of a rank's report, a missing report, or the kind of its exception.

Limits: an exception counts as a lost connection by its text, as torch has no type of its own for it. The kernel does
not say why it killed a process; that memory ran out is a guess, and worded as one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeGuard

import torch
from torch import nn

from dslc.compiler.facts.untrusted_files import open_file
from dslc.compiler.ir.codec import from_json
from dslc.compiler.ir.number_text import byte_text, path_text
from dslc.compiler.ir.program import JobProgram, ModuleStep
from dslc.runtime.process.error_text import READ, causes, error_text, narrow
from dslc.runtime.process.frame_ownership import is_ours, is_pythons, is_torchs
from dslc.runtime.process.job_line import during, line_of
from dslc.runtime.process.lifetime import signal_name
from dslc.runtime.process.records import NAME, NOTES, SKIPPED
from dslc.runtime.process.stop import RunControl

Kind = Literal["error", "ended", "timeout", "lost"]

_FRAMES = 3  # frames of the traceback in a message
_LINES = 12  # lines of an exception's text in a message
_LAST = 3  # lines of a log before a crash in a message
_CRASH = "Fatal Python error: "  # the first words that Python's faulthandler writes
_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|[Ss]ocket closed|closed by peer|Application timeout caused pair "
    r"closure|failed to recv|recvValue failed|sendBytes failed|remote process exited|Connection was likely closed"
)
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_FULL = 1 << 16  # bytes: a device with less room counts as full
_TIMEOUT = re.compile(r"Timed out waiting|[Tt]imed out after|Watchdog caught collective operation timeout")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank's failure, or the failure of the whole training (`rank` None). `step` counts from 1; 0 is before the
    first step. `frames` are lines of the traceback.
    """

    rank: int | None
    step: int
    kind: Kind
    message: str  # "RuntimeError: mat1 and mat2 shapes cannot be multiplied", or how the process ended
    line: str = ""  # "digits.plt:8:13": the line of the job, if it is known
    frames: tuple[str, ...] = ()
    log: str = ""  # path of the rank's log
    notes: tuple[str, ...] = ()
    time: float = 0.0  # seconds since the epoch
    host: str = ""  # where it was, if the training has several
    tail: tuple[str, ...] = ()  # the last lines of the log, for the other hosts
    lasting: bool = False  # another start would meet it again
    rewinds: bool = False  # the ranks go back after a spike of the loss, which takes no restart
    goes_on: bool = False  # the training, when its command is typed again


@dataclass(frozen=True, kw_only=True)
class ProcessExits:
    """The state of all processes when one had failed, before the launcher ended the rest. `statuses` are the exit
    statuses by rank: -N for signal N, None for a process still alive. `stopped` holds ranks; `folder`: the run
    directory was there. `positions` say where the ranks were, and who waited for whom.
    """

    statuses: Mapping[int, int | None] = field(default_factory=dict)
    stopped: tuple[int, ...] = ()
    folder: bool = True
    positions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a training, which is done, stopped or failed. `steps` are completed, `restarts` counts how often ranks
    were started again. `stopped_at` is the step after which Ctrl-C ended it, None if it did not; 0 if a second Ctrl-C
    ended it at once. `early` says why it ended by itself before its last step, `failure` why it failed.
    """

    run_dir: str
    steps: int
    stopped_at: int | None = None
    early: str = ""
    failure: Failure | None = None
    restarts: int = 0

    @property
    def is_complete(self) -> bool:
        return self.stopped_at is None and self.failure is None


def log_folder(run_dir: str, attempt: int = 1) -> str:
    """Returns the folder of the logs of the ranks that were started for the first time, or again."""
    return os.path.join(run_dir, "logs", *([f"attempt-{attempt}"] if attempt > 1 else []))


def log_path(run_dir: str, board: RunControl, rank: int) -> str:
    return os.path.join(log_folder(run_dir, board.attempt), f"rank-{rank}.log")


# -------------------------------------------------------------------------------------------------------- in words


def describe(outcome: Outcome) -> str:
    """Returns the message for the user, several lines; "" for a training that is done."""
    if outcome.failure is not None:
        return in_words(outcome.failure)
    if outcome.stopped_at is None:
        return ""
    if outcome.stopped_at == 0:
        return f"ended at once; weights were not written. The logs: {outcome.run_dir}/logs"
    return f"stopped after step {outcome.stopped_at}; the weights of that step are in {outcome.run_dir}"


def in_words(failure: Failure) -> str:
    when = f"at step {failure.step}" if failure.step else "before the first step"
    where = f" ({failure.line})" if failure.line else ""
    who = f" on rank {failure.rank}" if failure.rank is not None else ""
    who += f" ({failure.host})" if failure.host and who else ""
    lines = [f"training failed{who} {when}{where}"]
    lines += [f"  {line}" for line in failure.frames]
    lines += [f"  {line}" for line in failure.message.splitlines()]
    lines += [f"note: {note}" for note in failure.notes]
    lines += [f"its log ends: {line}" for line in failure.tail]
    there = f" on {failure.host}" if failure.host else ""
    lines += [f"the whole log: {failure.log}{there}"] if failure.log else []
    return "\n".join(lines)


def change_in_words(failure: Failure) -> str:
    """Returns the message of what has ended an elastic start of the ranks, which go on: a lost host is a change, no
    failure.
    """
    if failure.rank is not None or failure.kind != "ended":
        return in_words(failure)
    when = f"at step {failure.step}" if failure.step else "before the first step"
    return "; ".join((f"{when}, {failure.message}", *failure.notes))


# ------------------------------------------------------------------------------------------------------- on a rank


def record(
    run_dir: str, board: RunControl, rank: int, error: BaseException, job: JobProgram, model: nn.Module | None
) -> Failure:
    """Returns this rank's failure, after writing all of it to the log as far as the log can be written."""
    now = time.time()
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
        sys.stderr.flush()
    error = _cause(error)
    return Failure(
        rank=rank,
        step=board.step(rank),
        kind=_kind(error),
        message=message_of(error),
        line=_place(error, job, model),
        frames=frames_of(error),
        log=log_path(run_dir, board, rank),
        notes=(
            *(f"in {at_work}" for at_work in (during(error),) if at_work),
            *_own_notes(error),
            *planned_memory(error, job, rank),
            *_of_storage(error, (run_dir, job.checkpoint.folder)),
        ),
        time=now,
        lasting=bool(getattr(error, "lasting", False)) and _explains_itself(error),
        rewinds=bool(getattr(error, "rewinds", False)) and _explains_itself(error),
    )


def say(board: RunControl, rank: int, failure: Failure) -> None:
    board.say(rank, json.dumps(dataclasses.asdict(failure), ensure_ascii=False))


def _own_notes(error: BaseException) -> tuple[str, ...]:
    return tuple(getattr(error, "__notes__", ())) if _explains_itself(error) else ()


def _of_storage(error: BaseException, folders: Iterable[str]) -> tuple[str, ...]:
    """Returns a note for each of the folders on a full device, if something could not be written: torch's writers drop
    the reason.
    """
    if not isinstance(error, OSError | RuntimeError) or getattr(error, "errno", None) == errno.EDQUOT:
        return ()
    notes = []
    for folder in filter(None, folders):
        with contextlib.suppress(OSError, AttributeError):
            found = os.statvfs(folder)
            if found.f_bavail * found.f_frsize < _FULL or (found.f_files and not found.f_favail):
                notes.append(f"no space is left on the device of {folder}")
    return tuple(notes)


def _cause(error: BaseException) -> BaseException:
    """Unwraps the error in which torch's pipeline puts an exception: it names the place and hides the reason."""
    for cause in causes(error):
        error = cause
        frames = traceback.extract_tb(error.__traceback__)
        if not frames or not frames[-1].filename.startswith(_STAGES):
            break
    return error


def _kind(error: BaseException) -> Kind:
    text = error_text(error)
    if isinstance(error, SystemExit):
        return "error"
    if getattr(error, "told", True) is False:  # all ranks end alike, and another one reports it (loop/nonfinite.py)
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


def message_of(error: BaseException) -> str:
    """Returns the text of an exception for a message: at most some lines, with its class if it is the user's."""
    if isinstance(error, SystemExit):
        return narrow(f"the user's code left by sys.exit({_safe_repr(error.code)})")
    if _explains_itself(error):
        return _bounded(error_text(error))
    if _is_named_storage_error(error):
        return _bounded(f"{error.filename}: {error.strerror}")
    return _bounded("".join(traceback.format_exception_only(error)))


def _is_named_storage_error(error: BaseException) -> TypeGuard[OSError]:
    """True for an error of full or read-only storage that names the file."""
    return isinstance(error, OSError) and error.errno in _STORAGE and error.filename is not None


def _safe_repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _bounded(text: str) -> str:
    lines = text[: _LINES * READ].rstrip().splitlines()
    over = text.count("\n") + 1 - _LINES
    more = [f"… ({over:,} line{'s' * (over > 1)} more)"] if len(lines) > _LINES else []
    return "\n".join([narrow(line) for line in lines[:_LINES]] + more)


_STAGES = os.path.join(os.path.dirname(torch.__file__), "distributed", "pipelining") + os.sep


def _explains_itself(error: BaseException) -> bool:
    """True for an exception of dslc's own, whose text is meant for the user."""
    return type(error).__module__.startswith("dslc.")


def frames_of(error: BaseException) -> tuple[str, ...]:
    """Returns the innermost frames of the user's code, or else the innermost of all, as a traceback prints them. An
    exception of dslc's own has the frames of the exception that it stands for.
    """
    if _explains_itself(error):
        return tuple(getattr(error, "frames", ()))
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not is_torchs(f.filename) and not is_ours(f.filename) and f.filename[:1] != "<"]
    if not own and _is_named_storage_error(error):
        return ()
    lines: list[str] = []
    for frame in (own or frames)[-_FRAMES:]:
        lines.append(f'File "{frame.filename}", line {frame.lineno}, in {frame.name}')
        if frame.line:
            lines.append(f"  {frame.line}")
    return tuple(narrow(line) for line in lines)


def _place(error: BaseException, job: JobProgram, model: nn.Module | None) -> str:
    """Returns the line of the job that the exception concerns: of the module that it names, its own mark, or the line
    of the innermost module that was called.
    """
    named = getattr(error, "module", None)
    if named is not None and _explains_itself(error):
        return line_of_module(job, named)
    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    called = [names[id(self)] for self in _selves(error) if id(self) in names]
    return line_of(error) or (line_of_module(job, called[-1]) if called else "")


def _selves(error: BaseException) -> list[object]:
    return [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]


def line_of_module(job: JobProgram, name: str) -> str:
    """Returns the line of the job that declares a module; the line of the network for one of the user's own."""
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
    """Removes the reports of an earlier training from the run directory, except the records of one that `goes_on`."""
    for name in (NOTES, "weights.safetensors", *(() if goes_on else (NAME, SKIPPED))):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(run_dir, name))


def cause(run_dir: str, board: RunControl, ends: ProcessExits, timeout: float) -> Failure:
    if (found := node_failure(run_dir, board, ends, timeout)) is not None:
        return found
    silent = [rank for rank in board.ranks if not board.has_finished(rank)]
    return _exit_failure(run_dir, board, silent[0] if silent else board.ranks.start, None)


def node_failure(run_dir: str, board: RunControl, ends: ProcessExits, timeout: float) -> Failure | None:
    """Returns the failure that the ranks of this node show; None if they show none."""
    if not ends.folder:
        message = f"{run_dir} was removed while the training ran"
        return Failure(rank=None, step=board.furthest, kind="ended", message=message)
    recorded = [failure for rank in board.ranks if (failure := reported_failure(board, rank)) is not None]
    silent = [rank for rank in board.ranks if not board.has_finished(rank) and all(f.rank != rank for f in recorded)]
    ended = [
        _exit_failure(run_dir, board, rank, status, ends.positions)
        for rank in silent
        if (status := ends.statuses.get(rank)) is not None
    ]
    stopped = [_suspension_failure(run_dir, board, rank, ends, timeout) for rank in ends.stopped if rank in silent]
    recorded = [
        replace(each, notes=_of_a_timeout(ends, timeout)) if each.kind == "timeout" else each for each in recorded
    ]
    found = [*recorded, *ended, *stopped]
    return better(found) if found else None


def timeout_failure(board: RunControl, ends: ProcessExits) -> Failure:
    """Returns where the ranks of this node were when the ranks of another node had waited for too long."""
    return Failure(rank=None, step=board.furthest, kind="timeout", message="", notes=ends.positions, time=math.inf)


def better(found: Sequence[Failure]) -> Failure:
    """Returns the cause among failures, as above; of several timeouts the earliest, with the notes of all."""
    kinds: tuple[Kind, ...] = ("error", "ended", "timeout", "lost")
    first = min(found, key=lambda failure: (kinds.index(failure.kind), failure.time))
    if first.kind != "timeout":
        return first
    notes = dict.fromkeys(note for each in found if each.kind == "timeout" for note in each.notes)
    return replace(first, notes=tuple(notes))


def for_others(failure: Failure, host: str) -> Failure:
    """Returns a failure of this host with what other hosts, which may not see its log, need to tell of it."""
    lines = [line.strip() for line in _end_of(failure.log).splitlines() if line.strip()] if failure.log else []
    return replace(failure, host=host, tail=tuple(narrow(line) for line in lines[-_LAST:]))


def reported_failure(board: RunControl, rank: int) -> Failure | None:
    words = board.last_message(rank)
    if not words or board.has_finished(rank):
        return None
    return from_json(Failure, json.loads(words))


def is_final(failure: Failure | None) -> bool:
    """True if no report of another rank could be a better cause."""
    return failure is not None and failure.kind != "lost"


def _suspension_failure(run_dir: str, board: RunControl, rank: int, ends: ProcessExits, timeout: float) -> Failure:
    message = "the process is stopped, as by SIGSTOP, Ctrl-Z or a debugger, and nobody has continued it"
    others = f"; so are ranks {', '.join(map(str, ends.stopped))}" if len(ends.stopped) > 1 else ""
    note = f"that lasted longer than `launch.timeout` ({timeout:g} s){others}"
    return _end_failure(run_dir, board, rank, message, (note, *ends.positions))


def _end_failure(run_dir: str, board: RunControl, rank: int, message: str, notes: tuple[str, ...] = ()) -> Failure:
    log = log_path(run_dir, board, rank)
    return Failure(rank=rank, step=board.step(rank), kind="ended", message=message, log=log, notes=notes)


def _exit_failure(
    run_dir: str, board: RunControl, rank: int, status: int | None, positions: tuple[str, ...] = ()
) -> Failure:
    if status is None:
        return _end_failure(run_dir, board, rank, "the process is gone", positions)
    if status >= 0:
        message = f"the process left with exit status {status}, without an exception"
        return _end_failure(run_dir, board, rank, message, positions)
    name = signal_name(-status)
    notes = _SENDERS.get(name) or _last_words(log_path(run_dir, board, rank))
    return _end_failure(run_dir, board, rank, f"the process was ended by {name}", (*notes, *positions))


_SENDERS = {
    "SIGKILL": ("the system does this when memory runs out (see dmesg)",),
    "SIGTERM": (
        "it was sent from outside, as `kill` and batch systems do; sent to the launcher it is a request to stop",
    ),
}


def _last_words(path: str) -> tuple[str, ...]:
    """Returns the last lines of a process that a signal ended, and where its main thread was, from its log."""
    said, found, stacks = _end_of(path).rpartition(_CRASH)
    if not found:
        return ()
    lines = [line.strip() for line in said.splitlines() if line.strip()][-_LAST:]
    return (*(f"its last output: {line}" for line in lines), f"it was in {_position(stacks)}")


def _end_of(path: str) -> str:
    try:
        with open_file(path) as file:
            file.seek(max(0, os.path.getsize(path) - READ))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _of_a_timeout(ends: ProcessExits, timeout: float) -> tuple[str, ...]:
    return f"a collective waited longer than `launch.timeout` ({timeout:g} s)", *ends.positions


def _position(log: str) -> str:
    """Returns where the main thread of a rank was, by what a crash wrote into the log."""
    line = line_in_log(log)
    return 'File "{}", line {}, in {}'.format(*line) if line is not None else "a place that is not known"


def users_line_in_log(path: str, begin: int) -> str:
    """Returns the line of the user's code where the last stack in a log is, as `data.py:88, in load`. Returns "" if the
    stack was written before `begin` bytes, or if its innermost frame is not the user's.
    """
    with open_file(path) as file:
        file.seek(begin)
        log = file.read(READ).decode(errors="replace")
    _, found, stack = log.rpartition("most recent call first")
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', stack) if found else None
    if frame is None or any(foreign(frame[1]) for foreign in (is_torchs, is_ours, is_pythons)):
        return ""
    return line_text(frame[1], int(frame[2]), frame[3])


def line_text(file: str, line: int, function: str) -> str:
    """Returns a line of Python as in `data.py:88, in load`, with the path from the current folder if it is below."""
    return f"{path_text(file)}:{line}, in {function}"


def line_in_log(log: str, *, users: bool = False) -> tuple[str, int, str] | None:
    """Returns the file, the number and the function of the innermost line of the last stack in a log: of one that is
    no library's, or else of all. `users`: only a line of the user's code.
    """
    _, found, stack = log.rpartition("most recent call first")
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack) if found else []
    own = [frame for frame in frames if not any(foreign(frame[0]) for foreign in (is_torchs, is_ours, is_pythons))]
    if not frames or (users and not own):
        return None
    file, line, function = (own or frames)[0]
    return file, int(line), function


_ON_A_CPU = re.compile(r"can't allocate memory|Cannot allocate memory|not enough memory")


def planned_memory(error: BaseException, job: JobProgram, rank: int) -> tuple[str, ...]:
    """Returns a note with what the plan gives the rank, if memory ran out, and the model was traced."""
    if not job.memory or not _is_of_memory(error):
        return ()
    memory = job.memory[rank * len(job.memory) // job.world_size]  # the pipeline axis is the outermost
    by_size = sorted(memory.kinds.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{kind} {byte_text(size)}" for kind, size in by_size if size)
    limit = f", of {byte_text(job.memory_limit)} that it may hold" if job.memory_limit else ""
    layers = ", ".join(f"{layer.name} {byte_text(layer.bytes)}" for layer in memory.layers)
    return (
        f"the plan expects it to hold {byte_text(memory.peak)} at its peak ({memory.when}){limit}: {kinds}",
        *([f"these layers hold most of the activations: {layers}"] if layers else []),
        f"between two steps it should hold {byte_text(memory.rest)}",
    )


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_ON_A_CPU.search(error_text(error)))
