"""The job of a cluster that runs a run directory: `submitted.json` there, and the cluster's word on the job.

Limits: SLURM is asked by `squeue` and Kubernetes by `kubectl`, which not each machine has that sees the run directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dslc.compiler.facts.untrusted_files import open_file, parse_json, replacing
from dslc.compiler.ir.codec import from_json

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
    """Returns the output of a command of the cluster; None if it is not there, or fails."""
    return _run(words)[0]


def _run(words: Sequence[str]) -> tuple[str | None, str]:
    """Returns the output of a command, None if the command is missing or fails; and its standard error."""
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
    """Returns the phase of the pods of a job in Kubernetes, and why they are in it. If phases differ, that of the pods
    furthest from a good end counts, or nearest to it in an elastic job. ("", "") without pods, None where `kubectl`
    gives no answer.
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
    """Returns why a pod waits or has failed, in Kubernetes' words; "" if it does not say."""
    waiting = [each.get("state", {}).get("waiting", {}) for each in status.get("containerStatuses", [])]
    refused = [each for each in status.get("conditions", []) if each.get("status") == "False"]
    for each in (*waiting, status, *refused):
        if each.get("reason"):
            return ": ".join(str(each[name]) for name in ("reason", "message") if each.get(name))
    return ""
