"""The board that the processes of one node share, and how Ctrl-C stops a training at one step.

Model: the launcher makes some pages of anonymous shared memory before it forks, and every rank inherits them. They hold
the request to stop, and the step after which all ranks leave. For each rank they hold its process, its step, its
position in that step (positions.py), whether it is done, and its last words: how it ended (failure.py). A full disk or
a removed folder cannot keep these from the launcher.

Contract: Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 (batch systems send these before they end a job) to the launcher
is a request. The ranks ignore signals that are sent to a whole process group, and read the board. A second one, more
than `SECOND` seconds after the first, ends the training at once.

Why all ranks leave after the same step: rank 0 reads the request before it begins step s. If there is one it writes
`stop_at = s` (once) and only then works on step s. Each rank compares `stop_at` with its own step at the end of a step.
At the end of step s a rank has completed an exchange of gradients to which rank 0 contributed after its write: the rank
finds `stop_at = s` and leaves. Before, it finds 0 or s; neither is its own step.

This needs a step in which the host waits for a collective that rank 0 takes part in. On the CPU that is every step,
unless each rank has a gradient of its own (exchange/): then each that is logged, where they agree on the loss. On a GPU
the host waits only where it reads a number back: there rank 0 answers with the next such step (`answer` takes it as an
argument). Several nodes have a board each; there the launchers agree on the step (hosts/coordination.py), and `leaves`
waits for them.

SIGTERM is sent to a whole process group by `timeout`, service managers and shells, and to a single rank by who wants to
end that. A rank waits `ANSWER` seconds for the launcher to have got one too, and else ends by it.

Limits: a rank that waits outside Python ends by SIGTERM only after that. A number on the board is 8 bytes, aligned, and
has one writer, or writers of the same value (`not_finite`): no lock is needed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_HELD = 0.001  # seconds between two looks of a rank that waits
ANSWER = 1.0  # seconds that the launcher has to hear a signal that a rank has heard
SECOND = 0.5  # seconds; `timeout` and some supervisors send one signal twice in the same moment
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
NOTES = 1 << 14  # bytes reserved for what rank 0 has to say meanwhile
DETAILS = 1 << 12  # bytes reserved for the details of a rank's position
WORDS = 1 << 16  # bytes reserved for the last words of a rank; untouched pages cost nothing

_REQUEST, _STOP_AT, _UNITS, _RECORDS, _NOT_FINITE, _TIMED, _TIME_IS_UP, _HOLD, _BEGAN, _FROM, _NOTED = range(11)
_HEAD, _EACH = 11, 6  # numbers at the beginning of the board, and for each rank
# _SAID: bytes of last words, negated for a rank that is done; _DETAILED: bytes of the details of its position.
_PROCESS, _STEP, _SAID, _POSITION, _SINCE, _DETAILED = range(6)


class RunControl:
    """Numbers that the launcher and the ranks of one node share: `ranks` of them from `first` on. `alone`: no other
    node takes part; else rank 0 leaves the answer to a request to the launchers (hosts/coordination.py).
    """

    def __init__(self, ranks: int, first: int = 0, *, alone: bool = True) -> None:
        self.ranks, self._alone = range(first, first + ranks), alone
        self._words = 8 * (_HEAD + _EACH * ranks)  # where the words begin
        self._details = self._words + WORDS * ranks + NOTES
        self._memory = mmap.mmap(-1, self._details + DETAILS * ranks)
        self._numbers = memoryview(self._memory)[: self._words].cast("q")
        self.attempt = 1  # how often the ranks have been started
        self.asked = ""  # what has asked to stop: a signal's name, or `dslc stop`; known to the launcher

    def start_again(self, attempt: int, first: int) -> None:
        """Forgets all but a request to stop; called by the launcher while there is no rank. `first`: of the ranks."""
        self.attempt, self.ranks = attempt, range(first, first + len(self.ranks))
        for n in range(_REQUEST + 1, len(self._numbers)):
            self._numbers[n] = 0

    # ------------------------------------------------------------------------------------------------- stopping

    def request_stop(self) -> None:
        self._numbers[_REQUEST] = 1

    @property
    def stop_requested(self) -> bool:
        return bool(self._numbers[_REQUEST])

    def answer(self, step: int, *, timed: bool = False) -> None:
        """Sets `stop_at` to `step` (from 1) if a stop was requested, or the job's time has passed (`timed`); called by
        rank 0 before it begins a step.
        """
        numbers = self._numbers
        if not self._alone:
            numbers[_TIME_IS_UP] |= timed
            return
        if (numbers[_REQUEST] or timed) and not numbers[_STOP_AT]:
            numbers[_TIMED] = not numbers[_REQUEST]  # before the step, which tells the ranks to look
            numbers[_STOP_AT] = step

    @property
    def stop_at(self) -> int:
        """Step (from 1) after which all ranks leave; 0 if there is none yet."""
        return self._numbers[_STOP_AT]

    def leaves(self, step: int) -> bool:
        """True if all ranks leave after `step`, which this rank is at the end of. Waits while that is not decided."""
        while self._numbers[_HOLD] == step and not self._numbers[_STOP_AT]:
            time.sleep(_HELD)
        return self._numbers[_STOP_AT] == step

    @property
    def time_is_up(self) -> bool:
        """True if rank 0 has said, and has left it to the launchers, that the job's time has passed."""
        return bool(self._numbers[_TIME_IS_UP])

    def hold_at(self, step: int) -> None:
        """Has ranks wait at the end of `step`; called by the launcher."""
        self._numbers[_HOLD] = step

    def leave_at(self, step: int, *, timed: bool) -> None:
        self._numbers[_TIMED] = timed
        self._numbers[_STOP_AT] = step

    def release(self) -> None:
        self._numbers[_HOLD] = 0

    @property
    def timed(self) -> bool:
        """True if all ranks leave because the job's time has passed; known where `stop_at` is."""
        return bool(self._numbers[_TIMED])

    # -------------------------------------------------------------------------------------------------- not finite

    @property
    def not_finite(self) -> int:
        """Step (from 1) in which some rank's loss was not finite; 0 if there is none yet."""
        return self._numbers[_NOT_FINITE]

    @not_finite.setter
    def not_finite(self, step: int) -> None:
        self._numbers[_NOT_FINITE] = step

    # ------------------------------------------------------------------------------------------- what a rank is at

    def _offset(self, rank: int) -> int:
        return _HEAD + _EACH * (rank - self.ranks.start)

    def begin(self, step: int) -> None:
        """Records that ranks are ready to go on after `step`, and when; the same from all ranks."""
        if not self._numbers[_BEGAN]:
            self._numbers[_FROM] = step
            self._numbers[_BEGAN] = time.monotonic_ns()

    @property
    def began(self) -> tuple[int, float] | None:
        """The step after which the ranks go on and the time of the clock when they were ready; None before."""
        numbers = self._numbers
        return (numbers[_FROM], numbers[_BEGAN] / 1e9) if numbers[_BEGAN] else None

    @property
    def furthest(self) -> int:
        """Step (from 1) of the rank that is furthest; 0 before the first."""
        return max(map(self.step, self.ranks))

    def arrive(self, rank: int) -> None:
        self._numbers[self._offset(rank) + _PROCESS] = os.getpid()

    def enter(self, rank: int, step: int) -> None:
        self._numbers[self._offset(rank) + _STEP] = step

    def process(self, rank: int) -> int:
        return self._numbers[self._offset(rank) + _PROCESS]

    def step(self, rank: int) -> int:
        """Returns the step (from 1) that a rank is in; 0 before the first."""
        return self._numbers[self._offset(rank) + _STEP]

    def has_finished(self, rank: int) -> bool:
        return self._numbers[self._offset(rank) + _SAID] < 0

    def failing(self, rank: int) -> bool:
        """True if a rank has reported that it ends before its work is finished."""
        return self._numbers[self._offset(rank) + _SAID] > 0

    @property
    def all_done(self) -> bool:
        return all(self.has_finished(rank) for rank in self.ranks)

    # ------------------------------------------------------------------------------------------------- its position

    def position_writer(self, rank: int) -> Callable[[int], None]:
        """Returns the function by which a rank writes its position in a step: 0.2 us, without a system call."""
        numbers, clock = self._numbers, time.monotonic_ns
        position, since = self._offset(rank) + _POSITION, self._offset(rank) + _SINCE

        def enter_position(number: int) -> None:
            numbers[position] = number
            numbers[since] = clock()

        return enter_position

    def position(self, rank: int) -> tuple[int, int, int]:
        """Returns a rank's step, its position in it, and the nanoseconds of the clock at which it came there."""
        begin = self._offset(rank)
        return self._numbers[begin + _STEP], self._numbers[begin + _POSITION], self._numbers[begin + _SINCE]

    def add_details(self, rank: int, text: str) -> None:
        """Records the details of a rank's position in place of earlier ones; text that has no room is left out."""
        content, begin = text.encode(errors="replace"), self._details + DETAILS * (rank - self.ranks.start)
        if len(content) <= DETAILS:
            self._numbers[self._offset(rank) + _DETAILED] = 0
            self._memory[begin : begin + len(content)] = content
            self._numbers[self._offset(rank) + _DETAILED] = len(content)

    def details(self, rank: int) -> str:
        begin = self._details + DETAILS * (rank - self.ranks.start)
        return self._memory[begin : begin + self._numbers[self._offset(rank) + _DETAILED]].decode(errors="replace")

    # ----------------------------------------------------------------------------------------------- its last words

    def say(self, rank: int, words: str, *, done: bool = False) -> None:
        """Records how a rank ends, once, in 1 to `WORDS` bytes; `done` if it has finished its work."""
        content, begin = words.encode(errors="replace"), self._words + WORDS * (rank - self.ranks.start)
        assert 0 < len(content) <= WORDS
        self._memory[begin : begin + len(content)] = content
        # Written last, as one number: whoever sees it sees complete words.
        self._numbers[self._offset(rank) + _SAID] = -len(content) if done else len(content)

    def last_message(self, rank: int) -> str:
        """Returns the last words of a rank; "" if there are none yet."""
        begin = self._words + WORDS * (rank - self.ranks.start)
        return self._memory[begin : begin + abs(self._numbers[self._offset(rank) + _SAID])].decode()

    # --------------------------------------------------------------------------------------------- for the display

    def note(self, text: str) -> None:
        """Adds a line for whoever watches the training, which reaches them also if the disk is full; on rank 0. Of many
        lines some find no room.
        """
        content = (" ".join(text.split()) + "\n").encode(errors="replace")
        begin, used = self._words + WORDS * len(self.ranks), self._numbers[_NOTED]
        if used + len(content) <= NOTES:
            self._memory[begin + used : begin + used + len(content)] = content
            self._numbers[_NOTED] = used + len(content)

    def noted(self, after: int) -> tuple[list[str], int]:
        """Returns the lines of `note` after the first `after` bytes, and the number of bytes of all."""
        begin, used = self._words + WORDS * len(self.ranks), self._numbers[_NOTED]
        return self._memory[begin + after : begin + used].decode().splitlines(), used

    @property
    def units(self) -> int:
        """Number that one sample counts for in the rate shown: 1, or the tokens of a sequence."""
        return self._numbers[_UNITS] or 1

    @units.setter
    def units(self, value: int) -> None:
        self._numbers[_UNITS] = value

    @property
    def records(self) -> int | None:
        """Position in metrics.jsonl of this training's first record; None before rank 0 has prepared the file."""
        begin = self._numbers[_RECORDS]
        return begin - 1 if begin else None

    @records.setter
    def records(self, begin: int) -> None:
        self._numbers[_RECORDS] = begin + 1


@contextlib.contextmanager
def listening(board: RunControl, at_once: type[BaseException] | None = None) -> Iterator[None]:
    """Turns the signals of a user who wants to stop into a request on the board, while the context lasts. The second
    raises `at_once` in the main thread (KeyboardInterrupt if None). A signal that was ignored before (a job in the
    background, nohup) stays ignored. Outside the main thread nothing is changed: Python allows it only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, first, ending = os.getpid(), 0.0, False

    def handle_stop(number: int, frame: FrameType | None) -> None:
        nonlocal first, ending
        if os.getpid() != owner:
            return  # a rank just forked that has not set its own handlers yet
        now = time.monotonic()
        if not first:
            first = now
            board.asked = board.asked or signal.Signals(number).name
            board.request_stop()
        elif now - first > SECOND and not ending:
            ending = True  # further signals would only disturb
            raise (at_once or KeyboardInterrupt)(f"{signal.Signals(number).name} for the second time")

    before = {}
    for name in SIGNALS:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handle_stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def deaf(board: RunControl, *, in_group: bool = False) -> None:
    """Makes a rank ignore the signals that stop a training, which the launcher handles. SIGQUIT ends it at once, and
    SIGTERM, unless the launcher has got one, too. `in_group`: those who stop the launcher always send it to both.
    """
    owner = os.getpid()

    def handle_interrupt(number: int, frame: FrameType | None) -> None:
        until = time.monotonic() + ANSWER
        while os.getpid() == owner and time.monotonic() < until:
            if board.stop_requested:
                return
            time.sleep(_HELD)
        signal.signal(number, signal.SIG_DFL)  # it was meant for this process, or for a child that has been forked
        os.kill(os.getpid(), number)

    for name, answer in (
        ("SIGINT", signal.SIG_IGN),
        ("SIGHUP", signal.SIG_IGN),
        ("SIGUSR1", signal.SIG_IGN),  # until the log exists into which it writes stacks (worker.py)
        ("SIGUSR2", signal.SIG_IGN),
        ("SIGTERM", signal.SIG_IGN if in_group else handle_interrupt),
        ("SIGQUIT", signal.SIG_DFL),
    ):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), answer)
