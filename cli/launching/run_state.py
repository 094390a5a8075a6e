"""Finds the state of runs from the files in their folders: `dslc status` and `dslc stop`.

Model: a folder is a run directory, or holds some. The launcher writes `status.json` (runtime/process/run_status.py),
and `dslc submit` names the job of a cluster in `submitted.json`. SLURM is asked by `squeue` and Kubernetes by
`kubectl`, which not each machine has that sees the run directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dslc.compiler.facts.untrusted_files import open_file, parse_json, replacing
from dslc.compiler.ir.codec import from_json
from dslc.compiler.ir.number_text import step_text
from dslc.runtime.process.run_status import ALIVE, RunStatus, read_status, silence

NAME = "submitted.json"
_PATIENCE = 30.0  # seconds that a command of the cluster may take
_PHASES = ("Pending", "Running", "Failed", "Unknown", "Succeeded")  # those furthest from an end well first
_OF_ONE = ("Running", "Pending", "Succeeded", "Unknown", "Failed")  # where one pod is enough
_MOST = 1 << 20  # bytes of a file that is read


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job that was handed over: `job` is its cluster's name for it, "12", or "12_0" of an array; `script` is the file
    that was handed over. In Kubernetes `space` is the namespace, and `kind` a job or a jobset; of an `elastic` one the
    pods that run train without the others.
    """

    cluster: str  # "slurm" or "kubernetes"
    job: str
    script: str
    space: str = ""
    kind: str = "job"
    elastic: bool = False


def write_submission(folder: str, made: Submission) -> None:
    with replacing(os.path.join(folder, NAME)) as file:
        json.dump(asdict(made), file)
        file.write("\n")


def read_submission(folder: str) -> Submission | None:
    """Returns the job that runs a folder; None if it was not submitted, or the file could not come from `dslc submit`.
    Its words become arguments of `scancel` and `kubectl`, so each must be a plain name.
    """
    return _read_submission(folder)[0]


def is_own_submission(folder: str, submission: Submission) -> bool:
    """True if the user of this process wrote `submission`: whoever can write to the folder can name any job there."""
    return _read_submission(folder) == (submission, os.geteuid())


def _read_submission(folder: str) -> tuple[Submission | None, int]:
    """Returns the submission in a folder, None if there is no valid one, and the user who wrote it."""
    try:
        with open_file(os.path.join(folder, NAME)) as file:
            owner = os.fstat(file.fileno()).st_uid
            found = from_json(Submission, parse_json(file.read(_MOST).decode()))
    except (OSError, ValueError):
        return None, -1
    return (found if _is_plain(found) else None), owner


# A job of SLURM; the names that Kubernetes takes for a resource and for a namespace.
_SLURM_JOB = re.compile(r"[0-9]{1,12}(_[0-9]{1,12})?")
_RESOURCE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def _is_plain(found: Submission) -> bool:
    if found.kind not in ("job", "jobset") or not found.script.isprintable():
        return False
    if found.cluster == "slurm":
        return bool(_SLURM_JOB.fullmatch(found.job)) and not found.space
    names = [found.job, found.space] if found.space else [found.job]
    return found.cluster == "kubernetes" and all(map(_RESOURCE.fullmatch, names))


def command(words: Sequence[str]) -> str | None:
    return _run(words)[0]


def _run(words: Sequence[str]) -> tuple[str | None, str]:
    """Returns the output of a command of the cluster, None if it is missing or fails; and its standard error."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        told = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE)
        return told.stdout if told.returncode == 0 else None, told.stderr
    return None, ""


class Queue:
    """SLURM's states of jobs: `known` is false where nobody can be asked."""

    def __init__(self, jobs: Iterable[str]) -> None:
        self._states: dict[str, tuple[str, str]] = {}
        self.known = True
        for number in sorted({job.partition("_")[0] for job in jobs}):
            told, trouble = _run(["squeue", "--noheader", "--array", f"--jobs={number}", "--format=%i|%T|%r"])
            if told is None:
                self.known = self.known and "Invalid job id" in trouble  # it has forgotten a job that ended long ago
                continue
            for line in told.splitlines():
                job, state, reason = (line.split("|") + ["", ""])[:3]
                self._states[job.strip()] = state, reason

    def state(self, job: str) -> tuple[str, str]:
        """Returns the state of a job, "PENDING", and its reason, "Resources"; ("", "") if it is not queued."""
        return self._states.get(job, ("", ""))


def pods_of(made: Submission) -> tuple[str, str] | None:
    """Returns the phase of the pods of a job in Kubernetes, and why they are in it. If phases differ, the phase
    furthest from a good end counts; in an elastic job the phase nearest to it. ("", "") without pods, None where
    `kubectl` gives no answer.
    """
    space = ["--namespace", made.space] if made.space else []
    told = command(["kubectl", "get", "pods", "--selector", f"dslc-run={made.job}", "--output", "json", *space])
    if told is None:
        return None
    found, order = dict[str, str](), _OF_ONE if made.elastic else _PHASES
    with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError):
        for pod in parse_json(told)["items"]:
            status = pod["status"]
            found.setdefault(str(status["phase"]), _reason(status))
    return next(((phase, found[phase]) for phase in order if phase in found), ("", ""))


def _reason(status: Mapping[str, Any]) -> str:
    waiting = [each.get("state", {}).get("waiting", {}) for each in status.get("containerStatuses", [])]
    refused = [each for each in status.get("conditions", []) if each.get("status") == "False"]
    for each in (*waiting, status, *refused):
        if each.get("reason"):
            return ": ".join(str(each[name]) for name in ("reason", "message") if each.get(name))
    return ""


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
        return f"{self._words()}{self._after_restarts()}{self._numbers()}{self._step_time()}"

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

    def _step_time(self) -> str:
        known = self.expected and self.step_time and self.state in ("running", "done", "stopped")
        return f", {step_text(self.step_time, self.expected)}" if known else ""


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
    """Returns the run directories below a folder; none below one that cannot be listed."""
    try:
        names = sorted(os.listdir(folder)) if deep else []
    except OSError:
        return []
    found = []
    for name in names:
        inner = os.path.join(folder, name)
        if not name.startswith(".") and os.path.isdir(inner):
            found += [inner] if _is_run(inner) else _runs_below(inner, deep - 1)
    return found


def _is_run(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in _RUN)


def run_states(folders: Sequence[str], *, ask_clusters: bool = True, now: float | None = None) -> list[RunState]:
    """Returns where each of the runs stands; SLURM is asked once for each of its jobs. Without `ask_clusters` a run
    that was submitted stands where its launcher has said last. With `now`, the time by this machine's clock, nothing is
    written to find out whether a launcher of another host is overdue.
    """
    submitted = {folder: read_submission(folder) for folder in folders}
    told = {folder: read_status(folder) for folder in folders}
    jobs = [
        each.job
        for folder, each in submitted.items()
        if each is not None and each.cluster == "slurm" and not _has_said_all(told[folder])
    ]
    queue = Queue(jobs) if ask_clusters else None
    return [_run_state(folder, told[folder], submitted[folder], queue, now) for folder in folders]


def _has_said_all(status: RunStatus | None) -> bool:
    """True if nothing follows any more, also where the script of `dslc submit` may start the ranks again."""
    return status is not None and (status.state == "done" or status.asked == "dslc stop")


def _run_state(
    folder: str, told: RunStatus | None, submitted: Submission | None, queue: Queue | None, now: float | None
) -> RunState:
    if told is None and submitted is None:
        ended = os.path.exists(os.path.join(folder, "report.json"))
        why = "done, by an older dslc" if ended else "an older dslc has run it, and has not said how it ended"
        return RunState(folder=folder, state="unknown", message=why)
    told = told or RunStatus(state="waiting")
    found = RunState(**vars(told), folder=folder, submitted=submitted)
    if submitted is None:
        silent = silence(folder, told, now)
        return _with_state(found, "gone", silent) if silent else found
    if queue is None:
        return found
    if told is not None and told.state not in (*ALIVE, "waiting"):
        undecided = queue.state(submitted.job)[0] == "RUNNING" and not _has_said_all(told)
        return _with_state(found, "restarting", "") if undecided else found
    silent = silence(folder, told, now)
    if not silent and told.state != "waiting":
        return found
    if submitted.cluster == "slurm":
        return _state_in_queue(found, submitted, queue, silent)
    return _state_of_pods(found, submitted, silent)


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
