"""The display of a training: a bar on a terminal, plain lines elsewhere, and a summary at the end.

Model: the launcher, which is otherwise idle, reads metrics.jsonl and the board a few times a second, and passes the
records to TensorBoard. The ranks do no work for the display.

Contract: without a terminal, and if the environment has `CI`, no control characters are printed: only the first step,
each evaluation, and at most one line every `QUIET` seconds. Libraries are loaded after the first step is done.

Limits: the rate is the rate of the steps between two looks, without the first step, which is never typical.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from typing import TextIO

from dslc.compiler.ir.number_text import path_text, step_text
from dslc.compiler.ir.program import JobProgram, StepPhases
from dslc.runtime.process.failure import Outcome, in_words
from dslc.runtime.process.records import (
    NAME,
    NOTES,
    TEXTS,
    Follower,
    Record,
    TensorBoard,
    overview_numbers,
    parse_record,
    parse_text,
    phases_of,
)
from dslc.runtime.process.run_status import Heartbeat
from dslc.runtime.process.screen import drop, readable
from dslc.runtime.process.stop import RunControl

QUIET = 5.0  # seconds
MOST = 3  # processes left behind that are named at most
LOOKS = {True: 0.2, False: 1.0}  # seconds between two looks, on a terminal and elsewhere


class Watch:
    """Follows one training from the launcher; `coordinator` is the host that shows it, if another host does. If it
    `goes_on`, what was noted before has been shown elsewhere.
    """

    def __init__(
        self,
        job: JobProgram,
        run_dir: str,
        board: RunControl,
        screen: TextIO,
        coordinator: str = "",
        *,
        goes_on: bool = False,
    ) -> None:
        self._job, self._run_dir, self._board, self._screen = job, run_dir, board, screen
        notes = os.path.join(run_dir, NOTES)
        self._notes = Follower(notes, os.path.getsize(notes) if goes_on and os.path.exists(notes) else 0)
        self._records: Follower | None = None
        self._texts: Follower | None = None
        self._display: _LineDisplay | None = None
        self._tensorboard: TensorBoard | None = None
        self._last: dict[str, Record] = {}
        found = os.stat(run_dir)
        self._folder = found.st_dev, found.st_ino
        self._warned, self._coordinator, self._trains = False, coordinator, job.is_training
        expected = job.expected.total if job.expected is not None else 0.0
        self._beat = Heartbeat(run_dir, job.steps, keeps=not coordinator and self._trains, expected=expected)
        self._left: tuple[int, float] | None = None  # before a change of hosts
        self._hosts = ""
        self._noted = 0  # bytes of the lines on the board that are shown
        self._events = job.tensorboard  # are written for TensorBoard
        self._dropped = ""  # why they are not written any more
        self._fancy = screen.isatty() and "CI" not in os.environ and os.environ.get("TERM") != "dumb"
        self.interval = LOOKS[self._fancy]

    def look(self) -> None:
        """Shows new records and notes. Called often; costs some microseconds if nothing is new."""
        lines, self._noted = self._board.noted(self._noted)
        for line in (*self._notes.new(), *lines):
            self._say(readable(line.rstrip()))
        if self._left is not None and self._board.began is not None:
            self._say(self._cost(self._left, self._board.began))
            self._left = None
        if self._records is None and self._board.records is not None:
            self._records = Follower(os.path.join(self._run_dir, NAME), self._board.records)
            self._texts = Follower(os.path.join(self._run_dir, TEXTS)) if self._job.generate is not None else None
        for line in self._records.new() if self._records is not None else ():
            try:
                record = parse_record(line.encode())
            except ValueError:
                continue  # cut off when the disk was full, or written by another
            if "seconds" not in record:
                continue  # written by another
            self._last[record["split"]] = record
            self._beat.step_time = sum(phases_of(record).values()) or self._beat.step_time
            with self._screened():
                self._open_display(record["step"]).record(record)
            with self._drop_on_full_disk():
                if self._tensorboard is not None:
                    self._tensorboard.write(record)
        self._write_texts()
        if self.is_stopping() and not self._warned:
            self._warned = True
            if self._board.stop_at != self._job.steps:
                self._say("stopping after this step (Ctrl-C once more: at once)")
        with self._screened():
            if self._display is not None:
                self._display.tick(self._board.furthest)

    def _write_texts(self) -> None:
        """Passes generated texts to TensorBoard, except texts from before this start."""
        if self._tensorboard is None or self._texts is None:
            return
        first = self._board.began[0] if self._board.began is not None else 0
        for line in self._texts.new():
            try:
                text = parse_text(line)
            except ValueError:
                continue  # cut off when the disk was full, or written by another
            with self._drop_on_full_disk():
                if self._tensorboard is not None and text["step"] > first:
                    self._tensorboard.write_text(text)

    def is_stopping(self) -> bool:
        """Returns whether the training is asked to stop, by a signal or by `dslc stop`; gives a sign of life."""
        asked = self._beat.look(self._board.furthest - 1, self._numbers())
        if asked and not self._board.stop_requested:
            self._board.asked = "dslc stop"
            self._board.request_stop()
        return self._board.stop_requested

    def restart(self, message: str, note: str) -> None:
        """Shows why ranks are started again, and from now on `note`. Leaves no thread, as TensorBoard's: a process that
        is forked while another thread holds a lock never gets it.
        """
        self.look()
        self._beat.restart(max(0, self._board.furthest - 1), self._board.attempt, message, self._job.timeout)
        self._records, self._texts, self._noted = None, None, 0
        with self._drop_on_full_disk():
            if self._tensorboard is not None:
                self._tensorboard.close()
        self._tensorboard = None
        self._say(message)
        with self._screened():
            if self._display is not None:
                self._display.restart(note)

    def delegate_display(self, coordinator: str) -> None:
        """Leaves the display and the state of the run to the host `coordinator` from now on; "": this one has them."""
        self._coordinator, self._beat.keeps = coordinator, not coordinator and self._trains

    def change(self, left: tuple[int, float], hosts: str) -> None:
        """Has the cost of a change of hosts shown when the ranks go on with `hosts`; `left` is the step that was done
        before, and the time of the clock.
        """
        self._left, self._hosts = left, hosts

    def _cost(self, left: tuple[int, float], began: tuple[int, float]) -> str:
        steps = max(0, left[0] - began[0])
        lost = f"{steps} {'step is' if steps == 1 else 'steps are'} done again" if steps else "no step is lost"
        took = f"the change took {began[1] - left[1]:.1f} s"
        return f"goes on after step {began[0]} with {self._hosts}: {took}, and {lost}"

    def has_folder(self) -> bool:
        try:
            found = os.stat(self._run_dir)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # the network is down for a moment
            return True
        return (found.st_dev, found.st_ino) == self._folder

    def say(self, text: str) -> None:
        """Shows a line between the training's lines."""
        self._say(readable(text))

    def say_of_late(self, ranks: list[int]) -> None:
        """Names, after a training, the ranks that are done but have not ended."""
        which = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
        self._say(f"{which} been ended: a thread or a process that the job's code began did not end")

    def say_of_left(self, commands: list[str]) -> None:
        """Names, after a training, the processes that it left behind."""
        for command in commands[:MOST]:
            self._say(f"a process that the job's code left behind has been ended: {command}")
        if len(commands) > MOST:
            self._say(f"and {len(commands) - MOST} others")

    def close(self, outcome: Outcome) -> None:
        self.look()
        with self._drop_on_full_disk():
            if self._tensorboard is not None:
                self._tensorboard.close()
        with self._screened():
            if self._display is not None:
                self._display.close(outcome.steps)
            if outcome.failure is None:
                print(self._summary(outcome), file=self._screen, flush=True)
            if self._dropped:
                told = f"TensorBoard has not all records ({self._dropped}); metrics.jsonl has"
                print(readable(told), file=self._screen, flush=True)
        # A failure that another start follows counts as an interruption (launching/restart_detection.py).
        if outcome.failure is None or not outcome.failure.goes_on:
            self._tell_end(outcome)

    def _numbers(self) -> dict[str, float | None]:
        """Returns the metrics of the last records; those that are not of the training have the name of the split."""
        return {
            f"{split} {name}" if split != "train" else name: value
            for split, record in self._last.items()
            for name, value in overview_numbers(record)
        }

    def _tell_end(self, outcome: Outcome) -> None:
        end = functools.partial(self._beat.end, metrics=self._numbers(), notes_shown=self._notes.position)
        if outcome.failure is not None:
            raised, lasting = outcome.failure.kind == "error", outcome.failure.lasting
            end("failed", outcome.steps, message=in_words(outcome.failure), raised=raised, lasting=lasting)
        elif outcome.stopped_at is not None:
            end("stopped", outcome.steps, asked=self._board.asked)
        else:
            end("done", outcome.steps, message=outcome.early)

    @contextlib.contextmanager
    def _screened(self) -> Iterator[None]:
        """Suppresses the error of a closed terminal or a pipe without a reader: the training goes on unseen."""
        try:
            yield
        except (OSError, ValueError):
            drop(self._screen)  # or flushing its buffer would fail at exit
            self._screen = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            self._display = _LineDisplay(self._job.steps, 1, "", self._screen)

    @contextlib.contextmanager
    def _drop_on_full_disk(self) -> Iterator[None]:
        """Drops TensorBoard's events if they cannot be written (disk full): metrics.jsonl has the same numbers."""
        try:
            yield
        except OSError as error:
            self._tensorboard, self._events, self._dropped = None, False, str(error)
            self._say(f"nothing more is written for TensorBoard: {self._dropped}")

    def _say(self, text: str) -> None:
        with self._screened():
            if self._display is None:
                print(text, file=self._screen, flush=True)
            else:
                self._display.say(text)

    def _open_display(self, step: int) -> _LineDisplay:
        """Returns the display, made at the first call with the record of `step`."""
        with self._drop_on_full_disk():
            if self._events and self._tensorboard is None:
                self._tensorboard = TensorBoard(os.path.join(self._run_dir, "tensorboard"), step)
        if self._display is None:
            units = "tokens" if self._job.loss.counts in ("tokens", "kept") else "samples"
            kind = _Bar if self._fancy else _LineDisplay
            batch = self._job.data.batch * self._board.units
            self._display = kind(self._job.steps, batch, units, self._screen, self._job.expected)
        return self._display

    def _summary(self, outcome: Outcome) -> str:
        train = self._last.get("train")
        folder = readable(path_text(self._run_dir))
        if self._coordinator:
            head = "trained" if outcome.stopped_at is None else "stopped after"
            where = f"metrics and weights are on {self._coordinator}, the logs of this host in {folder}/logs"
            return f"{head} {outcome.steps} steps; {where}"
        if outcome.stopped_at == 0:
            return f"ended at once, without weights; the logs are in {folder}/logs"
        seconds = max((record["seconds"] for record in self._last.values()), default=0.0)
        steps = f"{outcome.steps} step{'s' if outcome.steps != 1 else ''}"
        if outcome.stopped_at is not None:
            head = f"stopped after {steps} of {self._job.steps}, {_duration(seconds)}"
        elif outcome.early:
            head = f"ended early, after {steps} of {self._job.steps}, {_duration(seconds)}"
        else:
            head = f"trained {steps} in {_duration(seconds)}"
        if outcome.restarts:
            head += f", after {outcome.restarts} restart{'s' * (outcome.restarts > 1)}"
        lines = [head + ("" if train is None else f": {numbers_text(train)}")]
        if outcome.early:
            lines.append(f"the reason: {outcome.early}")
        if outcome.stopped_at is None:
            lines += [f"{split}: {numbers_text(found)}" for split, found in self._last.items() if split != "train"]
        return "\n".join([*lines, f"weights, metrics and logs are in {folder}"])


class _LineDisplay:
    def __init__(self, steps: int, batch: int, units: str, screen: TextIO, expected: StepPhases | None = None) -> None:
        self._steps, self._batch, self._units, self._screen = steps, batch, units, screen
        self._expected = expected
        self._at = -QUIET
        self._before: Record | None = None

    def record(self, record: Record) -> None:
        if record["split"] != "train":
            self.say(f"{self._step(record)}  {record['split']}  {numbers_text(record)}")
            return
        before, self._before = self._before, self._before or record
        if time.monotonic() - self._at < QUIET:
            return
        self._at = time.monotonic()
        rate = ""
        if before is not None and record["seconds"] > before["seconds"] and record["step"] > before["step"]:
            each = (record["seconds"] - before["seconds"]) / (record["step"] - before["step"])
            left = each * (self._steps - record["step"])
            rate = f"  {_number(self._batch / each)} {self._units}/s, {_duration(left)} left"
        self._before = record
        self.say(f"{self._step(record)}  {numbers_text(record)}{rate}{self._step_time(record)}")

    def say(self, text: str) -> None:
        print(text, file=self._screen, flush=True)

    def tick(self, step: int) -> None:
        """Shows nothing new: only a bar moves between two records."""

    def restart(self, note: str) -> None:
        """Shows nothing new."""

    def close(self, steps: int) -> None:
        """Shows nothing new."""

    def _step_time(self, record: Record) -> str:
        """Returns the time of a step beside the predicted one; "" without a prediction."""
        phases = phases_of(record)
        return f"  {step_text(sum(phases.values()), self._expected.total)}" if phases and self._expected else ""

    def _step(self, record: Record) -> str:
        return f"step {record['step']:>{len(str(self._steps))}}/{self._steps}"


class _Bar(_LineDisplay):
    """A bar with the step, the loss, the rate and the time left; evaluations are printed above it."""

    def __init__(self, steps: int, batch: int, units: str, screen: TextIO, expected: StepPhases | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        super().__init__(steps, batch, units, screen, expected)
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("[cyan]{task.fields[rate]}[/cyan]"),
            TextColumn("[yellow]{task.fields[note]}[/yellow]"),
            TimeRemainingColumn(),
        )
        console = Console(file=screen, highlight=False)
        self._progress = Progress(*columns, console=console, auto_refresh=False)
        self._task = self._progress.add_task("", total=steps, loss="", rate="", note="")
        self._progress.start()
        self._looks: list[tuple[float, int]] = []

    def record(self, record: Record) -> None:
        if record["split"] == "train":
            self._progress.update(self._task, loss=f"{numbers_text(record)}{self._step_time(record)}")
        else:
            self.say(f"step {record['step']}  {record['split']}  {numbers_text(record)}")

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False)

    def tick(self, step: int) -> None:
        now = time.monotonic()
        self._looks = [*self._looks[-10:], (now, step)]
        (then, earlier), rate = self._looks[0], ""
        if step > earlier and now > then:
            rate = f"{_number((step - earlier) * self._batch / (now - then))} {self._units}/s"
        if step:  # the board names the step being worked on; one less is done
            self._progress.update(self._task, completed=step - 1)
        if rate:
            self._progress.update(self._task, rate=rate)
        with contextlib.suppress(BlockingIOError):
            self._progress.refresh()

    def restart(self, note: str) -> None:
        self._looks = []
        self._progress.update(self._task, rate="", note=note)

    def close(self, steps: int) -> None:
        self._progress.update(self._task, completed=steps)
        self._progress.refresh()
        self._progress.stop()


def numbers_text(record: Record) -> str:
    """Formats a record: `loss 0.1234  accuracy 0.967`."""
    return "  ".join(f"{name} {_number(value)}" for name, value in overview_numbers(record) if name != "lr")


def _number(value: float | None) -> str:
    if value is None:
        return "not finite"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.3e}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
