"""Ends processes with the process that forked them, and finds processes that are stopped or left behind (Linux).

Model: the kernel kills a rank whose launcher ends (`end_with`). Processes that a rank leaves behind would be adopted by
the machine's first process; while an `OrphanReaper` exists this process adopts them and ends them.

`IdleTracker` tells a process that computes from one that waits: by its processor time and its bytes.

Limits: on other systems these find nothing. A process that outlives its parent stays if the launcher itself is killed.
The system gives the state of a process's first thread. Another thread that waits for a disk counts by its bytes alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_SHOWN = 80  # letters of a command that are shown
_IDLE_SHARE = 0.05  # of a processor, that processes use at most which only wait
_IDLE_BYTES = 1 << 16  # bytes that such processes read and write in a second, at most
_PERIOD = 1.0  # seconds between two polls
_TICK = 0.01  # seconds by which systems count the use of a processor
_CHILDREN = "/proc/{}/task/{}/children"  # some kernels have no such file
_COMPILER = "torch/_inductor/compile_worker"  # what torch's compiler starts for kernels of GPUs, and leaves running


def end_with(parent: int) -> None:
    """Has the kernel kill this process when `parent`, whose thread forked it, ends (Linux; elsewhere a no-op)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent ends (Linux; elsewhere a no-op)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def ending(process: int, otherwise: int) -> int:
    """Returns a descriptor that becomes readable when the child ends; `otherwise` if the system has none. The pipe that
    multiprocessing waits for is not enough: the child's own children keep it open.
    """
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return otherwise


def environments_of_children(parent: int) -> dict[int, dict[str, str]]:
    """Returns the environment with which each child of a process was started, of those that can be read (Linux)."""
    environments = {}
    for child in children_of(parent):
        with contextlib.suppress(OSError), open(f"/proc/{child}/environ", "rb") as file:
            entries = [os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0")]
            environments[child] = {name: value for name, _, value in entries if name}
    return environments


# ------------------------------------------------------------------------------------------- those that are stopped


def is_suspended(process: int) -> bool:
    return process_state(process)[:1] in (["T"], ["t"])


class SuspensionTracker:
    """Counts the seconds that each of some processes has been stopped. At most `gap` seconds between two looks count,
    as this process may have been stopped as well.
    """

    def __init__(self, gap: float) -> None:
        self._gap, self._at = gap, time.monotonic()
        self._seconds: dict[int, float] = {}

    def look(self, processes: Iterable[int]) -> dict[int, float]:
        now = time.monotonic()
        passed, self._at = min(now - self._at, self._gap), now
        before = self._seconds
        self._seconds = {p: before[p] + passed if p in before else 0.0 for p in processes if is_suspended(p)}
        return self._seconds


# --------------------------------------------------------------------------------------------- those that are idle


@dataclass(frozen=True)
class ProcessUsage:
    """Seconds of a processor that a process and its descendants have used, and the bytes that they have read and
    written; and whether the first thread of one of them now computes, or waits for a processor or a disk.
    """

    seconds: float = 0.0
    transferred: int = 0
    is_running: bool = False


class IdleTracker:
    """Counts the seconds for which each process and its descendants have neither computed nor read or written. At most
    `gap` seconds between two polls count, as this process may have been stopped.
    """

    def __init__(self, gap: float) -> None:
        self._gap, self._at = gap, time.monotonic()
        self._usage: dict[int, ProcessUsage] = {}
        self.idle: Mapping[int, float] = {}  # at the last poll, by process

    def restart(self) -> None:
        """Forgets all processes: the next poll begins to count."""
        self._usage, self.idle = {}, {}

    def exclude_latest(self) -> None:
        """Leaves out what the processes have done since the last poll."""
        self._usage = usage_by_process(self._usage)

    def poll(self, processes: Collection[int]) -> Mapping[int, float]:
        """Returns the seconds for which each process has been idle: 0 at its first poll."""
        now = time.monotonic()
        if self._usage and now - self._at < _PERIOD:
            return self.idle
        passed, self._at = now - self._at, now
        usage = usage_by_process(processes)
        before, self._usage = self._usage, usage
        self.idle = {
            process: self.idle.get(process, 0.0) + min(passed, self._gap)
            if process in before and process in usage and _is_idle(before[process], usage[process], passed)
            else 0.0
            for process in processes
        }
        return self.idle


def _is_idle(before: ProcessUsage, after: ProcessUsage, seconds: float) -> bool:
    """True if processes have only waited between two polls. A descendant that ends takes its numbers with it."""
    used, transferred = abs(after.seconds - before.seconds), abs(after.transferred - before.transferred)
    return not after.is_running and used <= _IDLE_SHARE * seconds + _TICK and transferred <= _IDLE_BYTES * seconds


def usage_by_process(processes: Iterable[int]) -> dict[int, ProcessUsage]:
    """Returns what each process has used, with its descendants, of those that exist (Linux)."""
    tick, usages = 1 / os.sysconf("SC_CLK_TCK"), {}
    children = _children_of_threads if os.path.exists(_CHILDREN.format("self", os.getpid())) else _children_in_table()
    for root in processes:
        if not process_state(root):
            continue
        family = [root]
        for member in family:
            family += children(member)
        states = [state for member in family if (state := process_state(member))]
        usages[root] = ProcessUsage(
            seconds=sum(sum(map(int, state[11:15])) for state in states) * tick,
            transferred=sum(map(_transferred_bytes, family)),
            is_running=any(state[0] in "RD" for state in states),
        )
    return usages


def _children_of_threads(process: int) -> list[int]:
    """Returns the children that the threads of a process have started. A child may be left out while others end."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError), open(_CHILDREN.format(process, thread), encoding="ascii") as file:
                children += map(int, file.read().split())
    return children


def _children_in_table() -> Callable[[int], list[int]]:
    """Returns a function that gives the children of a process, from the table of all processes of the machine."""
    children: dict[int, list[int]] = {}
    for process in _all_processes():
        if state := process_state(process):
            children.setdefault(int(state[1]), []).append(process)
    return lambda process: children.get(process, [])


def _transferred_bytes(process: int) -> int:
    """Returns the bytes that a process has read and written, also in mapped files."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{process}/io", encoding="ascii") as file:
        counts = {name: int(count) for name, _, count in (line.partition(":") for line in file)}
        return counts["rchar"] + counts["wchar"] + counts["read_bytes"]
    return 0


# ------------------------------------------------------------------------------------------------ those left behind


class OrphanReaper:
    """The orphans that this process adopts: children it has now and did not have before."""

    def __init__(self) -> None:
        adopt_orphans()
        self._before = set(children_of(os.getpid()))

    def end(self, patience: float) -> list[str]:
        """Ends all processes and returns the commands of the live ones, without processes of torch's compiler, which
        serve later compilations. They have `patience` seconds to end after SIGTERM; 0 means SIGKILL at once.
        """
        found: list[str] = []
        until = time.monotonic() + patience
        while left := [child for child in children_of(os.getpid()) if child not in self._before]:
            alive = [child for child in left if process_state(child)[:1] != ["Z"]]
            found += [_command(child) for child in alive if _COMPILER not in _words(child)]
            _end(alive, until)
            for child in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, 0)
        return found

    def close(self) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _end(children: list[int], until: float) -> None:
    handles = {child: ending(child, -1) for child in children}
    if until > time.monotonic():
        for child in children:
            os.kill(child, signal.SIGTERM)  # no race: a child that nobody has waited for keeps its process id
            os.kill(child, signal.SIGCONT)
        waited = {handle for handle in handles.values() if handle >= 0}
        while waited and (rest := until - time.monotonic()) > 0:
            waited -= set(multiprocessing.connection.wait(waited, timeout=rest))
    for child, handle in handles.items():
        os.kill(child, signal.SIGKILL)
        if handle >= 0:
            os.close(handle)


def children_of(parent: int) -> list[int]:
    return [process for process in _all_processes() if process_state(process)[1:2] == [str(parent)]]


def _all_processes() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


def process_state(process: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on; [] if the process is gone."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def handles_signal(process: int, number: signal.Signals) -> bool:
    """True if a process has a handler for a signal, which may end it otherwise."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def signal_name(number: int) -> str:
    """Returns `SIGKILL`, or `signal 40` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _words(process: int) -> str:
    try:
        with open(f"/proc/{process}/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read(4 * _SHOWN).replace("\0", " ").strip()
    except OSError:
        return ""


def _command(process: int) -> str:
    shown = "".join(letter if letter.isprintable() else "?" for letter in _words(process))
    return f"{shown[:_SHOWN]} (process {process})" if shown else f"process {process}"
