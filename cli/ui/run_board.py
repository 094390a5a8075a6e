"""The runs at and below a folder, from their files, as `dslc ui` shows them.

Trainings of a sweep that have not begun are listed as `dslc status` lists them: as waiting.

Model: each look at the folder lists its runs, asks where they stand, and reads new jobs and new records for `_PATIENCE`
seconds at most: the next look goes on where it stopped. What changed has the number of that look, its revision, so
that a page asks for what it does not have yet.

Contract: nothing is written; so this machine's clock says whether a launcher of another host is overdue. Curves
are asked for by the number that a run has here: no question names a file.

Limits: clusters are asked where a job stands every `_CLUSTER_LOOK` seconds. Between two of these a job is where its
status file says.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dslc.compiler.facts.untrusted_files import open_file
from dslc.compiler.ir.codec import to_json
from dslc.launching.run_state import RunState, run_states, runs_in
from dslc.runs.metric_summary import MetricSummary, directions
from dslc.runs.run_figures import curves
from dslc.runs.sweep_file import NAME as SWEEP
from dslc.runs.sweep_file import Sweep, read_sweep
from dslc.runtime.process.records import NAME as METRICS
from dslc.runtime.process.records import Follower, Record, finite, parse_record
from dslc.runtime.process.run_status import NAME as STATUS
from dslc.ui.job_differences import (
    JOB,
    SettingValue,
    comparable_settings,
    differing_settings,
    job_settings,
    read_job,
)

_CLUSTER_LOOK = 15.0
_PATIENCE = 0.3  # seconds that a look may read
_MOST_LINES = 20_000  # of records, that one answer with curves covers
_COMPARED = 64  # bytes before a position in a file, which tell whether it is the same file
FileStamp = tuple[int, int, int]  # inode, bytes, and the time of the last change in nanoseconds


@dataclass(frozen=True, kw_only=True)
class _WaitingTraining:
    """A training of a sweep that has not begun. Its job is the job of the `begun` training, with other `values`."""

    begun: str
    values: tuple[str, ...]  # as `train.steps=40`


@dataclass(kw_only=True)
class _WatchedRun:
    """A run, its facts, and the stamps of their files. `shown`: what the page has since the revision `changed`."""

    folder: str
    name: str
    number: int
    state: RunState | None = None
    waiting: _WaitingTraining | None = None  # until it begins
    status_stamp: FileStamp | None = None
    is_undecided: bool = True  # the status file has changed since its cluster was asked
    job_stamp: FileStamp | None = None
    settings: Mapping[str, SettingValue] = field(default_factory=dict)
    highest: Mapping[str, bool] = field(default_factory=dict)
    summary: MetricSummary = field(default_factory=lambda: MetricSummary({}))
    follower: Follower | None = None
    metrics_stamp: FileStamp | None = None
    cursor: str = ""
    is_read: bool = False  # to the end of its records
    shown: dict[str, object] = field(default_factory=dict)
    changed: int = 0

    def read_job(self) -> None:
        """Reads the job again if its file has changed, as by a training that resumes."""
        folder, values = (self.waiting.begun, self.waiting.values) if self.waiting is not None else (self.folder, ())
        stamp = _stamp(folder, JOB)
        if stamp == self.job_stamp:
            return
        self.job_stamp = stamp
        job = read_job(folder, values)
        self.settings = job_settings(job) if job is not None else {}
        self.highest = directions(job) if job is not None else {}
        self.follower = None

    def read_records(self, deadline: float) -> bool:
        """Reads the records that were added; returns False if `deadline` comes before their end."""
        stamp = _stamp(self.folder, METRICS)
        if self.follower is not None and stamp == self.metrics_stamp and self.is_read:
            return True
        if self.follower is None or _cursor(self.folder, stamp, self.follower.position) != self.cursor:
            self.follower, self.summary = Follower(os.path.join(self.folder, METRICS)), MetricSummary(self.highest)
        self.metrics_stamp, self.is_read = stamp, True
        for record in _records(self.follower):
            if record is not None:
                self.summary.add(record)
            if time.monotonic() > deadline:
                self.is_read = False
                break
        self.cursor = _cursor(self.folder, stamp, self.follower.position)
        return self.is_read

    def to_json(self, differing: list[str], comparable: set[str]) -> dict[str, object]:
        """Returns what the page has of the run. A setting is its text, and its number where it is one in each job;
        None without a job."""
        assert self.state is not None
        stamp = _stamp(self.folder, STATUS)
        return {
            "name": self.name,
            "number": self.number,
            "state": self.state.state,
            "line": self.state.line(),
            "step": max(self.state.step, 0),
            "steps": self.state.steps,
            "updated": stamp[2] // 1_000_000_000 if stamp else 0,
            "bytes": self.metrics_stamp[1] if self.metrics_stamp else 0,
            "settings": {
                path: [self.settings[path].text, self.settings[path].number if path in comparable else None]
                for path in differing
                if path in self.settings
            }
            if self.settings
            else None,
            "last": self.summary.last,
            "best": {name: list(pair) for name, pair in self.summary.best.items()},
            "seconds": self.summary.seconds,
        }


class RunBoard:
    """The runs of a folder. Several threads may ask. Two looks are `pause` seconds apart, once everything is read."""

    def __init__(
        self, folder: str, pause: float = 0.5, *, patience: float = _PATIENCE, cluster_pause: float = _CLUSTER_LOOK
    ) -> None:
        self._folder, self._pause, self._patience, self._cluster_pause = folder, pause, patience, cluster_pause
        self._lock = threading.Lock()
        self._runs: dict[str, _WatchedRun] = {}
        self._sweeps: dict[str, tuple[FileStamp | None, Sweep | None]] = {}  # by the folder
        self._differing: list[str] = []
        self._revision, self._listed, self._count = 0, 0, 0
        self._next = 0  # the number of the run at which the last look stopped
        self._due = self._cluster_due = 0.0
        self._is_complete = False

    def changes(self, after: int) -> dict[str, Any]:
        """Returns the runs that have changed since the revision `after`, and the names of all if they are others."""
        with self._lock:
            self._look()
            return {
                "revision": self._revision,
                "complete": self._is_complete,
                "differing": self._differing,
                "names": list(self._runs) if self._listed > after else None,
                "runs": [run.shown for run in self._runs.values() if run.changed > after],
            }

    def curves(self, number: int, cursor: str) -> dict[str, Any] | None:
        """Returns the curves of the records behind a cursor, thinned, and the next cursor; None for no run. Another
        cursor than the last answer's, as after a resume that has written the records anew, begins anew.
        """
        with self._lock:
            run = next((run for run in self._runs.values() if run.number == number), None)
        if run is None:
            return None
        stamp, position = _stamp(run.folder, METRICS), _position(cursor)
        begin = position if cursor == _cursor(run.folder, stamp, position) else 0
        follower = Follower(os.path.join(run.folder, METRICS), begin)
        records, is_more, deadline = list[Record](), False, time.monotonic() + self._patience
        for n, record in enumerate(_records(follower), 1):
            if record is not None:
                records.append(record)
            if n == _MOST_LINES or time.monotonic() > deadline:
                is_more = True
                break
        return {
            "cursor": _cursor(run.folder, stamp, follower.position),
            "anew": begin == 0,
            "more": is_more,
            "curves": [to_json(curve) for curve in curves(records)],
        }

    # ------------------------------------------------------------------------------------------------------- a look

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._revision += 1
        self._list_runs()
        self._read_states(now)
        self._read_runs()
        jobs = [run.settings for run in self._runs.values() if run.settings]
        self._differing, comparable = differing_settings(jobs), comparable_settings(jobs)
        for run in self._runs.values():
            shown = run.to_json(self._differing, comparable)
            if shown != run.shown:
                run.shown, run.changed = shown, self._revision
        self._due = time.monotonic() + self._pause * self._is_complete

    def _read_runs(self) -> None:
        """Reads jobs and records, from the run on at which the last look stopped: at least one, and then those that
        `patience` allows."""
        deadline = time.monotonic() + self._patience
        runs = list(self._runs.values())
        begin = next((n for n, run in enumerate(runs) if run.number == self._next), 0)
        self._is_complete = True
        for n, run in enumerate([*runs[begin:], *runs[:begin]]):
            if n and time.monotonic() > deadline:
                self._next, self._is_complete = run.number, False
                break
            run.read_job()
            self._is_complete = run.read_records(deadline) and self._is_complete

    def _list_runs(self) -> None:
        folders = runs_in(self._folder) if os.path.isdir(self._folder) else []
        names = {os.path.relpath(folder, self._folder): folder for folder in folders}
        waiting = self._waiting_trainings(folders)
        runs = {}
        for name in sorted(names | waiting, key=lambda name: name.split(os.sep)):
            run = self._runs.get(name)
            if run is None or run.waiting != waiting.get(name):
                if run is None:
                    self._count += 1
                # A training that begins keeps its number.
                number = run.number if run is not None else self._count
                folder = os.path.join(self._folder, name)
                run = _WatchedRun(folder=folder, name=name, number=number, waiting=waiting.get(name))
            runs[name] = run
        if list(runs) != list(self._runs):
            self._listed = self._revision
        self._runs = runs

    def _waiting_trainings(self, begun: Sequence[str]) -> dict[str, _WaitingTraining]:
        """Returns the trainings that have not begun, of the sweeps of those that have, by name."""
        waiting, sweeps, places = {}, dict[str, tuple[FileStamp | None, Sweep | None]](), set(begun)
        for run in begun:
            folder = os.path.dirname(run)
            if folder in sweeps or run == self._folder:
                continue
            stamp, (last_stamp, sweep) = _stamp(folder, SWEEP), self._sweeps.get(folder, (None, None))
            if stamp != last_stamp:
                sweep = read_sweep(folder)
            sweeps[folder] = stamp, sweep
            if sweep is None:
                continue
            for name, values in sweep.runs:
                place = os.path.join(folder, name)
                if place not in places:
                    settings = tuple(f"{path}={value}" for path, value in zip(sweep.paths, values, strict=True))
                    key = os.path.relpath(place, self._folder)
                    waiting[key] = _WaitingTraining(begun=run, values=settings)
        self._sweeps = sweeps
        return waiting

    def _read_states(self, now: float) -> None:
        """Reads where runs stand: from their files if these have changed, or may be silent; and asks the clusters, at
        times, for the runs that were submitted."""
        due = []
        for run in self._runs.values():
            if run.waiting is not None:
                run.state = RunState(folder=run.folder, state="waiting")
                continue
            stamp = _stamp(run.folder, STATUS)
            if run.state is None or stamp != run.status_stamp:
                run.is_undecided = True
                due.append(run)
            elif run.state.submitted is None and not run.state.has_ended:
                due.append(run)
            run.status_stamp = stamp
        states = run_states([run.folder for run in due], ask_clusters=False, now=time.time())
        for run, state in zip(due, states, strict=True):
            run.state = state
        if now >= self._cluster_due:
            self._cluster_due = now + self._cluster_pause
            self._ask_clusters()

    def _ask_clusters(self) -> None:
        submitted = [run for run in self._runs.values() if run.state is not None and run.state.submitted is not None]
        due = [run for run in submitted if run.state is not None and (run.is_undecided or not run.state.has_ended)]
        for run, state in zip(due, run_states([run.folder for run in due], now=time.time()), strict=True):
            run.state, run.is_undecided = state, False


def _records(follower: Follower) -> Iterator[Record | None]:
    """Yields the records that were added, and None for what is none: another program has written it."""
    for line in follower.parts():
        record = None
        if line is not None:
            with contextlib.suppress(ValueError, RecursionError):  # lists in lists, deeper than they can be copied
                record = finite(parse_record(line.encode()))  # JSON has no word for other numbers
        yield record


def _stamp(folder: str, name: str) -> FileStamp | None:
    try:
        found = os.stat(os.path.join(folder, name))
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _cursor(folder: str, stamp: FileStamp | None, position: int) -> str:
    """Returns where the records of a run are read up to. Later the same position has the same cursor, unless the file
    was written anew: the inode alone does not tell, as the file system gives the one of a removed file to the next.
    """
    try:
        with open_file(os.path.join(folder, METRICS)) as file:
            file.seek(max(position - _COMPARED, 0))
            before = file.read(min(position, _COMPARED))
    except OSError:
        return ""
    return f"{stamp[0]}.{position}.{zlib.crc32(before)}" if stamp else ""


def _position(cursor: str) -> int:
    position = (cursor.split(".") + [""])[1]
    return int(position) if position.isdecimal() and len(position) < 19 else 0
