"""The board that the processes of one node share, and how Ctrl-C stops a training at one step.

Model: the launcher makes some pages of anonymous shared memory before it forks, and every rank inherits them. On them
stand the request to stop, the step after which all ranks leave, and for each rank its process, the step it is in,
whether it is done, and its last words: how it ended (failure.py), which no full disk and no removed folder can keep
from the launcher.

Contract: Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 (batch systems send these before they end a job) to the launcher
is a request. The ranks ignore those that are sent to a whole process group, and look at the board. A second one, more
than `SECOND` seconds after the first, ends the training at once.

Why all ranks leave after the same step. Rank 0 reads the request before it begins step s. If there is one it writes
`stop_at = s` (once) and only then works on step s. Each rank compares `stop_at` with its own step at the end of a step.
- At the end of step s a rank has completed the exchange of gradients of step s, to which rank 0 contributed after its
  write: the rank finds `stop_at = s` and leaves.
- At the end of a step before s it finds 0, or s already, which is not its own step: it goes on.
This needs a step in which the host waits for a collective that rank 0 takes part in. On the CPU that is every step. On
a GPU the host runs ahead of the device and waits only where it reads a number back: there rank 0 answers with the next
such step (`answer` takes it as an argument).

Limits: one node, since memory is not shared with others. SIGTERM sent to the ranks themselves, rather than to the
launcher, ends them at once. A number on the board is 8 bytes, aligned, and written by one process alone, or the same by
each that writes it (`not_finite`): no lock is needed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

SECOND = 0.5  # seconds; `timeout` and some supervisors send one signal twice at the same moment
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
WORDS = 1 << 16  # bytes that the last words of a rank may have; pages that no one writes to cost nothing

_REQUEST, _STOP_AT, _UNITS, _RECORDS, _NOT_FINITE = range(5)
_HEAD, _EACH = 8, 3  # numbers at the beginning of the board, and for each rank
_PROCESS, _STEP, _SAID = range(3)  # _SAID: how many bytes of last words there are; negative of a rank that is done


class Board:
    """Numbers that the launcher and the ranks of one node see at the same time."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._words = ranks, 8 * (_HEAD + _EACH * ranks)  # where the words begin
        self._memory = mmap.mmap(-1, self._words + WORDS * ranks)
        self._numbers = memoryview(self._memory)[: self._words].cast("q")

    # ------------------------------------------------------------------------------------------------- stopping

    def request_stop(self) -> None:
        """Asks the ranks to leave; said by the launcher."""
        self._numbers[_REQUEST] = 1

    @property
    def stop_requested(self) -> bool:
        return bool(self._numbers[_REQUEST])

    def answer(self, step: int) -> None:
        """Rank 0, before it begins a step: everyone leaves after `step` (from 1) if that has been asked for."""
        numbers = self._numbers
        if numbers[_REQUEST] and not numbers[_STOP_AT]:
            numbers[_STOP_AT] = step

    @property
    def stop_at(self) -> int:
        """The step (from 1) after which all ranks leave; 0 as long as there is none."""
        return self._numbers[_STOP_AT]

    # -------------------------------------------------------------------------------------------------- not finite

    @property
    def not_finite(self) -> int:
        """The step (from 1) in which some rank's loss was not finite; 0 as long as there is none."""
        return self._numbers[_NOT_FINITE]

    @not_finite.setter
    def not_finite(self, step: int) -> None:
        self._numbers[_NOT_FINITE] = step

    # ------------------------------------------------------------------------------------------- what a rank is at

    def arrive(self, rank: int) -> None:
        """A rank's process has begun."""
        self._numbers[_HEAD + _EACH * rank + _PROCESS] = os.getpid()

    def enter(self, rank: int, step: int) -> None:
        """A rank begins `step` (from 1)."""
        self._numbers[_HEAD + _EACH * rank + _STEP] = step

    def process(self, rank: int) -> int:
        """The process id of a rank; 0 before it has begun."""
        return self._numbers[_HEAD + _EACH * rank + _PROCESS]

    def step(self, rank: int) -> int:
        """The step (from 1) that a rank is in; 0 before the first."""
        return self._numbers[_HEAD + _EACH * rank + _STEP]

    def done(self, rank: int) -> bool:
        """Whether a rank has done all it had to do."""
        return self._numbers[_HEAD + _EACH * rank + _SAID] < 0

    def failing(self, rank: int) -> bool:
        """Whether a rank has said that it ends before it has done all it had to do."""
        return self._numbers[_HEAD + _EACH * rank + _SAID] > 0

    @property
    def all_done(self) -> bool:
        return all(self.done(rank) for rank in range(self._ranks))

    # ----------------------------------------------------------------------------------------------- its last words

    def say(self, rank: int, words: str, *, done: bool = False) -> None:
        """A rank says how it ends: once, in 1 to `WORDS` bytes; `done` if it has done all it had to do."""
        content, begin = words.encode(errors="replace"), self._words + WORDS * rank
        assert 0 < len(content) <= WORDS
        self._memory[begin : begin + len(content)] = content
        # Last, and one number: what is there by then is whole, and whoever sees the words sees whose they are.
        self._numbers[_HEAD + _EACH * rank + _SAID] = -len(content) if done else len(content)

    def said(self, rank: int) -> str:
        """What a rank has said; "" if it has not."""
        begin = self._words + WORDS * rank
        return self._memory[begin : begin + abs(self._numbers[_HEAD + _EACH * rank + _SAID])].decode()

    # --------------------------------------------------------------------------------------------- for the display

    @property
    def units(self) -> int:
        """What one sample counts as in the rate that is shown: 1, or the tokens of a sequence."""
        return self._numbers[_UNITS] or 1

    @units.setter
    def units(self, value: int) -> None:
        self._numbers[_UNITS] = value

    @property
    def records(self) -> int | None:
        """Where in metrics.jsonl the records of this training begin; None before rank 0 has laid the file out."""
        begin = self._numbers[_RECORDS]
        return begin - 1 if begin else None

    @records.setter
    def records(self, begin: int) -> None:
        self._numbers[_RECORDS] = begin + 1


@contextlib.contextmanager
def listening(board: Board, at_once: type[BaseException] | None = None) -> Iterator[None]:
    """While this lasts, the signals of a user who wants to stop become a request on the board.

    The second raises `at_once` in the main thread (KeyboardInterrupt if None). A signal that was ignored before (a job
    in the background, nohup) stays ignored. Outside the main thread nothing is changed: Python allows it only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, first, ending = os.getpid(), 0.0, False

    def heard(number: int, frame: FrameType | None) -> None:
        nonlocal first, ending
        if os.getpid() != owner:
            return  # a rank that has just been forked and has not yet set its own
        now = time.monotonic()
        if not first:
            first = now
            board.request_stop()
        elif now - first > SECOND and not ending:
            ending = True  # any more would only be in the way
            raise (at_once or KeyboardInterrupt)(f"{signal.Signals(number).name} for the second time")

    before = {}
    for name in SIGNALS:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, heard)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def deaf() -> None:
    """For a rank: what stops a training is the launcher's business; SIGTERM and SIGQUIT end this process at once."""
    for name, answer in (
        ("SIGINT", signal.SIG_IGN),
        ("SIGHUP", signal.SIG_IGN),
        ("SIGUSR1", signal.SIG_IGN),  # until the log is there that it writes stacks to (worker.py)
        ("SIGUSR2", signal.SIG_IGN),
        ("SIGTERM", signal.SIG_DFL),
        ("SIGQUIT", signal.SIG_DFL),
    ):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), answer)
