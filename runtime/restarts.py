"""Decides whether ranks that failed are started again, and words the report (`launch.restarts`).

Model: `launch` starts all ranks together; when one of them fails it ends all, and asks here. A failure is followed by
a restart until `launch.restarts` of them have been, in all, as under torchrun's `--max-restarts`. Not followed by one:

- an exception that was raised before at the same place of the same step: it would be raised again;
- a second checkpoint in a row that cannot be written, as on a full disk, which no start mends;
- a failure after a request to stop (Ctrl-C, SIGTERM), as the training is to end;
- a run directory that is gone.

A training that goes back after a spike of the loss (loop/loss_spikes.py) takes none of the restarts: `times` of
`train.on_spike` bounds it.

Hosts that come to an elastic training, or leave it, are no fault: such a change takes none of the restarts.

On several hosts the coordinator's host decides, and a host that is lost is waited for, up to `launch.timeout`
(hosts/launcher_group.py). The loss of the coordinator's host itself is a failure like any other: the rest wait for it.
A process that mpirun or srun has started does not come back: the training ends, and goes on when it is started again.

The ranks of each start resume from the newest checkpoint that is whole (checkpoint/checkpoint.py), at the next sample.

Works around torch's elastic agent, which can restart ranks by itself (`max_restarts`): all its starts share one store,
in which new ranks read the addresses of those that are gone. Over gloo 7 of 12 restarts after a kill -9 failed so
(torch 2.13). Here each start has an agent, a store, pipes and ports of its own, and torch's agent starts ranks once.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from dslc.compiler.ir.program import JobProgram, TrainMode
from dslc.runtime.checkpoint import files
from dslc.runtime.process.failure import Failure
from dslc.runtime.process.stop import RunControl

_LASTS = "not restarted: that would not mend it"
_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of an object, in the text of an exception


class Restarts:
    """The restarts of one training. The board counts its starts."""

    def __init__(self, program: JobProgram, run_dir: str, board: RunControl) -> None:
        once = not isinstance(program.mode, TrainMode) or not program.checkpoint.is_enabled
        self._once, self._most, self._board = once, 0 if once else program.restarts, board
        self.changes = 0  # how many of the starts were no restarts
        self._rewinds = 0  # how many of them followed a spike of the loss
        self._program, self._run_dir = program, run_dir
        self._before: set[tuple[object, ...]] = set()  # exceptions

    def follow(self, failure: Failure, *, stopping: bool, folder: bool) -> tuple[bool, Failure]:
        """Returns whether the ranks are started again after a failure, and the failure with a note that says so.

        `stopping`: the training was asked to stop; `folder`: the run directory is there.
        """
        if failure.rewinds and folder and not stopping:
            self._rewinds += 1
            return True, failure
        if not self._most or not folder:
            return False, failure
        known, again, used = _failure_signature(failure), False, self.used
        if stopping:
            said = "not restarted, as it was asked to stop"
        elif failure.lasting:
            said = _LASTS
        elif known is not None and known in self._before:
            said = "not restarted: the same exception ended the same step before"
        elif used >= self._most:
            said = f"not restarted: it was {_times(used)}, the most that `launch.restarts` allows"
        else:
            again, said = True, f"restart {used + 1} of {self._most}, {self._from()}"
        if known is not None:
            self._before.add(known)
        return again, replace(failure, notes=(*failure.notes, said))

    @property
    def used(self) -> int:
        """The number of restarts so far."""
        return self._board.attempt - 1 - self.changes - self._rewinds

    def go_on(self, failure: Failure, *, stopping: bool, folder: bool) -> tuple[bool, Failure]:
        """Returns the same for the loss of a host of an elastic training; the other hosts train on without it."""
        if self._once or not folder:
            return False, failure
        again = not stopping and not failure.lasting
        if stopping:
            said = "not continued, as it was asked to stop"
        else:
            said = f"goes on with the other hosts, {self._from()}" if again else _LASTS
        return again, replace(failure, notes=(*failure.notes, said))

    def await_coordinator(self, failure: Failure, coordinator: str, *, stopping: bool) -> tuple[bool, Failure]:
        """Returns the same, on another host, after the loss of the host that decides."""
        if not self._most or stopping:
            return False, failure
        said = f"waits for {coordinator} to come back, up to {self._program.timeout:g} s (`launch.timeout`)"
        return True, replace(failure, notes=(*failure.notes, said))

    def end_with(self, failure: Failure, launcher: str) -> tuple[bool, Failure]:
        """Returns the same for the loss of a process that this `launcher` has started, and does not start again."""
        if not self._most:
            return False, failure
        folder = os.path.relpath(self._run_dir)
        said = f"{launcher} does not start it again: the same command goes on, typed again with `--out {folder}`"
        return False, replace(failure, notes=(*failure.notes, said), goes_on=True)

    def _from(self) -> str:
        """Returns in words where the next start begins, by the names and manifests of the checkpoints."""
        program = self._program
        fit = files.fit_of(program, None)
        for place in (files.folder_of(program, self._run_dir), program.checkpoint.resume):
            if place not in ("none", "auto"):
                found = map(files.look, files.checkpoints_in(place))
                taken = files.choose(found, fit, program.steps, lambda *_: []).taken
                if taken is not None and taken.manifest is not None:
                    return f"from the checkpoint of step {taken.manifest.step}"
        return "from the first step"


def _failure_signature(failure: Failure) -> tuple[object, ...] | None:
    """Returns what two equal exceptions have in common; None for a failure that is no exception of a rank's code."""
    if failure.kind != "error":
        return None
    return failure.step, _ADDRESS.sub("0x", failure.message), failure.frames, failure.line


def _times(count: int) -> str:
    return "restarted once" if count == 1 else f"restarted {count} times"
