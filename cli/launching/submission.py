"""The job of a cluster that runs a run directory: `submitted.json` there, and the cluster's word on the job.

Limits: SLURM is asked by `squeue` and Kubernetes by `kubectl`, which not each machine has that sees the run directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
    with open(os.path.join(folder, NAME), "w", encoding="utf-8") as file:
        json.dump(asdict(made), file)
        file.write("\n")


def read_submission(folder: str) -> Submission | None:
    """Returns the job that runs a folder; None if it was not submitted."""
    try:
        with open(os.path.join(folder, NAME), encoding="utf-8") as file:
            told = json.loads(file.read(_MOST))
        found = Submission(**told)
    except (OSError, ValueError, TypeError):
        return None
    kinds = {name: bool if name == "elastic" else str for name in asdict(found)}
    return found if all(isinstance(value, kinds[name]) for name, value in asdict(found).items()) else None


def command(words: Sequence[str]) -> str | None:
    """Returns the output of a command of the cluster; None if it is not there, or fails."""
    return _run(words)[0]


def _run(words: Sequence[str]) -> tuple[str | None, str]:
    """Returns the output of a command, None if it is not there or fails, and what it says of its errors."""
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
        """Returns the state of a job, "PENDING", and the reason for it, "Resources"; ("", "") if it is not queued."""
        return self._states.get(job, ("", ""))


def pods_of(made: Submission) -> tuple[str, str] | None:
    """Returns the phase of the pods of a job in Kubernetes, and why they are in it: that of those furthest from an end
    well, or nearest in an elastic job; ("", "") if there are none, None where nobody can be asked.
    """
    space = ["--namespace", made.space] if made.space else []
    told = command(["kubectl", "get", "pods", "--selector", f"dslc-run={made.job}", "--output", "json", *space])
    if told is None:
        return None
    found, order = dict[str, str](), _OF_ONE if made.elastic else _PHASES
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        for pod in json.loads(told)["items"]:
            status = pod["status"]
            found.setdefault(str(status["phase"]), _reason(status))
    return next(((phase, found[phase]) for phase in order if phase in found), ("", ""))


def _reason(status: Mapping[str, Any]) -> str:
    """Returns why a pod waits or has failed, in Kubernetes' words; "" if it does not say."""
    waiting = [each.get("state", {}).get("waiting", {}) for each in status.get("containerStatuses", [])]
    refused = [each for each in status.get("conditions", []) if each.get("status") == "False"]
    for each in (*waiting, status, *refused):
        if each.get("reason"):
            return ": ".join(str(each[name]) for name in ("reason", "message") if each.get(name))
    return ""
