"""The process that feeds the loggers of libraries with the records and files of a run.

Model: it reads its orders from standard input, and says `ready` once it knows the records of earlier starts. It opens
the loggers, and follows metrics.jsonl until SIGTERM, or until its parent is gone. Then it reads the rest, adds the
report and ends the loggers' runs. Each logger has a thread, so that a service that does not answer holds up no other
logger.

Contract: a logger that fails misses records, and is called no more after `TRIES` failures in a row. It is noted once
when that happens, and at the end. A failure of a required logger asks the training to stop after its step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from dslc.compiler.facts.untrusted_files import replacing
from dslc.loggers.libraries import LIBRARIES, LibraryRun, RunFacts
from dslc.loggers.start import RUNS
from dslc.runtime.process.records import Record, RecordFollower, note
from dslc.runtime.process.run_status import ALIVE, ask_to_stop, read_status

TRIES = 3
_WITH_RANKS = ("running", "restarting")  # states of a run
_LOOK = 0.5  # seconds between two looks for new records
_INITIAL_FILES, _LATER_FILES = ("job.plt", "plan.json"), ("plan.svg", "report.json")


class Notes:
    """Notes for a run, shown by its launcher, or at the end by this process's parent. Launching ranks removes them."""

    def __init__(self, folder: str) -> None:
        self._folder, self._pending = folder, SimpleQueue[str]()

    def add(self, text: str) -> None:
        """Has a note written, from any thread."""
        self._pending.put(text)

    def write(self, at_end: bool = False) -> None:
        """Writes what is pending, if somebody shows it."""
        status = read_status(self._folder)
        if at_end or (status is not None and status.state in _WITH_RANKS):
            while not self._pending.empty():
                note(self._folder, self._pending.get())


class FedLogger:
    """One logger, and the records that it has missed."""

    def __init__(self, orders: Mapping[str, Any], key: str, folder: str, notes: Notes) -> None:
        self.key, self._folder, self._required, self._notes = key, folder, bool(orders["required"]), notes
        self._word, self._arguments = orders["word"], orders["arguments"]
        self._run: LibraryRun | None = None
        self._missed, self._in_a_row, self._reason = 0, 0, ""
        self._thread, self._calls = ThreadPoolExecutor(max_workers=1), list[Future[None]]()

    def submit(self, act: Callable[..., None], *arguments: object) -> None:
        """Has the logger's thread call `act`, after what was submitted before."""
        self._calls = [call for call in self._calls if not call.done() or call.exception() is not None]
        self._calls.append(self._thread.submit(act, *arguments))

    def wait(self) -> None:
        """Waits for the logger's thread. Raises what one of the calls has raised."""
        self._thread.shutdown()
        for call in self._calls:
            call.result()

    @property
    def identity(self) -> str:
        """The identity of its run; "" if the run is not open, or the library knows none."""
        return self._run.identity if self._run is not None else ""

    def open(self, facts: RunFacts) -> None:
        """Opens the run, or notes why there is none."""

        def act() -> None:
            self._run = LIBRARIES[self._word](self._arguments, facts)

        if not self._succeeds(act):
            self._in_a_row = TRIES
            self._tell(f"gets no records, as it cannot be opened ({self._reason})")
        elif self._run is not None and self._run.address:
            self._notes.add(f"{self.key}: {self._run.address}")

    def log(self, record: Record) -> None:
        """Passes a record on, or notes that it is missed."""
        run = self._run
        self._pass_on(record, run.log if run is not None else None)

    def log_text(self, text: Record) -> None:
        """Passes a generated text on, or notes that it is missed."""
        self._pass_on(text, self._run.log_text if self._run is not None else None)

    def _pass_on(self, record: Record, log: Callable[[Record], None] | None) -> None:
        if log is None or self._in_a_row == TRIES:
            self._missed += 1
        elif self._succeeds(lambda: log(record)):
            self._in_a_row = 0
        else:
            self._missed, self._in_a_row = self._missed + 1, self._in_a_row + 1
            if self._in_a_row in (1, TRIES):
                more = "and is called no more" if self._in_a_row == TRIES else "and the training goes on"
                self._tell(f"missed the record of step {record['step']} ({self._reason}), {more}")

    def add_file(self, path: str) -> None:
        """Passes a file of the run directory on."""
        run = self._run
        if run is not None and self._in_a_row < TRIES and not self._succeeds(lambda: run.add_file(path)):
            self._tell(f"did not take {os.path.basename(path)} ({self._reason})")

    def close(self, state: str) -> None:
        """Ends the run in `state`: `done`, `stopped` or `failed`."""
        run = self._run
        is_used = self._in_a_row < TRIES
        if run is not None and not self._succeeds(lambda: run.close(state)) and is_used:
            self._tell(f"could not be closed ({self._reason})", stops=False)
        if self._missed:
            records = "1 record" if self._missed == 1 else f"{self._missed} records"
            self._tell(f"missed {records} ({self._reason}); the run directory has all of them", stops=False)

    def _succeeds(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception as error:  # any kind: a library's own
            traceback.print_exc(file=sys.stderr)
            self._reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            return False
        return True

    def _tell(self, text: str, *, stops: bool = True) -> None:
        if self._required and stops:
            ask_to_stop(self._folder)
            text += "; it is required, so the training stops after its step"
        self._notes.add(f"the logger `{self.key}` {text}")


def logger_keys(words: Sequence[str]) -> list[str]:
    """Returns a key for each logger: its word, and a number for a second one of the same word."""
    keys = []
    for n, word in enumerate(words):
        earlier = words[:n].count(word)
        keys.append(f"{word} {earlier + 1}" if earlier else word)
    return keys


class Feed:
    """The loggers of a run, and what they have received of it."""

    def __init__(self, orders: Mapping[str, Any]) -> None:
        self._orders, self._folder = orders, orders["folder"]
        self._records, self._lock = RecordFollower(self._folder), threading.Lock()
        self._texts = RecordFollower(self._folder, texts=True)
        self._identities: dict[str, str] = dict(orders["runs"])
        self._files = {name: self._signature(name) for name in _LATER_FILES}  # of an earlier start
        keys = logger_keys([logger["word"] for logger in orders["loggers"]])
        self._notes = Notes(self._folder)
        self._loggers = [
            FedLogger(logger, key, self._folder, self._notes)
            for logger, key in zip(orders["loggers"], keys, strict=True)
        ]

    def open(self) -> None:
        """Has each logger opened, and given the files known before the start."""
        for logger in self._loggers:
            logger.submit(self._open, logger)
        for name in _INITIAL_FILES:
            self._add_file(name)

    def _open(self, logger: FedLogger) -> None:
        """Opens a logger and keeps the identity of its run."""
        facts = RunFacts(
            folder=self._folder,
            job=self._orders["job"],
            job_folder=self._orders["job_folder"],
            settings=self._orders["settings"],
            previous=self._orders["runs"].get(logger.key, ""),
        )
        logger.open(facts)
        with self._lock:
            self._identities |= {logger.key: logger.identity} if logger.identity else {}
            for place in self._orders["identity_folders"]:
                os.makedirs(place, exist_ok=True)
                with replacing(os.path.join(place, RUNS)) as file:
                    json.dump(self._identities, file)

    def pass_on(self) -> None:
        """Passes new records on, and the files that have been written since the last call."""
        for record in self._records.new():
            for logger in self._loggers:
                logger.submit(logger.log, record)
        for text in self._texts.new():
            for logger in self._loggers:
                logger.submit(logger.log_text, text)
        for name in _LATER_FILES:
            signature = self._signature(name)
            if signature not in (None, self._files[name]) and self._has_end(name):
                self._files[name] = signature
                self._add_file(name)
        self._notes.write()

    def close(self) -> None:
        """Ends the runs in the state of the training."""
        self.pass_on()
        status = read_status(self._folder)
        state = "failed" if status is None or status.state in ALIVE else status.state
        for logger in self._loggers:
            logger.submit(logger.close, state)
        for logger in self._loggers:
            logger.wait()
        self._notes.write(at_end=True)

    def _add_file(self, name: str) -> None:
        path = os.path.join(self._folder, name)
        for logger in self._loggers if os.path.exists(path) else ():
            logger.submit(logger.add_file, path)

    def _signature(self, name: str) -> tuple[int, int, int] | None:
        try:
            status = os.stat(os.path.join(self._folder, name))
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _has_end(self, name: str) -> bool:
        with open(os.path.join(self._folder, name), "rb") as file:
            return file.read().rstrip().endswith((b"</svg>", b"}"))


def main() -> int:
    """`python -m dslc.loggers.feed < orders`: returns when the training is over."""
    parent, over = os.getppid(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    feed = Feed(json.load(sys.stdin))
    print("ready", flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the parent reads no further; libraries print
    feed.open()
    while not over.wait(_LOOK) and os.getppid() == parent:
        feed.pass_on()
    feed.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
