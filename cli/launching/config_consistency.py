"""Lists what the launchers of a training must have alike before a rank starts: versions, the job and its files, the
plan.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING

from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.plan_facts import facts_of
from dslc.dsl.language.job import python_calls
from dslc.jobs.prepare_run import Ready
from dslc.launching.restart_detection import is_of_plan
from dslc.runtime.checkpoint import files
from dslc.runtime.hosts.launcher_group import LauncherGroup, shared
from dslc.runtime.hosts.rendezvous_address import RendezvousError
from dslc.terminal.version import __version__

if TYPE_CHECKING:
    from dslc.runtime.measure.report import RunReport
    from dslc.runtime.process.failure import Outcome

CHOSEN_PLAN = "the plan that `auto` chose"
ANSWER = 60.0  # seconds that a host may take to answer about a folder
Then = Callable[["Outcome", "RunReport | None", str], int]  # with the report and the run directory: the exit status


def share_checkpoints(ready: Ready, group: LauncherGroup) -> None:
    if not ready.program.checkpoint.is_enabled:
        return
    place = files.folder_of(ready.program, group.folder)
    if group.is_coordinator:
        os.makedirs(place, exist_ok=True)
    _, blind = shared(group, place, ANSWER)
    if blind:
        hosts = list(dict.fromkeys(group.machines[node] for node in blind))
        does = "do not see" if len(hosts) > 1 else "does not see"
        raise RendezvousError(
            f"{' and '.join(hosts)} {does} {place} of {group.machines[0]}: checkpoints need a folder that all hosts "
            "share, which `checkpoint.dir` or --out names"
        )


def is_other_folder(out: str | None, folder: str) -> bool:
    return out is not None and os.path.realpath(os.path.expanduser(out)) != os.path.realpath(folder)


def check_folder(folder: str, out: str | None, plan_of: Callable[[int], str]) -> None:
    """Raises RendezvousError if other hosts name another run directory than `--out`, or without `--out` one that does
    not belong to a training of the job: this launcher would write there.
    """
    if is_other_folder(out, folder):
        raise RendezvousError(f"the other hosts train in {folder}, and --out names {out}")
    if out is None and not is_of_plan(folder, plan_of):
        raise RendezvousError(f"the other hosts train in {folder}, where is no training of this job: name it by --out")


def facts_compared(ready: Ready, out: str | None) -> Iterator[tuple[str, str]]:
    """Yields the facts that must be alike on all hosts, causes before consequences."""
    analysis = ready.compiled.analysis
    yield "the version of dslc", __version__
    yield "the version of torch", version("torch")
    yield "the version of Python", platform.python_version()
    for name, text in ready.loaded.texts.items():
        yield f"the file {name}", _digest(text.encode())
    for call in python_calls(analysis.job):
        module = call.function.partition(":")[0]
        path = os.path.join(analysis.job.folder, *module.split(".")) + ".py"
        if os.path.isfile(path):
            with open(path, "rb") as file:
                yield f"the file {os.path.relpath(path, analysis.job.folder)}", _digest(file.read())
    for fact in facts_of(analysis).files:
        yield f"the file {fact.path}", f"{fact.size:,} bytes, {fact.digest[:8]}"
    machine = analysis.facts.machine
    if analysis.layout.device == "cuda" and machine is not None:
        yield "the GPUs", ", ".join(f"{size / 2**30:.0f} GiB" for size in machine.gpus) or "none"
    if analysis.layout.hardware.memory is not None:
        yield "the memory of a device", byte_text(analysis.layout.hardware.memory)
    if analysis.choice is not None and analysis.choice.plan is not None:
        yield CHOSEN_PLAN, analysis.choice.plan.text()
    if ready.world is None:  # else one command has started all
        yield "--out", _folder_compared(ready, out)
    yield "--set", " ".join(ready.loaded.settings) or "nothing"  # which is told if it makes the plans differ
    if ready.counts:
        yield "the counts of nodes that the job trains on", ", ".join(map(str, ready.counts))
    else:
        yield "the plan", ready.program.plan_hash


def _folder_compared(ready: Ready, out: str | None) -> str:
    """Returns the path of the run directory if all hosts write there, else the path as typed."""
    if out is None:
        return "nothing"
    is_shared = ready.counts or ready.program.checkpoint.is_enabled
    return os.path.abspath(os.path.expanduser(out)) if is_shared else out


def remedy(fact: str) -> str:
    if fact.startswith("the version of "):
        return f"install the same {fact.removeprefix('the version of ')} on all hosts"
    if fact.startswith("the file "):
        return f"copy {fact.removeprefix('the file ')} from one to the others, or keep it in a folder that all see"
    if fact == "the memory of a device":
        return "name the same `devices.catalogue` on all hosts"
    if fact == CHOSEN_PLAN:
        return "give all hosts the same catalogue or calibration, or write the plan by `dslc choose JOB -o FILE`"
    if fact == "the GPUs":
        return "hosts with the same GPUs, or a `devices.gpus` that names those that are alike"
    return "type the same command on all hosts"


def _digest(content: bytes) -> str:
    return f"{len(content):,} bytes, {hashlib.sha256(content).hexdigest()[:8]}"
