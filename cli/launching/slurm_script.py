"""The script of `dslc submit` for SLURM: what a job asks of the cluster, from its plan.

Model: one task a node, whose agent forks the ranks of that node. The script starts them by `srun`, and asks
slurm_requeue.py what follows. The warning before the time limit comes early enough for `_STEPS` steps and a checkpoint,
as the plan predicts them. An elastic job takes as many nodes as SLURM has for it, and uses as many of them as it trains
on.

Limits: the host's memory beside GPUs, and the speed of the disk, are supposed; `options` say otherwise.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Sequence

from dslc.compiler.compile import Compiled
from dslc.dsl.language.calls import Slurm
from dslc.jobs.prepare_run import Ready

_STEPS = 4  # steps that pass before all nodes stop: they agree on one that no rank has reached
_DISK = 200e6  # bytes/s of a checkpoint
_SLACK = 60  # seconds: SLURM looks at time limits so often
_UNKNOWN = 240  # seconds of steps and a checkpoint where the plan predicts neither
_PROCESS = 3 << 28  # bytes of a rank's process beside what the plan counts (0.75 GiB)
_BESIDE_GPU = 8 << 30  # bytes of the host's memory for a rank on a GPU: CUDA, and pinned batches
_LAUNCHER = 1 << 30


def slurm_script(runs: Sequence[Ready], folders: Sequence[str], folder: str, job: str) -> str:
    """Returns the script for trainings that differ only in the values of a sweep, each with its folder."""
    ready = runs[0]
    launch = ready.compiled.analysis.job.launch
    restarts, again = launch.restarts, all(each.program.checkpoint.is_enabled for each in runs)
    start = _start(ready.compiled)
    lines = [f"#SBATCH {option}" for option in _options(runs, folder, job, again=again)]
    places = [shlex.quote(place) for place in folders]
    if len(folders) == 1:
        lines += ["", f"run={places[0]}"]
    else:
        lines += ["", "runs=(", *(f"  {place}" for place in places), ")", 'run="${runs[$SLURM_ARRAY_TASK_ID]}"']
    python = shlex.join([sys.executable, "-P", "-m"])
    nodes, counts = "", ready.compiled.plan.topology.node_counts
    if len(counts) > 1:
        nodes = '--nodes "$nodes" '
        lines += [
            f"for count in {' '.join(map(str, counts))}; do",
            '  if [ "$count" -le "$SLURM_JOB_NUM_NODES" ]; then nodes=$count; fi',
            "done",
        ]
    lines += [
        'export DSLC_SUBMITTED="$run"',
        "again=0",
        'while [ "$again" -eq 0 ]; do',
        f'  srun {nodes}{shlex.join(start)} {python} dslc run "$run/job.plt" --out "$run"',
        "  status=$?",
        f'  {python} dslc.launching.slurm_requeue "$run" "$status" --restarts {restarts}'
        + (" --requeue" if again else ""),
        "  again=$?",
        "done",
        'exit "$status"',
    ]
    return "\n".join(["#!/bin/bash", *lines]) + "\n"


def warning_seconds(runs: Sequence[Ready]) -> int:
    """Returns how long before the time limit the ranks are warned: the time of some steps and a checkpoint."""
    return max(_warning(each.compiled) for each in runs)


def _warning(compiled: Compiled) -> int:
    plan = compiled.plan
    if plan.step_time is None:
        return _UNKNOWN
    state = sum(rank.memory.parameters + rank.memory.optimizer for rank in plan.ranks if rank.memory is not None)
    return _SLACK + math.ceil(_STEPS * plan.step_time + state / _DISK)


def _options(runs: Sequence[Ready], folder: str, job: str, *, again: bool) -> list[str]:
    compiled = runs[0].compiled
    call = compiled.analysis.job.launch.with_
    assert isinstance(call, Slurm)
    array, counts = len(runs) > 1, compiled.plan.topology.node_counts
    start = dict(option.split("=", 1) for option in _start(compiled))
    if len(counts) > 1:
        del start["--ntasks-per-node"]  # with it SLURM gives the fewest nodes of a range, without it the most it has
    said = {
        "--job-name": job,
        "--nodes": str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}",
        **start,
        "--gpus-per-node": _gpus(compiled),
        "--mem": f"{max(host_memory(each.compiled) for each in runs)}M",
        "--partition": call.partition or "",
        "--account": call.account or "",
        "--time": _time(call.time) if call.time is not None else "",
        "--array": f"0-{len(runs) - 1}" if array else "",
        "--signal": f"USR1@{warning_seconds(runs)}",
        "--open-mode": "append",
        "--output": os.path.join(_escaped(folder), "slurm-%a.out" if array else "slurm.out"),
        "--chdir": os.getcwd(),
    }
    own = {option.replace("=", " ").strip().partition(" ")[0] for option in call.options}
    lines = [f"{name}={shlex.quote(value)}" for name, value in said.items() if value and name not in own]
    return [*lines, "--requeue" if again else "--no-requeue", *call.options]


def _start(compiled: Compiled) -> list[str]:
    return ["--ntasks-per-node=1", f"--cpus-per-task={cores(compiled)}"]


def cores(compiled: Compiled) -> int:
    """Returns the cores that the ranks of a node need: one for each, and for each of its workers."""
    return compiled.plan.topology.processes * (1 + compiled.analysis.job.data.workers)


def _gpus(compiled: Compiled) -> str:
    topology = compiled.plan.topology
    return str(topology.processes) if topology.device == "cuda" else ""


def host_memory(compiled: Compiled) -> int:
    """Returns the MiB of the host's memory that the ranks of a node need."""
    topology = compiled.plan.topology
    if topology.device == "cuda":
        each = _BESIDE_GPU
    else:
        each = max((cost.memory.peak for cost in compiled.analysis.costs), default=4 << 30) + _PROCESS
    return math.ceil((topology.processes * each + _LAUNCHER) / 2**20)


def _time(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def _escaped(folder: str) -> str:
    return folder.replace("%", "%%")
