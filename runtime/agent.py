"""Starts the ranks of this node once, and stays with them to the end: torch's elastic agent, which waits for news.

Model: torch's agent forks the ranks and notices how they end. Ours adds: waiting for a process that ends or a rank that
reports, instead of sleeping; the state of all ranks when one fails (process/failure.py), with patience for the cause to
show; and the word of the launchers of other hosts (hosts/coordination.py).

Contract: `agent_of` makes an agent for one start of the ranks. When `run` has returned, or after `end_all`, no rank is
left.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException

from dslc.compiler.ir.program import JobProgram
from dslc.compiler.trace.private_torch import leave_rendezvous, worker_processes
from dslc.runtime.hosts.coordination import HostGroup, LauncherState
from dslc.runtime.process import failure
from dslc.runtime.process.failure import Failure, ProcessExits
from dslc.runtime.process.lifetime import SuspensionTracker, ending, is_suspended
from dslc.runtime.process.progress import Watch
from dslc.runtime.stall_watch import StallWatch
from dslc.runtime.transport.barriers import StartupChannels
from dslc.runtime.transport.rendezvous import OneNode

_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
PATIENCE = 5.0  # seconds that processes get to end when they have nothing more to do


class AtOnce(SignalException):
    """A second request to stop. The agent ends the ranks by the signal that it names."""

    def __init__(self, said: str) -> None:
        super().__init__(said, signal.SIGKILL)


class _NoLogs(DefaultLogsSpecs):
    """Ranks redirect their output to their logs themselves (worker.py).

    torch would follow `/dev/null` for each in two threads, for which the interpreter waits at its end.
    """

    def __init__(self) -> None:
        super().__init__(log_dir=os.devnull)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return replace(super().reify(envs), tee_stdouts={}, tee_stderrs={})


class Agent(LocalElasticAgent):
    """torch's agent for one node, which waits for news instead of sleeping, and knows how each rank ended.

    A rank reports its end on the board, and none is asked to return: a rank that cannot end by itself, or whose own
    children keep its pipes open, delays nothing.
    """

    def __init__(
        self, spec: WorkerSpec, watch: Watch, meeting: StartupChannels, program: JobProgram, run_dir: str
    ) -> None:
        super().__init__(spec, _NoLogs(), start_method="fork", exit_barrier_timeout=60)
        self._watch, self._meeting, self._board = watch, meeting, meeting.board
        self._timeout, self._run_dir = program.timeout, run_dir  # a rank may be stopped for so many seconds
        self._pauses = SuspensionTracker(gap=2 * watch.interval)
        self._trains = program.is_training
        self.stalls = StallWatch(program, run_dir, meeting, self._statuses, gap=2 * watch.interval)
        self._handles: list[int] = []
        self.ends = ProcessExits()
        self.together: HostGroup | None = None  # with the launchers of other hosts
        self.cause: Failure | None = None  # on which all hosts agree

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._handles = [ending(process.pid, process.sentinel) for process in self._processes()]
        self._meeting.first.open()
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        try:
            return self._poll()
        except AtOnce:
            self._say_positions()  # before torch's agent ends the ranks
            raise

    def _poll(self) -> RunResult:
        self._wait([*self._handles, self._meeting.news], self._watch.interval)
        self._watch.look()
        if self._trains and (cause := self.stalls.look()):
            self._watch.say(cause)
        if self.together is not None:
            return self._monitor_with_others(self.together)
        if self._board.all_done:
            self._part()
            return self._succeeded()
        if self._has_failed() or self._hangs():
            self._settle()
            self.end_all()
            return RunResult(state=WorkerState.FAILED)
        return RunResult(state=WorkerState.HEALTHY)

    def _monitor_with_others(self, together: HostGroup) -> RunResult:
        state = together.look()
        if state is LauncherState.DONE:
            self._part()
            return self._succeeded()
        if state is LauncherState.FAILED:
            self.cause = together.cause
            self.end_all()
            return RunResult(state=WorkerState.FAILED)
        asked = state is LauncherState.REPORTING
        if not together.reported and (asked or self._has_failed() or self._hangs()):
            self._settle()
            together.failed(self._observed_failure(together, asked=asked))
        return RunResult(state=WorkerState.HEALTHY)

    def _succeeded(self) -> RunResult:
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(range(len(self._processes()))))

    def _observed_failure(self, together: HostGroup, *, asked: bool) -> Failure | None:
        """Returns what this node shows of a failure; None if another asks, and it shows nothing."""
        known = self._run_dir, self._board
        if not asked:
            return failure.cause(*known, self.ends, self._timeout)
        found = failure.node_failure(*known, self.ends, self._timeout)
        if found is None and together.asked_of == "timeout":
            return failure.timeout_failure(self._board, self.ends)
        return found

    def _wait(self, handles: list[int], seconds: float) -> None:
        """Waits until a process ends, a rank or another host has reported something, or the progress is due."""
        if self.together is not None:
            handles = [*handles, *self.together.group.handles]
        ready = multiprocessing.connection.wait(handles, timeout=seconds)
        if self._meeting.news in ready:
            self._meeting.hear()

    def _has_failed(self) -> bool:
        """True if a rank has ended, or reported that it ends, before it was done."""
        statuses = self._statuses()
        # Each reads the board once: between two reads a rank may report that it is done.
        return any(
            self._board.failing(rank) or (statuses[rank] is not None and not self._board.has_finished(rank))
            for rank in self._ranks()
        )

    def _hangs(self) -> bool:
        """True if the training cannot go on: a rank is stopped, and nobody continues it, or the run directory is gone.
        A rank that waits for a collective finds out by itself.
        """
        paused = self._pauses.look(process.pid for process in self._processes())
        return any(seconds >= self._timeout for seconds in paused.values()) or not self._watch.has_folder()

    def _settle(self) -> None:
        """Records the state of the ranks. After a lost connection it waits a moment for the cause to show: the system
        closes the connections of a process before it reports its exit status.
        """
        until = time.monotonic() + PATIENCE
        while not self._knows_why() and (rest := until - time.monotonic()) > 0:
            alive = [
                handle
                for handle, status in zip(self._handles, self._statuses().values(), strict=True)
                if status is None
            ]
            if not alive:
                break
            self._wait([*alive, self._meeting.news], min(rest, self._watch.interval))
        processes = self._processes()
        stopped = tuple(
            rank for rank, process in zip(self._ranks(), processes, strict=True) if is_suspended(process.pid)
        )
        statuses, folder = self._statuses(), self._watch.has_folder()
        self.stalls.update_details()
        positions = tuple(self.stalls.explain(live=False)) if folder else ()
        self.ends = ProcessExits(statuses=statuses, stopped=stopped, folder=folder, positions=positions)

    def _say_positions(self) -> None:
        """Shows where the ranks are, or which of them the others wait for, before they are ended at once."""
        self.stalls.update_details()
        self._watch.say("; ".join(self.stalls.explain()))

    def _knows_why(self) -> bool:
        told = {rank: failure.reported_failure(self._board, rank) for rank in self._ranks()}
        silent = [rank for rank, status in self._statuses().items() if status is not None and told[rank] is None]
        return (
            any(map(failure.is_final, told.values()))
            or any(not self._board.has_finished(rank) for rank in silent)
            or self._hangs()
        )

    def _part(self) -> None:
        """Releases the ranks, which are all done."""
        self._meeting.last.open()
        until = time.monotonic() + PATIENCE
        while late := [rank for rank, status in self._statuses().items() if status is None]:
            rest = until - time.monotonic()
            if rest <= 0:
                self._watch.say_of_late(late)
                break
            self._wait([self._handles[rank - self._board.ranks.start] for rank in late], rest)
        self.end_all()

    def _processes(self) -> list[Any]:
        return worker_processes(self)

    def _ranks(self) -> range:
        return self._board.ranks

    def _statuses(self) -> dict[int, int | None]:
        """Returns exit statuses by rank: -N for signal N, None for those alive."""
        return {rank: process.exitcode for rank, process in zip(self._ranks(), self._processes(), strict=False)}

    def end_all(self) -> None:
        """Ends all processes, also if the agent was interrupted in the middle of something."""
        for process in self._processes():
            if process.exitcode is None:
                process.kill()
            process.join()
        for process, handle in zip(self._processes(), self._handles, strict=False):
            if handle != process.sentinel:
                os.close(handle)
        self._handles = []
        with contextlib.suppress(Exception):
            leave_rendezvous(self)


def agent_of(
    program: JobProgram, rank: Callable[[], object], watch: Watch, meeting: StartupChannels, run_dir: str
) -> Agent:
    """Does the work of torch's `launch_agent`, for one node and with our agent."""
    spec = WorkerSpec(
        role="rank",
        local_world_size=len(meeting.board.ranks),
        entrypoint=rank,
        rdzv_handler=OneNode(),
        max_restarts=0,
        monitor_interval=1e-3,  # the agent sleeps for it; waiting is ours
    )
    return Agent(spec, watch, meeting, program, run_dir)


@contextlib.contextmanager
def elastic_log(run_dir: str) -> Iterator[None]:
    """Sends the agent's messages about signals and statuses to a file, and keeps it from our signal handlers."""
    handler = _LauncherLog(os.path.join(run_dir, "logs", "launcher.log"), mode="w", delay=True)
    loggers = [logging.getLogger(f"torch.{name}") for name in ("distributed.elastic", "multiprocessing")]
    propagated = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    before = os.environ.get(_SIGNALS)
    os.environ[_SIGNALS] = "SIGRTMAX"  # it wants at least one; nobody sends this
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, AttributeError):  # not the main thread: then nothing was changed
            signal.signal(signal.SIGRTMAX, signal.SIG_DFL)
        os.environ.pop(_SIGNALS)
        if before is not None:
            os.environ[_SIGNALS] = before
        for logger, propagate in zip(loggers, propagated, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
        handler.close()


class _LauncherLog(logging.FileHandler):
    """A log without errors: a full disk, or a missing folder, ends nothing here."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()
