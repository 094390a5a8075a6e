"""Trains an elastic job with the hosts that are there: this is the launcher of one of them.

Model: hosts meet as for any training of several (hosts.py), and again whenever one comes or goes
(runtime/hosts/elastic.py). After each meeting every host compiles the job for the hosts that met, and they compare the
plans. The coordinator holds the lock of the run directory, which all see, and writes the plan there; when it is lost,
the next one takes the lock.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.jobs.prepare_run import Ready, feed, launch, report_on, write_run_directory
from dslc.jobs.run_picture import draw_plan
from dslc.launching.config_consistency import (
    ANSWER,
    Then,
    check_folder,
    is_other_folder,
    share_checkpoints,
)
from dslc.launching.restart_detection import is_in_pod, plan_on, starts_before, tell_of_newest
from dslc.launching.secret_source import warn_of_strangers
from dslc.runs.run_folder import FolderInUseError, claim_folder, holder, make_folder, refuse_run
from dslc.runtime.hosts.elastic import TrainingOverError
from dslc.runtime.hosts.launcher_group import LauncherGroup, meet, require_same_value, shared
from dslc.runtime.hosts.rendezvous import Rendezvous
from dslc.runtime.hosts.rendezvous_address import RendezvousError
from dslc.runtime.process.run_status import begin
from dslc.terminal.exit_codes import GOOD, INTERRUPTED, WRONG_USAGE

if TYPE_CHECKING:
    from dslc.runtime.measure.report import RunReport
    from dslc.runtime.process.failure import Outcome

_LAST = 10.0  # seconds: Kubernetes looks at pods that have ended once a second


def train_elastic(ready: Ready, rendezvous: Rendezvous, out: str | None, then: Then) -> int:
    """Trains with the hosts that come to the rendezvous, and returns the exit status that `then` gives. All hosts end
    after the coordinator has written all, and in pods some seconds after it (`_outlive`). Raises RendezvousError, and
    FolderInUseError.
    """
    # torch: a host that waits for a place has it imported when it gets one.
    importlib.import_module("dslc.runtime.launch")
    counts = tuple(ready.counts)
    with contextlib.ExitStack() as claims:
        training = _ElasticTraining(ready, out, claims)
        rendezvous = replace(
            rendezvous,
            nodes=counts[-1],
            counts=counts,
            claim=training.claim,
            holder=lambda: holder(os.path.expanduser(out)) if out is not None else "",
            again=False,
            patient=is_in_pod(ready),
        )
        warn_of_strangers(ready, rendezvous)
        if is_in_pod(ready):
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # the first process of a pod would ignore it
        try:
            group = meet(rendezvous)
        except TrainingOverError as over:
            rendezvous.say(f"dslc: {over}")
            if over.stopped:
                return INTERRUPTED
            if is_in_pod(ready):
                _outlive()
            return GOOD
        try:
            outcome, report = training.run(group)
            status = then(outcome, report, training.folder)
            group.dismiss(
                outcome.steps if outcome.failure is None else None, was_stopped=outcome.stopped_at is not None
            )
            group.let_end()
            if outcome.failure is not None and group.apart and is_in_pod(ready):
                return WRONG_USAGE  # as from the first meeting: this pod found the others no more, who may go on
            if outcome.is_complete and is_in_pod(ready) and not group.is_coordinator:
                _outlive()
            return status
        finally:
            group.close()


def _outlive() -> None:
    """Waits for Kubernetes to end this pod, for `_LAST` seconds at most, as the coordinator's pod has ended. Otherwise
    the Job may fail if one pod was given up, and all others end within a second or so: Kubernetes sees that all pods
    have ended and one has failed, before it looks whether one has ended well.
    """
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    asked.wait(_LAST)


class _ElasticTraining:
    """One launcher's part: `ready` is the job for the hosts that have met last, `folder` the run directory."""

    def __init__(self, job: Ready, out: str | None, claims: contextlib.ExitStack) -> None:
        self.ready, self.folder = job, ""
        self._job, self._out, self._claims = job, out, claims
        self._plan_of = partial(plan_on, job)
        self._holds = False
        self._new_folder = ""  # which this launcher has made

    def run(self, group: LauncherGroup) -> tuple[Outcome, RunReport | None]:
        """Trains to the end, and returns the outcome and, on the coordinator, the contents of report.json."""
        until = time.monotonic() + self._job.program.timeout
        program, places = group.gather(lambda: self.gathered(group), 1, until, lambda: False, has_met=True)
        with contextlib.ExitStack() as contexts:
            if group.is_coordinator:
                contexts.enter_context(feed(self.ready, self.folder))
            with draw_plan(self.ready.compiled.plan, self.folder) if group.is_coordinator else contextlib.nullcontext():
                outcome = launch(program, places, self.folder, group=group, gathered=lambda: self.gathered(group))
            if not group.is_coordinator or outcome.failure is not None or outcome.stopped_at == 0:
                return outcome, None
            return outcome, report_on(self.ready, self.folder, outcome.steps)

    def claim(self, folder: str) -> bool:
        """Locks the run directory of a training whose coordinator is gone; returns whether that was possible."""
        try:
            self._claims.enter_context(claim_folder(folder, self._job.program, goes_on=True))
        except (FolderInUseError, OSError):
            return False
        self._holds = True
        return True

    def gathered(self, group: LauncherGroup) -> tuple[JobProgram, tuple[RankPlace, ...]]:
        """Returns the program for the hosts that have met, when all see the run directory and have the same plan.
        Raises RendezvousError, and FolderInUseError.
        """
        self.ready = ready = self._job.on(len(group.machines))
        if group.is_coordinator:
            self._keep(group)
        group.folder, blind = shared(group, group.folder if group.is_coordinator else "", ANSWER)
        if is_other_folder(self._out, group.folder):
            raise RendezvousError(f"{group.hosts[0]} trains in {group.folder}, and --out names {self._out}")
        self.folder = group.folder
        if blind:
            hosts = " and ".join(dict.fromkeys(group.machines[node] for node in blind))
            raise RendezvousError(
                f"not all hosts see {group.folder} of {group.machines[0]}: {hosts}. An elastic training needs a "
                "run directory that all hosts share, which --out names"
            )
        share_checkpoints(ready, group)
        require_same_value(group, "the plan", ready.program.plan_hash, ANSWER)
        return ready.program, ready.places

    def _keep(self, group: LauncherGroup) -> None:
        program = self.ready.program
        if group.folder and group.folder not in (self.folder, self._new_folder):
            check_folder(group.folder, self._out, self._plan_of)
        if not group.folder:
            if self._out is None:
                tell_of_newest(program.job, self._plan_of)
            group.folder = self._new_folder = make_folder(program, self._out)
            group.go_on(starts_before(group.folder, self._plan_of))
            if group.start == 1:
                refuse_run(group.folder, program)
        if not self._holds:
            goes_on = group.start > 1
            self._claims.enter_context(claim_folder(group.folder, program, goes_on=goes_on))
            self._holds = True
        write_run_directory(self.ready, group.folder)
        if self.folder == "":
            begin(group.folder, program.steps)
