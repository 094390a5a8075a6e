"""The runs at and below a folder, from their files, as `dslc ui` shows them.

Model: each look at the folder lists its runs, asks where they stand, and reads new jobs and new records for `_PATIENCE`
seconds at most: the next look goes on. What changed has the number of that look, its revision, so that a page asks for
what it does not have yet.

Contract: nothing is written. Runs are known by their paths within the folder: a name that is none of a run has no
curves, whatever file it leads to.

Limits: clusters are asked where a job stands every `_CLUSTER_LOOK` seconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dslc.compiler.ir.codec import to_json
from dslc.launching.run_state import RunState, run_states, runs_in
from dslc.runs.metric_summary import MetricSummary, directions
from dslc.runs.run_figures import curves
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
_MOST_RECORDS = 20_000  # of one answer with curves
FileStamp = tuple[int, int, int]  # inode, bytes, and the time of the last change in nanoseconds


@dataclass(kw_only=True)
class _WatchedRun:
    """A run, what is known of it, and the stamps of the files that say so. `shown` is what the page has of it, since
    the revision `changed`.
    """

    folder: str
    name: str
    number: int
    state: RunState | None = None
    status_stamp: FileStamp | None = None
    job_stamp: FileStamp | None = None
    settings: Mapping[str, SettingValue] = field(default_factory=dict)
    highest: Mapping[str, bool] = field(default_factory=dict)
    summary: MetricSummary = field(default_factory=lambda: MetricSummary({}))
    follower: Follower | None = None
    metrics_stamp: FileStamp | None = None
    is_read: bool = False  # to the end of its records
    shown: dict[str, Any] = field(default_factory=dict)
    changed: int = 0

    def read_job(self) -> None:
        """Reads the job again if its file has changed, as by a training that resumes."""
        stamp = _stamp(self.folder, JOB)
        if stamp == self.job_stamp:
            return
        self.job_stamp = stamp
        job = read_job(self.folder)
        self.settings = job_settings(job) if job is not None else {}
        self.highest = directions(job) if job is not None else {}
        self.follower = None

    def read_records(self, deadline: float) -> bool:
        """Reads the records that were added; returns False if `deadline` comes before their end."""
        stamp = _stamp(self.folder, METRICS)
        if self.follower is None or _is_rewritten(self.metrics_stamp, stamp):
            self.follower, self.summary = Follower(os.path.join(self.folder, METRICS)), MetricSummary(self.highest)
        elif stamp == self.metrics_stamp and self.is_read:
            return True
        self.metrics_stamp, self.is_read = stamp, False
        for n, record in enumerate(_records(self.follower)):
            self.summary.add(record)
            if n % 100 == 99 and time.monotonic() > deadline:
                return False
        self.is_read = True
        return True

    def to_json(self, differing: list[str], comparable: set[str]) -> dict[str, Any]:
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

    def __init__(self, folder: str, pause: float = 0.5) -> None:
        self._folder, self._pause = folder, pause
        self._lock = threading.Lock()
        self._runs: dict[str, _WatchedRun] = {}
        self._differing: list[str] = []
        self._revision, self._listed, self._count = 0, 0, 0
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

    def curves(self, name: str, cursor: str) -> dict[str, Any] | None:
        """Returns the curves of the records behind a cursor, thinned, and the next cursor; None for no run. Another
        cursor than the last answer's, as after a resume that has written the records anew, begins anew.
        """
        with self._lock:
            run = self._runs.get(name)
        if run is None:
            return None
        stamp = _stamp(run.folder, METRICS)
        inode, size = stamp[:2] if stamp else (0, 0)
        known, _, position = cursor.partition(".")
        begin = int(position) if known == str(inode) and position.isdecimal() and int(position[:19]) <= size else 0
        follower = Follower(os.path.join(run.folder, METRICS), begin)
        records = []
        for record in _records(follower):
            records.append(record)
            if len(records) == _MOST_RECORDS:
                break
        return {
            "cursor": f"{inode}.{follower.position}",
            "anew": begin == 0,
            "more": len(records) == _MOST_RECORDS,
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
        deadline = time.monotonic() + _PATIENCE
        self._is_complete = True
        for run in self._runs.values():
            if time.monotonic() > deadline:
                self._is_complete = False
                break
            run.read_job()
            self._is_complete = run.read_records(deadline) and self._is_complete
        jobs = [run.settings for run in self._runs.values() if run.settings]
        self._differing, comparable = differing_settings(jobs), comparable_settings(jobs)
        for run in self._runs.values():
            shown = run.to_json(self._differing, comparable)
            if shown != run.shown:
                run.shown, run.changed = shown, self._revision
        self._due = time.monotonic() + self._pause * self._is_complete

    def _list_runs(self) -> None:
        folders = runs_in(self._folder) if os.path.isdir(self._folder) else []
        names = {os.path.relpath(folder, self._folder): folder for folder in folders}
        if list(names) == list(self._runs):
            return
        runs = {}
        for name, folder in names.items():
            if name not in self._runs:
                self._count += 1
            runs[name] = self._runs.get(name) or _WatchedRun(folder=folder, name=name, number=self._count)
        self._runs, self._listed = runs, self._revision

    def _read_states(self, now: float) -> None:
        asks_cluster = now >= self._cluster_due
        if asks_cluster:
            self._cluster_due = now + _CLUSTER_LOOK
        due = []
        for run in self._runs.values():
            stamp = _stamp(run.folder, STATUS)
            is_asked = run.state is not None and (run.state.submitted is None or asks_cluster)
            if run.state is None or stamp != run.status_stamp or (is_asked and not run.state.has_ended):
                due.append(run)
            run.status_stamp = stamp
        for run, state in zip(due, run_states([run.folder for run in due]), strict=True):
            run.state = state


def _records(follower: Follower) -> Iterator[Record]:
    for line in follower.new():
        try:
            yield finite(parse_record(line.encode()))  # JSON has no word for other numbers
        except ValueError:
            continue  # written by another program


def _stamp(folder: str, name: str) -> FileStamp | None:
    try:
        found = os.stat(os.path.join(folder, name))
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _is_rewritten(before: FileStamp | None, now: FileStamp | None) -> bool:
    """True if a file is another one, and not the same with more at its end."""
    return before is not None and (now is None or now[0] != before[0] or now[1] < before[1])
