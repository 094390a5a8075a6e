"""A training that is started again, by another program's launcher or by the commands that were typed before.

Model: torchrun restarts all processes when one has failed, and says so by a variable (`World.attempt`). The training
goes on in the run directory of the attempt before, from its newest checkpoint, or from the beginning. A run directory
that dslc has named by the time is known by a file in it, which names the launcher's run.

A training of the same plan whose launcher is gone (it holds the lock as long as it lives), but has not said how it
ended (runtime/process/run_status.py), was cut off. The same commands go on with it: their start is one more of its
starts. On a file system without locks, a launcher of another host is taken to be gone when it has been silent for a
minute.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace

from dslc.compiler.facts.untrusted_files import read_json, read_text, replacing
from dslc.dsl.bounds import PLAN
from dslc.dsl.language.calls import Kubernetes
from dslc.dsl.plain import plain
from dslc.jobs.prepare_run import Ready
from dslc.runs.run_folder import LOCK, holder, make_folder
from dslc.runtime.launchers.slurm import SUBMITTED
from dslc.runtime.launchers.world import World
from dslc.runtime.process.run_status import ALIVE, RunStatus, read_status, silence

_LONGEST = 1 << 16  # bytes of the name of a launcher's run
_MARK = ".launcher"  # in a run directory; names that begin with a dot are no files of a run


def resume_after_restart(ready: Ready) -> Ready:
    """Returns the training to run: one that was started again resumes, unless the job names a checkpoint. The launcher
    that has started this process may start failed ranks again.
    """
    if ready.world is not None and not ready.world.again:
        ready = replace(ready, program=replace(ready.program, restarts=0))
    program = ready.program
    if ready.world is None or not ready.world.attempt or program.checkpoint.resume != "none":
        return ready
    return replace(ready, program=replace(program, checkpoint=replace(program.checkpoint, resume="auto")))


def is_in_pod(ready: Ready) -> bool:
    """True of a training that Kubernetes has started: nobody else starts one of such a job."""
    return isinstance(ready.compiled.analysis.job.launch.with_, Kubernetes)


def is_queue_job(ready: Ready) -> bool:
    """True in a job that `dslc submit` has handed over."""
    return SUBMITTED in os.environ or is_in_pod(ready)


def was_stopped_by_user(ready: Ready, out: str | None) -> bool:
    """True if Kubernetes has started a training again that `dslc stop` has ended, which has no other way to say so."""
    told = _pod_status(ready, out)
    return told.state == "stopped" and told.asked == "dslc stop"


def is_training_done(ready: Ready, out: str | None) -> bool:
    """True in a pod that starts when the others have ended the training and nobody writes any more."""
    if out is None or _pod_status(ready, out).state != "done" or holder(out):
        return False
    return is_of_plan(out, lambda nodes: plan_on(ready, nodes))


def _pod_status(ready: Ready, out: str | None) -> RunStatus:
    told = read_status(out) if out is not None and is_in_pod(ready) else None
    return told or RunStatus(state="")


def plan_on(ready: Ready, nodes: int) -> str:
    """Returns the hash of the plan on `nodes` nodes; "" if the job does not train on them."""
    if not ready.counts:
        return ready.program.plan_hash if nodes == ready.compiled.plan.topology.nodes else ""
    return ready.on(nodes).program.plan_hash if nodes in ready.counts else ""


def folder_of(ready: Ready, out: str | None) -> str:
    """Returns the run directory: a new one, or the previous attempt's. Raises FolderInUseError."""
    world = ready.world
    if world is None or not world.run or out is not None:
        return make_folder(ready.program, out)
    folder = _newest_run(os.path.join("runs", ready.program.job), world) if world.attempt else ""
    if folder:
        return folder
    folder = make_folder(ready.program, None)
    with replacing(os.path.join(folder, _MARK)) as file:
        file.write(world.run)
    return folder


def _newest_run(runs: str, world: World) -> str:
    for name in sorted(os.listdir(runs), reverse=True) if os.path.isdir(runs) else ():
        folder = os.path.join(runs, name)
        with contextlib.suppress(OSError, ValueError):  # of another launcher, which leaves no such file
            if read_text(os.path.join(folder, _MARK), _LONGEST) == world.run:
                return os.path.abspath(folder)
    return ""


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
