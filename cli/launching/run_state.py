"""Finds the state of runs from the files in their folders: `dslc status` and `dslc stop`.

Model: a folder is a run directory, or holds some. The launcher writes `status.json` (runtime/process/run_status.py),
and `dslc submit` names the job of a cluster, which is asked where it can be.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dslc.launching.submission import Queue, Submission, pods_of, read_submission
from dslc.runtime.process.run_status import ALIVE, RunStatus, read_status, silence

_DEEP = 3  # folders between the one named and a run directory: runs/<job>/<time>/<values of a sweep>
ENDED = ("done", "stopped", "failed", "gone")
_RUN = ("status.json", "submitted.json", "program.json")  # one of them is in each run directory
_ASKED = {"": "", "dslc stop": ", by `dslc stop`", "SIGINT": ", by Ctrl-C"}


@dataclass(frozen=True, kw_only=True)
class RunState(RunStatus):
    """The state of one run: a state of run_status.py; `gone` if its launcher ended without a word; `unknown` for a run
    of an older dslc. `message` says why it failed, or what a cluster says of a job that waits.
    """

    folder: str
    submitted: Submission | None = None

    @property
    def why(self) -> str:
        return self.message

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    def line(self) -> str:
        return f"{self._words()}{self._after_restarts()}{self._numbers()}"

    def _words(self) -> str:
        at = f"step {self.step} of {self.steps}" if self.steps else f"step {self.step}"
        match self.state:
            case "waiting":
                gone = f", at {at}" if self.step else ""
                return f"waiting{self._job()}{gone}{self._reason_text()}"
            case "starting":
                return f"starting{self._job()}" + (f", from {at}" if self.step else "")
            case "running" | "restarting":
                return f"{self.state}{self._job()} at {at}"
            case "done":
                return f"done after {self.step} steps" + (f": {self.why}" if self.why else "")
            case "stopped":
                return f"stopped after {at}{_ASKED.get(self.asked, f', by {self.asked}')}"
            case "failed":
                return f"failed at {at}: {_first_line(self.why)}"
            case "gone":
                return f"ended without a word at {at}: {self.why}"
        return self.why

    def _job(self) -> str:
        if self.submitted is None:
            return ""
        where = "SLURM" if self.submitted.cluster == "slurm" else "Kubernetes"
        return f" in {where} as job {self.submitted.job}"

    def _reason_text(self) -> str:
        return f" ({self.why})" if self.why else ""

    def _after_restarts(self) -> str:
        many = f", restarted {self.restarts} times" if self.restarts > 1 else ", restarted once"
        return many if self.restarts and self.state in ("running", "restarting", "done") else ""

    def _numbers(self) -> str:
        shown = [f"{name} {value:.4g}" for name, value in self.metrics.items() if name != "lr"]
        return ", " + ", ".join(shown) if shown and self.state in ("running", "done", "stopped") else ""


def _first_line(message: str) -> str:
    """Returns what a failure's message says first, without the frames of a traceback."""
    head, *rest = message.splitlines() or [""]
    told = [line.strip() for line in rest if line.startswith("  ") and not line.startswith("  File ")]
    return f"{head}: {told[-1]}" if told else head


def runs_in(folder: str) -> list[str]:
    """Returns the run directories at or below a folder, by name."""
    if _is_run(folder):
        return [folder]
    return [run for run in _runs_below(folder, _DEEP) if _is_run(run)]


def _runs_below(folder: str, deep: int) -> list[str]:
    found = []
    for name in sorted(os.listdir(folder)) if deep else ():
        inner = os.path.join(folder, name)
        if not name.startswith(".") and os.path.isdir(inner):
            found += [inner] if _is_run(inner) else _runs_below(inner, deep - 1)
    return found


def _is_run(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in _RUN)


def run_states(folders: Sequence[str]) -> list[RunState]:
    """Returns where each of the runs stands; SLURM is asked once for each of its jobs."""
    submitted = {folder: read_submission(folder) for folder in folders}
    told = {folder: read_status(folder) for folder in folders}
    jobs = [
        each.job
        for folder, each in submitted.items()
        if each is not None and each.cluster == "slurm" and not _has_said_all(told[folder])
    ]
    queue = Queue(jobs)
    return [_run_state(folder, told[folder], submitted[folder], queue) for folder in folders]


def _has_ended(status: RunStatus | None) -> bool:
    return status is not None and status.state not in (*ALIVE, "waiting")


def _has_said_all(status: RunStatus | None) -> bool:
    """True if nothing follows any more, also where the script of `dslc submit` may start the ranks again."""
    return status is not None and (status.state == "done" or status.asked == "dslc stop")


def _run_state(folder: str, told: RunStatus | None, submitted: Submission | None, queue: Queue) -> RunState:
    if told is None and submitted is None:
        ended = os.path.exists(os.path.join(folder, "report.json"))
        why = "done, by an older dslc" if ended else "an older dslc has run it, and has not said how it ended"
        return RunState(folder=folder, state="unknown", message=why)
    told = told or RunStatus(state="waiting")
    found = RunState(**vars(told), folder=folder, submitted=submitted)
    if _has_ended(told):
        undecided = submitted is not None and queue.state(submitted.job)[0] == "RUNNING" and not _has_said_all(told)
        return _with_state(found, "restarting", "") if undecided else found
    silent = silence(folder, told)
    if submitted is not None and submitted.cluster == "slurm" and (silent or told.state == "waiting"):
        return _state_in_queue(found, submitted, queue, silent)
    if submitted is not None and submitted.cluster == "kubernetes" and (silent or told.state == "waiting"):
        return _state_of_pods(found, submitted, silent)
    return _with_state(found, "gone", silent) if silent else found


def _state_in_queue(found: RunState, submitted: Submission, queue: Queue, silent: str) -> RunState:
    """Returns where a run stands that no launcher speaks for, by SLURM's word on its job."""
    state, reason = queue.state(submitted.job)
    if not queue.known:
        return _with_state(found, "gone", silent) if silent else found
    if state in ("RUNNING", "CONFIGURING", "COMPLETING"):
        return _with_state(found, "starting", "")
    if state:
        return _with_state(found, "waiting", state.lower() if reason in ("", "None") else reason)
    log = os.path.join(os.path.dirname(submitted.script), "slurm*.out")
    why = silent or f"SLURM has job {submitted.job} no more, and it left no word"
    return _with_state(found, "gone", f"{why}; see {log}")


def _state_of_pods(found: RunState, submitted: Submission, silent: str) -> RunState:
    told = pods_of(submitted)
    if told is None:
        return _with_state(found, "gone", silent) if silent else found
    phase, reason = told
    if phase == "Running":
        return _with_state(found, "starting", "")
    if phase in ("", "Pending") and not silent:
        return _with_state(found, "waiting", reason or phase.lower())
    if phase == "Pending":
        return _with_state(found, "restarting", "")
    why = silent or f"its pods have ended ({phase}), and left no word"
    return _with_state(found, "gone", f"{why}: {reason}" if reason else why)


def _with_state(found: RunState, state: str, why: str) -> RunState:
    return replace(found, state=state, message=why)
