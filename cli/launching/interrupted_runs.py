"""Trainings that lost all launchers at once: the same commands, typed again, go on with them.

Model: a training of the same plan whose launcher is gone (it holds the lock as long as it lives), but has not said how
it ended (runtime/process/run_status.py), was cut off. Its next start is one more of its starts: the ranks go on from
its newest checkpoint.

Limits: on a file system without locks, a launcher of another host is taken to be gone when it has been silent for a
minute.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
from collections.abc import Callable

from dslc.compiler.facts.untrusted_files import read_json
from dslc.dsl.bounds import PLAN
from dslc.dsl.plain import plain
from dslc.runs.run_folder import LOCK
from dslc.runtime.process.run_status import ALIVE, read_status, silence

_ATTEMPT = re.compile(r"attempt-(\d{1,9})")


def starts_before(folder: str, plan_of: Callable[[int], str]) -> int:
    """Returns how often the ranks of a training that was cut off in this run directory were started; 0 without one.
    `plan_of` gives the hash of the job's plan on a number of nodes, or "".
    """
    status = read_status(folder)
    if status is None or status.state not in ALIVE or not (silence(folder, status) or _is_free(folder)):
        return 0
    if not is_of_plan(folder, plan_of):
        return 0
    try:
        names = os.listdir(os.path.join(folder, "logs"))
    except OSError:
        return 0
    return max([1, *(int(found.group(1)) for found in map(_ATTEMPT.fullmatch, names) if found)])


def is_of_plan(folder: str, plan_of: Callable[[int], str]) -> bool:
    """True if the run directory holds a training of the job's plan, on as many nodes as it has had last."""
    try:
        plan = read_json(os.path.join(folder, "plan.json"), PLAN.most)
        nodes, told = int(dict(plan["graph"]["nodes"])["nodes"]["count"]), str(plan["hash"])
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return told == plan_of(nodes)


def newest_of(job: str, plan_of: Callable[[int], str]) -> str:
    """Returns the newest run directory in `runs/<job>` if its training was cut off; "" if there is none."""
    runs = os.path.join("runs", job)
    folders = [os.path.join(runs, name) for name in sorted(os.listdir(runs))] if os.path.isdir(runs) else []
    newest = next((folder for folder in reversed(folders) if os.path.exists(os.path.join(folder, LOCK))), "")
    return newest if newest and starts_before(newest, plan_of) else ""


def tell_of_newest(job: str, plan_of: Callable[[int], str]) -> None:
    """Says how to go on with a training that was cut off, where a new one begins, as no folder is named."""
    folder = newest_of(job, plan_of)
    if folder:
        said = f"dslc: the training in {folder} was cut off; with `--out {folder}` the same command goes on with it"
        print(plain(said), file=sys.stderr, flush=True)


def _is_free(folder: str) -> bool:
    """True if nobody holds the lock of a run directory; false also where there are no locks."""
    try:
        with open(os.path.join(folder, LOCK), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)
    except OSError:
        return False
    return True
