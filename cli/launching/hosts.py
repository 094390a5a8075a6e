"""Trains with other launchers or processes. Either the launchers of several hosts all run the same command, or torchrun
or another launcher has started one process for each rank. This process is one of them.

Model: every one compiles the job by itself. They meet (runtime/hosts/launcher_group.py) and compare their facts of the
job (config_consistency.py). The coordinator's run directory has everything. A host that sees the same folder writes the
logs of its ranks there, any other host into a run directory of its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TextIO

from dslc.dsl.plain import plain_lines
from dslc.jobs.prepare_run import Ready, launch, show_failure, train
from dslc.launching.config_consistency import (
    ANSWER,
    Then,
    check_folder,
    facts_compared,
    is_other_folder,
    remedy,
    share_checkpoints,
)
from dslc.launching.elastic import train_elastic
from dslc.launching.restart_detection import folder_of, starts_before, tell_of_newest
from dslc.launching.secret_source import given_secret, secret_of, warn_of_strangers
from dslc.runs.run_folder import FolderInUseError, make_folder, refuse_run
from dslc.runtime.hosts.connection import parse_endpoint
from dslc.runtime.hosts.launcher_group import LauncherGroup, meet, shared
from dslc.runtime.hosts.rendezvous import Rendezvous
from dslc.runtime.hosts.rendezvous_address import Endpoint, FixedEndpoint, RendezvousError
from dslc.runtime.launchers.detect import LAUNCHERS, worlds
from dslc.runtime.launchers.world import World
from dslc.runtime.process.lifetime import end_with, ending, environments_of_children
from dslc.terminal.exit_codes import WRONG_USAGE
from dslc.terminal.system_errors import in_words

if TYPE_CHECKING:
    from dslc.runtime.measure.report import RunReport
    from dslc.runtime.process.failure import Outcome

SPEAKER_PATIENCE = 30.0  # seconds that a process with nothing to say leaves to one that has, on another host
UNSEEN_SPEAKER = 120.0  # seconds, where the launcher ends all others when that one has left
_FOR_PROCESSES = "the job takes {} processes, which one command starts"


@dataclass(frozen=True, kw_only=True)
class HostPaths:
    """The command's word on where processes meet and write; the same for all processes of a launcher."""

    job: str
    rendezvous: str = ""
    out: str | None = None

    @property
    def sibling_prefix(self) -> str:
        """The beginning of the path of a file beside the run directory."""
        folder = os.path.dirname(os.path.abspath(self.out)) if self.out is not None else os.path.abspath("runs")
        return os.path.join(folder, f".{os.path.splitext(os.path.basename(self.job))[0]}")


def no_endpoint(rendezvous: str) -> str:
    """Returns the first of several `HOST[:PORT]`, with commas between, that is none; "" if all are."""
    for each in rendezvous.split(","):
        try:
            parse_endpoint(each.strip())
        except ValueError:
            return each.strip()
    return ""


def train_with_others(ready: Ready, where: HostPaths, then: Then, screen: TextIO | None = None) -> int:
    """Trains with the hosts that come to the rendezvous, or the processes that the launcher has started. Returns the
    exit status that `then` gives for the outcome, the report (on the coordinator) and the run directory. Progress is
    shown on `screen`, if given. Of an elastic job it is always shown on standard error.
    """
    try:
        return _meet_and_train(ready, where, then, screen)
    except (FolderInUseError, RendezvousError) as reason:
        if ready.world is None or ready.world.speaks:
            print(plain_lines(f"dslc: {reason}"), file=sys.stderr)
        wait_for_speaker(ready.world)
        return WRONG_USAGE


def _meet_and_train(ready: Ready, where: HostPaths, then: Then, screen: TextIO | None) -> int:
    """Trains, and returns the exit status. Raises RendezvousError, and FolderInUseError.

    The coordinator writes all before another ends: mpirun ends the others soon after one process has ended with an
    error. The other processes end after the coordinator: MPICH's mpirun can lose the exit status of processes that end
    at the same moment.
    """
    world = ready.world
    rendezvous = Rendezvous(
        address=where.rendezvous,
        nodes=ready.compiled.plan.topology.nodes,
        facts=dict(facts_compared(ready, where.out)),
        timeout=ready.program.timeout,
        processes=ready.program.processes,
        say=lambda text: print(plain_lines(text), file=sys.stderr, flush=True) if not world or world.speaks else None,
        again=ready.program.restarts > 0 and world is None,
        remedy=remedy,
        secret=secret_of(ready, where.out),
    )
    if ready.counts:
        return train_elastic(ready, rendezvous, where.out, then)
    if world is not None:
        end_with(os.getppid())  # the launcher
        rendezvous = _of_processes(rendezvous, world, where, ready.program.world_size)
    warn_of_strangers(ready, rendezvous)
    group = meet(rendezvous)
    try:
        outcome, report, folder = _train(ready, group, where.out, screen)
        status = then(outcome, report, folder)
        group.let_end()
        if world is not None and not world.speaks and group.speaks and outcome.failure is not None:
            show_failure(outcome)  # in place of rank 0, which is lost
        if status and world is not None and not world.speaks:
            _wait_for_local_speaker(world)
        return status
    except (FolderInUseError, OSError) as error:
        group.leave(in_words(error) if isinstance(error, OSError) else str(error))
        raise
    finally:
        group.close()


def wait_for_speaker(world: World | None) -> None:
    """Waits, in a process that leaves without a message, for the process that writes the messages: torchrun and mpirun
    end all processes as soon as one has left with an error. It waits for the end of a speaker on this host, and for
    some time if the speaker is not seen here.
    """
    if world is None or world.speaks or world.size == 1:
        return
    end_with(os.getppid())  # the launcher
    if _wait_for_local_speaker(world) or (world.local_size == world.size and sys.platform == "linux"):
        return  # it has ended
    time.sleep(UNSEEN_SPEAKER if LAUNCHERS[world.word].ends_others else SPEAKER_PATIENCE)


def _wait_for_local_speaker(world: World) -> bool:
    """Waits for the end of the process that speaks; returns False unless this launcher started it on this host."""
    speaker = _speaker_of(world, os.getppid())
    handle = ending(speaker, -1) if speaker is not None else -1
    if handle < 0:
        return False
    select.select([handle], [], [])
    os.close(handle)
    return True


def _speaker_of(world: World, launcher: int) -> int | None:
    for process, environ in environments_of_children(launcher).items():
        sibling = worlds(environ).get(world.word)
        if sibling is not None and not sibling.fault and sibling.speaks:
            return process
    return None


def tell_fault(world: World, where: HostPaths, fault: str) -> bool:
    """Tells a launcher's other processes why this one cannot train; all then leave. Returns True if they met."""
    with contextlib.suppress(RendezvousError):
        secret = given_secret(where.out)
        rendezvous = Rendezvous(where.rendezvous, world.size, facts={}, timeout=ANSWER, fault=fault, secret=secret)
        meet(_of_processes(rendezvous, world, where, world.size)).close()
        return True
    return False


def _of_processes(rendezvous: Rendezvous, world: World, where: HostPaths, ranks: int) -> Rendezvous:
    """Returns the meeting of the processes of a launcher. Raises RendezvousError."""
    if rendezvous.address:
        endpoint: Endpoint = FixedEndpoint(*parse_endpoint(rendezvous.address), one_host=world.local_size == world.size)
    else:
        endpoint = LAUNCHERS[world.word].join(world, os.environ, where.sibling_prefix)
    return replace(
        rendezvous,
        nodes=world.size,
        processes=ranks // world.size,
        place=world.rank,
        by=world.command,
        endpoint=endpoint,
        needs=_FOR_PROCESSES,
        host=world.host or rendezvous.host,
    )


def _train(
    ready: Ready, group: LauncherGroup, out: str | None, screen: TextIO | None
) -> tuple[Outcome, RunReport | None, str]:
    def agree_on_folder() -> list[int]:
        if group.is_coordinator:
            group.folder = _folder(ready, group, out)
        group.folder, blind = shared(group, group.folder, ANSWER)
        share_checkpoints(ready, group)
        return blind

    blind = group.gather(agree_on_folder, 1, time.monotonic() + ready.program.timeout, lambda: False, has_met=True)
    world, folder = ready.world, group.folder
    own = partial(
        launch,
        group=group,
        gathered=partial(_gathered, ready, group),
        quiet=world is not None and not world.speaks,
        in_group=world is not None,
        screen=screen,
    )
    if group.is_coordinator:
        return *train(ready, folder, own, goes_on=group.start > 1), folder
    folder = _member_folder(ready, folder, out, sees_folder=group.node not in blind)
    return own(ready.program, ready.places, folder), None, folder


def _member_folder(ready: Ready, folder: str, out: str | None, *, sees_folder: bool) -> str:
    """Returns where a host that is no coordinator writes: the coordinator's folder, or one of its own."""
    if sees_folder and not is_other_folder(out, folder):
        return folder
    return make_folder(ready.program, out or os.path.join("runs", ready.program.job, os.path.basename(folder)))


def _folder(ready: Ready, group: LauncherGroup, out: str | None) -> str:
    """Returns the run directory, on the coordinator: the folder of the training that goes on, or a new one."""

    def plan_of(nodes: int) -> str:
        return ready.program.plan_hash if ready.program.restarts else ""

    if group.start > 1 and group.folder:
        check_folder(group.folder, out, plan_of)
        return group.folder

    if out is None and not (ready.world is not None and ready.world.attempt):
        tell_of_newest(ready.program.job, plan_of)
    folder = group.folder or folder_of(ready, out)
    group.go_on(starts_before(folder, plan_of))
    if group.start == 1:
        refuse_run(folder, ready.program)
    return folder


def _gathered(ready: Ready, group: LauncherGroup) -> None:
    """Tries the folders again, with the hosts that are there for a restart."""
    shared(group, group.folder if group.is_coordinator else "", ANSWER)
    share_checkpoints(ready, group)
