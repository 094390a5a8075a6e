"""Runs trainings of a sweep at once, each with devices of its own.

Model: this process, which has imported torch and run nothing, forks a launcher for each training (runtime/launch.py),
in a place of the machine: its share of the cores, or its GPUs. It follows their records for one display of all.

Contract: no two trainings share a GPU or a core. A launcher dies with this process, however that ends. Ctrl-C ends all
that run after their step, each after its own; a second one ends them at once. Each failure is shown when it comes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, NoReturn

from dslc.compiler.ir.codec import from_json, to_json
from dslc.compiler.ir.number_text import byte_text
from dslc.dsl.plain import plain
from dslc.dsl.words import plural
from dslc.jobs.prepare_run import Ready, launch, show_failure, train
from dslc.runs.run_folder import FolderInUseError
from dslc.runtime.process.lifetime import end_with
from dslc.runtime.process.stop import SIGNALS, RunControl, listening
from dslc.sweeps.display import SweepDisplay, display
from dslc.sweeps.running import Runner, SweepTraining
from dslc.terminal.exit_codes import GOOD, INTERRUPTED, TRAINING_FAILED, WRONG_USAGE

if TYPE_CHECKING:
    from dslc.runtime.process.failure import Outcome

_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """Devices of this machine that one training has: some of the `cores`, and of the `gpus` as torch counts them."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()


class NotHeld(Exception):
    """Trainings that this machine does not hold at once; the text says why, and the remedy."""


def places_for(runs: Sequence[Ready], count: int) -> list[DeviceShare]:
    """Returns `count` places of this machine; each of them holds any of the trainings. Raises NotHeld."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    machine = runs[0].compiled.analysis.facts.machine
    memory = machine.memory if machine is not None else 0
    return shared_out(
        [Needs.of_job(ready) for ready in runs], count, cores, _gpus(machine.gpus if machine else ()), memory
    )


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The share of a machine that one training takes: `named` are the GPUs that its job names, `memory` the host's."""

    processes: int
    gpu: bool
    named: tuple[int, ...]
    memory: int

    @classmethod
    def of_job(cls, ready: Ready) -> Needs:
        program = ready.program
        gpu = program.device == "cuda"
        peak = 0 if gpu else max((node.peak for node in program.memory), default=0)
        return cls(processes=program.processes, gpu=gpu, named=program.gpus, memory=peak * program.processes)


def shared_out(
    needs: Sequence[Needs], count: int, cores: Sequence[int], gpus: Sequence[str], memory: int
) -> list[DeviceShare]:
    """Returns places for `count` trainings at once on these `cores`, `gpus` and bytes of memory. Raises NotHeld."""
    most = max(each.processes for each in needs)
    named = next((each.named for each in needs if each.named), ())
    if named:
        numbers = ", ".join(map(str, named))
        raise NotHeld(
            f"the job names its GPUs ([{numbers}]), which one training has at a time: `devices.gpus = {len(named)}` "
            "leaves the choice to dslc"
        )
    if any(each.gpu for each in needs):
        _hold(len(gpus), most, count, "GPU")
    else:
        _hold(len(cores), most, count, "core")
    held = sum(sorted((each.memory for each in needs), reverse=True)[:count])
    if memory and held > memory:
        raise NotHeld(
            f"{count} trainings at once hold {byte_text(held)} as planned, and this machine has {byte_text(memory)}"
        )
    each = max(1, len(cores) // count)
    shares = [tuple(cores[n * each : (n + 1) * each]) or tuple(cores) for n in range(count)]
    if any(need.gpu for need in needs):
        return [DeviceShare(cores=share, gpus=tuple(gpus[n * most : (n + 1) * most])) for n, share in enumerate(shares)]
    return [DeviceShare(cores=share) for share in shares]


def _hold(there: int, most: int, count: int, what: str) -> None:
    if most * count > there:
        held = there // most
        remedy = f"--parallel {held} is the most" if held > 1 else "leave out --parallel"
        raise NotHeld(
            f"{count} trainings of {plural(most, 'process')} each take {plural(most * count, what)}, and this machine "
            f"has {there}: {remedy}"
        )


def _gpus(found: Sequence[int]) -> list[str]:
    """Returns the GPUs that torch sees, by the names that the environment has for them."""
    named = [name.strip() for name in os.environ.get(_GPUS, "").split(",") if name.strip()]
    return [named[n] if n < len(named) else str(n) for n in range(len(found))]


# ----------------------------------------------------------------------------------------------------- the launchers


@dataclass(frozen=True, kw_only=True)
class _Child:
    process: int
    training: SweepTraining
    place: DeviceShare
    told: IO[str]


def at_once(places: Sequence[DeviceShare]) -> Runner:
    def run(trainings: Sequence[SweepTraining]) -> int:
        if not trainings:
            return GOOD
        import dslc.runtime.launch  # noqa: F401 - torch, once for all of them
        from dslc.runtime.agent import AtOnce

        board = RunControl(1)
        sweep = _ParallelSweep(trainings, places, display(trainings, sys.stdout), lambda: board.stop_requested)
        try:
            with listening(board, AtOnce):
                try:
                    sweep.run()
                except AtOnce:
                    sweep.signal()
                    sweep.finish()
        finally:
            sweep.close()
        return INTERRUPTED if board.stop_requested else sweep.status

    return run


class _ParallelSweep:
    def __init__(
        self,
        trainings: Sequence[SweepTraining],
        places: Sequence[DeviceShare],
        display: SweepDisplay,
        stopping: Callable[[], bool],
    ) -> None:
        self._waiting, self._free = list(trainings), list(places)
        self._running: list[_Child] = []
        self._display, self._stopping, self._stopped = display, stopping, False
        self.status = GOOD

    def run(self) -> None:
        """Runs all trainings, or until a stop is requested or one of them was stopped."""
        while self._running or (self._waiting and not self._ends):
            if self._stopping() and not self._stopped:
                self._stopped = True
                self._display.say("stopping each after its step (Ctrl-C once more: at once)")
                self.signal()
            while self._waiting and self._free and not self._ends:
                self._start(self._waiting.pop(0), self._free.pop(0))
            self._poll()

    @property
    def _ends(self) -> bool:
        return self._stopping() or self.status == INTERRUPTED

    def finish(self) -> None:
        while self._running:
            self._poll()

    def signal(self) -> None:
        for child in self._running:
            os.kill(child.process, signal.SIGTERM)  # no race: it is not waited for yet

    def close(self) -> None:
        """Ends the remaining trainings, after an error of this process."""
        for child in self._running:
            os.kill(child.process, signal.SIGKILL)
            os.waitpid(child.process, 0)
        self._display.close()

    def _poll(self) -> None:
        for child in list(self._running):
            found, how = os.waitpid(child.process, os.WNOHANG)
            if found:
                self._running.remove(child)
                self._free.append(child.place)
                self._display.poll()
                self._finish_child(child, os.waitstatus_to_exitcode(how))
        self._display.poll()
        time.sleep(self._display.interval)

    def _start(self, training: SweepTraining, place: DeviceShare) -> None:
        self._display.begin(training)
        sys.stdout.flush()
        sys.stderr.flush()  # or the child would write the rest of the buffers again
        told = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        parent, process = os.getpid(), os.fork()
        if not process:
            _child(training, place, told, parent)
        self._running.append(_Child(process=process, training=training, place=place, told=told))

    def _finish_child(self, child: _Child, exit_status: int) -> None:
        with child.told as file:
            file.seek(0)
            text = file.read()
        told = json.loads(text) if text else {}
        name = child.training.name
        if "outcome" in told:
            from dslc.runtime.process.failure import Outcome

            outcome = from_json(Outcome, told["outcome"])
            self._display.end(child.training, _words(outcome))
            if outcome.failure is not None:
                show_failure(outcome, before=f"{name}: ")
            status = TRAINING_FAILED if outcome.failure is not None else GOOD if outcome.is_complete else INTERRUPTED
        elif self._stopped and exit_status < 0:
            self._display.end(child.training, "ended before its first step")
            status = INTERRUPTED
        else:
            self._display.end(child.training, "failed")
            said = told.get("error", f"its launcher was ended: exit status {exit_status}")
            print(plain(f"dslc: {name}: {said}"), file=sys.stderr)
            status = told.get("status", TRAINING_FAILED)
        self.status = max(self.status, status)


def _words(outcome: Outcome) -> str:
    if outcome.failure is not None:
        return f"failed after {plural(outcome.steps, 'step')}"
    return f"{'stopped' if outcome.stopped_at is not None else 'done'} after {plural(outcome.steps, 'step')}"


def _child(training: SweepTraining, place: DeviceShare, told: IO[str], parent: int) -> NoReturn:
    """Trains, in a process of its own, and ends it; the result is written into `told`."""
    status = TRAINING_FAILED
    try:
        os.setpgid(0, 0)  # Ctrl-C goes to the command, which passes it on
        for name in SIGNALS:
            if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN or name == "SIGTERM":
                signal.signal(getattr(signal, name), signal.SIG_DFL)
        end_with(parent)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, place.cores)
        if place.gpus:
            os.environ[_GPUS] = ",".join(place.gpus)
        status = _trained(training, told)
        told.flush()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        with contextlib.suppress(Exception):
            sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _trained(training: SweepTraining, told: IO[str]) -> int:
    try:
        outcome, _ = train(training.ready, training.folder, partial(launch, quiet=True))
    except FolderInUseError as reason:
        json.dump({"error": str(reason), "status": WRONG_USAGE}, told)
        return WRONG_USAGE
    except OSError as error:
        json.dump({"error": str(error), "status": TRAINING_FAILED}, told)
        return TRAINING_FAILED
    json.dump({"outcome": to_json(outcome)}, told)
    return GOOD
