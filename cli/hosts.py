"""Trains with others: with the launchers of several hosts, each of which runs the same command, or with the processes
that torchrun or another launcher has started, one for each rank. This is one of them.

Model: every one compiles the job by itself. They meet (runtime/hosts/company.py) and compare what each knows
of the job: versions, the texts of the job, the modules and the data that it names, the plan, GPUs. The keeper's run
directory has everything; a host that sees the same folder writes the logs of its ranks there, another one into a run
directory of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from dslc.compiler.plan_facts import facts_of
from dslc.dsl.language.job import python_calls
from dslc.dsl.plain import plain
from dslc.restarted import folder_of
from dslc.run_folder import make_folder, refuse_run
from dslc.runs import Ready, launch, train
from dslc.runtime.launchers.known import LAUNCHERS
from dslc.version import __version__

if TYPE_CHECKING:
    from dslc.runtime.hosts.company import Company
    from dslc.runtime.hosts.doors import Door
    from dslc.runtime.hosts.meetings import Meeting
    from dslc.runtime.launchers.world import World
    from dslc.runtime.process.failure import Outcome

_ANSWER = 60.0  # seconds that a host may take to answer about a folder
_FOR_PROCESSES = "the job takes {} processes, which one command starts"


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """What the command says of where processes meet and write; the same for all processes of a launcher."""

    job: str
    rendezvous: str = ""
    out: str | None = None

    @property
    def beside(self) -> str:
        """The beginning of the path of a file beside the run directory."""
        folder = os.path.dirname(os.path.abspath(self.out)) if self.out is not None else os.path.abspath("runs")
        return os.path.join(folder, f".{os.path.splitext(os.path.basename(self.job))[0]}")


Then = Callable[["Outcome", dict[str, Any] | None, str], int]


def train_with_others(ready: Ready, where: Whereabouts, then: Then) -> int:
    """Trains with those that come to the rendezvous, or that the launcher has started, and returns the exit status that
    `then` gives for the outcome, the report (on the keeper) and the run directory. Raises NotMet, and Occupied.

    The keeper ends last: mpirun ends the others soon after one process has ended with an error.
    """
    from dslc.runtime.hosts.company import meet
    from dslc.runtime.hosts.meetings import Meeting
    from dslc.runtime.process.lifetime import end_with

    world = ready.world
    meeting = Meeting(
        rendezvous=where.rendezvous,
        nodes=ready.compiled.plan.topology.nodes,
        facts=dict(_facts(ready)),
        timeout=ready.program.timeout,
        processes=ready.program.processes,
        say=lambda text: print(plain(text), file=sys.stderr, flush=True) if world is None or world.speaks else None,
        again=ready.program.restarts > 0 and world is None,
    )
    if world is not None:
        end_with(os.getppid())  # the launcher
        meeting = _of_processes(meeting, world, where, ready.program.world_size)
    company = meet(meeting)
    try:
        status = then(*_train(ready, company, where.out))
        company.let_end()
        return status
    finally:
        company.close()


def tell_fault(world: World, where: Whereabouts, fault: str) -> None:
    """Tells the other processes of a launcher why this one cannot train; all of them then leave."""
    from dslc.runtime.hosts.company import meet
    from dslc.runtime.hosts.doors import NotMet
    from dslc.runtime.hosts.meetings import Meeting

    meeting = Meeting(rendezvous=where.rendezvous, nodes=world.size, facts={}, timeout=_ANSWER, fault=fault)
    with contextlib.suppress(NotMet):
        meet(_of_processes(meeting, world, where, world.size)).close()


def _of_processes(meeting: Meeting, world: World, where: Whereabouts, ranks: int) -> Meeting:
    """Returns the meeting of the processes of a launcher. Raises NotMet."""
    from dslc.runtime.hosts.doors import FixedDoor
    from dslc.runtime.hosts.wire import endpoint

    if meeting.rendezvous:
        door: Door = FixedDoor(*endpoint(meeting.rendezvous))
    else:
        door = LAUNCHERS[world.word].join(world, os.environ, where.beside)
    return replace(
        meeting,
        nodes=world.size,
        processes=ranks // world.size,
        place=world.rank,
        door=door,
        needs=_FOR_PROCESSES,
        host=world.host or meeting.host,
    )


def _train(ready: Ready, company: Company, out: str | None) -> tuple[Outcome, dict[str, Any] | None, str]:
    from dslc.runtime.hosts.company import shared

    folder = (company.folder or folder_of(ready, out)) if company.keeps else ""
    if company.keeps and company.start == 1:
        refuse_run(folder, ready.program)
    company.folder, blind = shared(company, folder, _ANSWER)
    _share_checkpoints(ready, company)
    world = ready.world
    own = partial(
        launch,
        company=company,
        gathered=partial(_gathered, ready, company),
        quiet=world is not None and not world.speaks,
        in_group=world is not None,
    )
    if company.keeps:
        return *train(ready, folder, own, goes_on=company.start > 1), folder
    folder = company.folder
    if company.node in blind:
        folder = make_folder(ready.program, out or os.path.join("runs", ready.program.job, os.path.basename(folder)))
    return own(ready.program, ready.places, folder), None, folder


def _gathered(ready: Ready, company: Company) -> None:
    """Tries the folders again, with the hosts that are there for a restart."""
    from dslc.runtime.hosts.company import shared

    shared(company, company.folder if company.keeps else "", _ANSWER)
    _share_checkpoints(ready, company)


def _share_checkpoints(ready: Ready, company: Company) -> None:
    """Raises NotMet, on all hosts, if one does not see the folder of the checkpoints."""
    from dslc.runtime.checkpoint import files
    from dslc.runtime.hosts.company import shared
    from dslc.runtime.hosts.doors import NotMet

    if not ready.program.checkpoint.written:
        return
    place = files.folder_of(ready.program, company.folder)
    if company.keeps:
        os.makedirs(place, exist_ok=True)
    _, blind = shared(company, place, _ANSWER)
    if blind:
        hosts = list(dict.fromkeys(company.machines[node] for node in blind))
        does = "do not see" if len(hosts) > 1 else "does not see"
        raise NotMet(
            f"{' and '.join(hosts)} {does} {place} of {company.machines[0]}: checkpoints need a folder that all hosts "
            "share, which `checkpoint.dir` or --out names"
        )


def _facts(ready: Ready) -> Iterator[tuple[str, str]]:
    """Yields what the hosts have to have alike, the causes before what follows from them."""
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
    yield "the plan", ready.program.plan_hash


def _digest(content: bytes) -> str:
    return f"{len(content):,} bytes, {hashlib.sha256(content).hexdigest()[:8]}"
