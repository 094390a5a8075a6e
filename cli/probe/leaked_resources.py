"""Ends and names threads and processes that user code leaves running in a child process.

Model: the code runs in a worker below a supervisor. The worker ends by `os._exit`, which waits for no thread. The
supervisor adopts its descendants and kills those still running when the worker has ended, in any way. So nothing goes
on that would hold the terminal or a pipe open.

Limits: processes that `multiprocessing` did not start are found only on Linux, through /proc. Where the command is
killed, its worker and supervisor end with it, and other processes of the code go on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures.thread import _threads_queues
from pathlib import Path
from typing import NoReturn, TypeVar

from dslc.runtime.process.lifetime import adopt_orphans, end_with

T = TypeVar("T")

_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")  # they end with their clients
_SHOWN = 3  # names that a message lists

_repeats: set[int | str] = set()  # processes, and threads in words, that repeated calls of a function have started


def supervise(parent: int, work: Callable[[], NoReturn], report: Callable[[int, Sequence[int]], None]) -> NoReturn:
    """Runs `work` in a worker and ends this process. Calls `report` with the worker's exit code, as in `subprocess`,
    and the processes that it left, which are killed. Both end with `parent`, which has forked this process.
    """
    try:
        end_with(parent)
        adopt_orphans()
        supervisor, worker = os.getpid(), os.fork()
        if worker == 0:
            end_with(supervisor)
            work()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker takes it; its leftovers must still be ended
        _, status = os.waitpid(worker, 0)
        report(os.waitstatus_to_exitcode(status), _kill_descendants())
    finally:
        os._exit(0)


def counted_once(function: Callable[[], T]) -> Callable[[], T]:
    """Returns the function of a user, whose first call alone is counted with the threads and processes it leaves."""
    calls = 0

    def called() -> T:
        nonlocal calls
        calls += 1
        running_before = _running() if calls > 1 else set()
        try:
            return function()
        finally:
            if calls > 1:
                _repeats.update(_running() - running_before)

    return called


def of_repeats() -> list[int]:
    """Returns the processes that repeated calls have started, and their descendants."""
    started_processes = [resource for resource in _repeats if isinstance(resource, int)]
    return [*started_processes, *(child for process in started_processes for child in _descendants(process))]


def _running() -> set[int | str]:
    return {*_descendants(os.getpid()), *(f"thread {thread.ident}" for thread in threading.enumerate())}


def end_own() -> tuple[list[str], list[int]]:
    """Ends the processes that `multiprocessing` started in this one. Returns the names of the threads that would keep
    Python from ending, and the processes that it would wait for: not daemons, nor the idle threads of an executor.
    """
    threads = [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.daemon and thread not in _threads_queues
        if f"thread {thread.ident}" not in _repeats
    ]
    children = multiprocessing.active_children()
    for process in children:
        process.kill()
        process.join()
    pids = [process.pid for process in children if process.pid is not None and not process.daemon]
    return threads, [pid for pid in pids if pid not in _repeats]


def in_words(threads: Sequence[str], processes: Sequence[int]) -> str:
    """Joins them in words: `a thread (`loader`) and 2 processes (71, 72)`; "" for none."""
    parts = []
    for singular, plural_word, names in (
        ("thread", "threads", [f"`{name}`" for name in threads]),
        ("process", "processes", [str(process) for process in processes]),
    ):
        names_text = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        if names:
            parts.append(
                f"a {singular} ({names_text})" if len(names) == 1 else f"{len(names)} {plural_word} ({names_text})"
            )
    return " and ".join(parts)


def _kill_descendants() -> list[int]:
    descendants = _descendants(os.getpid())
    for process in descendants:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for process in descendants:  # parents first: their children are then adopted by this process
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)
    return descendants


def _descendants(process: int) -> list[int]:
    """Returns the descendants of a process, parents first, except helpers of `multiprocessing`."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended in the meantime
            # After the name, which is in parentheses and may hold any character: the state and the parent.
            state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            helps = any(name in (entry / "cmdline").read_bytes() for name in _HELPERS)
            if state not in (b"Z", b"X") and not helps:
                children[int(parent)].append(int(entry.name))
    family = [process]
    for ancestor in family:
        family += children[ancestor]
    return family[1:]
