"""A training that another program's launcher has started again, as torchrun restarts all processes when one has failed.

Model: the launcher says so by a variable (`World.attempt`). The training goes on in the run directory of the attempt
before, from its newest checkpoint, or from the beginning. A run directory that dslc has named by the time is known by a
file in it, which names the launcher's run.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from dslc.compiler.facts.untrusted_files import read_text, replacing
from dslc.dsl.language.calls import Kubernetes
from dslc.jobs.prepare_run import Ready
from dslc.launching.interrupted_runs import is_of_plan
from dslc.runs.run_folder import holder, make_folder
from dslc.runtime.launchers.world import World
from dslc.runtime.process.run_status import RunStatus, read_status

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


def was_stopped_by_user(ready: Ready, out: str | None) -> bool:
    """True if Kubernetes has started a training again that `dslc stop` has ended, which has no other way to say so."""
    told = _pod_status(ready, out)
    return told.state == "stopped" and told.asked == "dslc stop"


def is_training_done(ready: Ready, out: str | None) -> bool:
    """True in a pod that finds room, or is made again, when the others have ended the training and nobody writes any
    more.
    """
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
    """Returns the newest run directory of the launcher's run; "" if there is none."""
    for name in sorted(os.listdir(runs), reverse=True) if os.path.isdir(runs) else ():
        folder = os.path.join(runs, name)
        with contextlib.suppress(OSError, ValueError):  # of another launcher, which leaves no such file
            if read_text(os.path.join(folder, _MARK), _LONGEST) == world.run:
                return os.path.abspath(folder)
    return ""
