"""One display for the trainings of a sweep that run at once: a bar each on a terminal, plain lines elsewhere. It
follows the records and notes of each run directory, as the display of one training does (runtime/process/progress.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from dslc.dsl.plain import plain
from dslc.runtime.process.records import NOTES, Follower, Record, RecordFollower

if TYPE_CHECKING:
    from rich.progress import TaskID

    from dslc.sweeps.running import SweepTraining

_QUIET = 5.0  # seconds between two lines of one training, where there is no terminal


def display(trainings: Sequence[SweepTraining], screen: TextIO) -> SweepDisplay:
    fancy = screen.isatty() and "CI" not in os.environ and os.environ.get("TERM") != "dumb"
    return _BarDisplay(trainings, screen) if fancy else _SweepLines(screen)


class _Followed:
    def __init__(self, training: SweepTraining) -> None:
        self.training, self.steps, self.step = training, training.ready.program.steps, 0
        notes = os.path.join(training.folder, NOTES)
        with contextlib.suppress(FileNotFoundError):
            os.remove(notes)  # those of an earlier launcher
        self.notes, self.records = Follower(notes), RecordFollower(training.folder)
        self.shown = -_QUIET

    def new(self) -> Iterator[Record]:
        for record in self.records.new():
            self.step = record["step"]
            yield record


class SweepDisplay(ABC):
    """The trainings that are followed, and the messages about them, each line after the name of its training.
    `interval` are the seconds between two looks.
    """

    interval: float

    def __init__(self, screen: TextIO) -> None:
        self._screen = screen
        self._followed: dict[str, _Followed] = {}

    def begin(self, training: SweepTraining) -> None:
        self._followed[training.name] = _Followed(training)

    def poll(self) -> None:
        for name, each in self._followed.items():
            for line in each.notes.new():
                self.say(f"{name}: {line.rstrip()}")
            for record in each.new():
                self.record(each, record)

    @abstractmethod
    def record(self, each: _Followed, record: Record) -> None:
        """Shows a new record."""

    @abstractmethod
    def close(self) -> None:
        """Follows the last training."""

    def end(self, training: SweepTraining, how: str) -> None:
        self.say(f"{training.name}: {how}")
        del self._followed[training.name]

    def say(self, text: str) -> None:
        print(plain(text), file=self._screen, flush=True)

    def _line(self, each: _Followed, record: Record) -> str:
        from dslc.runtime.process.progress import numbers_text

        split = "" if record["split"] == "train" else f"  {record['split']}"
        return f"{each.training.name}: step {record['step']}/{each.steps}{split}  {numbers_text(record)}"


class _SweepLines(SweepDisplay):
    interval = 0.2

    def begin(self, training: SweepTraining) -> None:
        super().begin(training)
        self.say(training.head)

    def record(self, each: _Followed, record: Record) -> None:
        if record["split"] == "train":
            if time.monotonic() - each.shown < _QUIET:
                return
            each.shown = time.monotonic()
        self.say(self._line(each, record))

    def close(self) -> None:
        pass


class _BarDisplay(SweepDisplay):
    """A bar for all trainings, and one for each that runs; evaluations are printed above them."""

    interval = 0.1

    def __init__(self, trainings: Sequence[SweepTraining], screen: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(screen)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeRemainingColumn(),
        )
        console = Console(file=screen, highlight=False)
        self._progress = Progress(*columns, console=console, auto_refresh=False)  # a thread would disturb forks
        self._all = self._progress.add_task("trainings", total=len(trainings), numbers="")
        self._bars: dict[str, TaskID] = {}
        self._progress.start()

    def begin(self, training: SweepTraining) -> None:
        super().begin(training)
        steps = training.ready.program.steps
        self._bars[training.name] = self._progress.add_task(training.name, total=steps, numbers="")

    def record(self, each: _Followed, record: Record) -> None:
        from dslc.runtime.process.progress import numbers_text

        if record["split"] == "train":
            bar = self._bars[each.training.name]
            self._progress.update(bar, completed=record["step"], numbers=numbers_text(record))
        else:
            self.say(self._line(each, record))

    def poll(self) -> None:
        super().poll()
        with contextlib.suppress(BlockingIOError):
            self._progress.refresh()

    def say(self, text: str) -> None:
        self._progress.console.print(plain(text), markup=False)

    def end(self, training: SweepTraining, how: str) -> None:
        super().end(training, how)
        self._progress.remove_task(self._bars.pop(training.name))
        self._progress.advance(self._all)

    def close(self) -> None:
        self._progress.refresh()
        self._progress.stop()
