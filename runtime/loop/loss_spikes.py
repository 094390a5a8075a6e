"""Responds to spikes of the loss: the training goes back and skips batches, ends, or notes it (`train.on_spike`).

Model: the ranks reduce the loss of each step, so all decide alike. A spike is a loss above the mean of the `window`
losses before it by more than `deviations` of their standard deviations, and by at least `LEAST` of the mean. A rewind
ends the ranks by an exception, before the state after the spike is saved. The launcher starts them again (restarts.py).
They resume from the last checkpoint at least `steps` before the spike, and come to the same batches in the same order.
In the steps of the skipped batches there is no pass and no update.

Contract: `skipped_batches.json` in the run directory lists each spike with the numbers of the skipped samples. It is
written before the ranks end. Checkpoints have the skipped steps and the window, so that a resume on any ranks decides
and skips alike. Losses that are not finite are left to `train.on_nonfinite`.

Limits: on GPUs the host waits for the device in each step.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from dslc.compiler.facts.untrusted_files import read_text, replacing
from dslc.compiler.ir.program import JobProgram, RankPlace, SpikeStep
from dslc.runtime.data.sampler import shares, steps_per_epoch
from dslc.runtime.process.records import SKIPPED, note

LEAST = 0.01
_SHOWN = 8  # samples in a message
_LONGEST = 1 << 24  # bytes of the list that are read


class LossSpikeError(RuntimeError):
    """Ends the ranks after a spike. `told` on rank 0; `rewinds`: the launcher starts them again at once."""

    def __init__(self, message: str, *, is_reported: bool, rewinds: bool) -> None:
        super().__init__(message)
        self.told, self.rewinds, self.lasting = is_reported, rewinds, not rewinds


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A loss far above the losses before it."""

    step: int
    loss: float
    mean: float
    deviation: float

    @property
    def words(self) -> str:
        return (
            f"the loss of step {self.step} is {self.loss:.4g}, a spike: the mean of the losses before it is "
            f"{self.mean:.4g}, with a standard deviation of {self.deviation:.2g}"
        )


def find_spike(step: int, loss: float, losses: Sequence[float], how: SpikeStep) -> Spike | None:
    """Returns the spike that a loss is after the losses of a window; None if it is none."""
    if len(losses) < how.window:
        return None
    mean = sum(losses) / len(losses)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in losses) / len(losses))
    if loss - mean <= max(how.deviations * deviation, LEAST * abs(mean)):
        return None
    return Spike(step=step, loss=loss, mean=mean, deviation=deviation)


class LossSpikes:
    """Follows the loss on one rank. Made by all ranks, before the training resumes; `continues`: the run directory may
    have the list of a start before this one.
    """

    def __init__(self, job: JobProgram, place: RankPlace, how: SpikeStep, run_dir: str, *, continues: bool) -> None:
        self._job, self._place, self._how, self._run_dir = job, place, how, run_dir
        self._path = os.path.join(run_dir, SKIPPED)
        record: dict[str, Any] = {"spikes": [], "rewind_to": None}
        if place.rank == 0 and continues and os.path.exists(self._path):
            record = read_spikes(self._path)
        if job.world_size > 1:
            told = [record]
            dist.broadcast_object_list(told, src=0)
            record = told[0]
        self._spikes: list[dict[str, Any]] = record["spikes"]
        self.rewind_to: int | None = record["rewind_to"]  # the training begins at this step or before
        self._skipped_steps = {step for spike in self._spikes for step in spike["skipped_steps"]}
        self._losses: deque[float] = deque(maxlen=how.window)

    @property
    def skipped_steps(self) -> tuple[int, ...]:
        """The steps, from 1, whose batches are skipped."""
        return tuple(sorted(self._skipped_steps))

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(self._losses)

    def resume(self, skipped_steps: Iterable[int], losses: Iterable[float]) -> None:
        """Takes over what a checkpoint has, once all ranks have gone back to it."""
        self._skipped_steps.update(skipped_steps)
        self._losses.extend(losses)
        if self.rewind_to is not None:
            self.rewind_to = None
            self._write()

    def needs_skip(self, step: int) -> bool:
        return step in self._skipped_steps

    def follow(self, step: int, loss: float, newest_checkpoint: Callable[[], str]) -> None:
        """Takes the loss of a step. Raises LossSpikeError, on all ranks, if the training goes back or ends."""
        if not math.isfinite(loss):
            return
        spike = find_spike(step, loss, self._losses, self._how)
        if spike is not None and self._how.action != "note":
            self._respond(spike, newest_checkpoint)
        if spike is not None and self._place.rank == 0:
            note(self._run_dir, f"{spike.words}; its samples are {_numbers_text(self._samples(step))}")
        self._losses.append(loss)

    def _respond(self, spike: Spike, newest_checkpoint: Callable[[], str]) -> None:
        how = self._how
        rewinds = sum(bool(each["skipped_steps"]) for each in self._spikes)
        again = how.action == "rewind" and rewinds < how.times
        steps = [step for step in range(max(1, spike.step - how.skip + 1), spike.step + 1) if again]
        samples = {step: self._samples(step) for step in steps or [spike.step]}
        self._spikes.append(
            {
                "step": spike.step,
                "loss": spike.loss,
                "mean": spike.mean,
                "deviation": spike.deviation,
                "skipped_steps": steps,
                "samples": {str(step): numbers for step, numbers in samples.items()},
            }
        )
        message = spike.words
        if again:
            self.rewind_to = max(0, spike.step - how.steps)
            message += f"\nthe training goes back to step {self.rewind_to} or before, and skips {_steps_text(steps)}"
        self._write()
        error = LossSpikeError(message, is_reported=self._place.rank == 0, rewinds=again)
        for step, numbers in samples.items():
            error.add_note(f"the batch of step {step} has the samples {_numbers_text(numbers)}")
        if again:
            error.add_note(f"rewind {rewinds + 1} of {how.times} (`train.on_spike`); {SKIPPED} lists all samples")
        elif how.action == "rewind":
            count = f"{how.times} rewind{'s are' if how.times > 1 else ' is'}"
            error.add_note(f"{count} the most that `train.on_spike` allows (`times`)")
        newest = newest_checkpoint()
        if not again and newest:
            error.add_note(f"the last checkpoint is {newest}")
        raise error

    def _samples(self, step: int) -> list[int]:
        """Returns the numbers, in the training split, of the samples of a step's global batch."""
        full_batch = replace(self._place, data_rank=0, data_ranks=1)
        epoch, batch = divmod(step - 1, steps_per_epoch(self._job.data))
        return [int(number) for number in shares(self._job.data, full_batch, epoch, batch)]

    def _write(self) -> None:
        if self._place.rank == 0:
            with replacing(self._path) as file:
                json.dump({"spikes": self._spikes, "rewind_to": self.rewind_to}, file, indent=1)
                file.write("\n")


def read_spikes(path: str) -> dict[str, Any]:
    """Returns the list of spikes of earlier starts. Raises ValueError for a file that another program wrote."""
    try:
        record = json.loads(read_text(path, _LONGEST))
        if all(isinstance(spike["skipped_steps"], list) for spike in record["spikes"]) and "rewind_to" in record:
            return dict(record)
        reason = "it lacks what a training writes"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = str(error)
    raise ValueError(f"{path} does not list skipped batches ({reason}): without the file, none is skipped again")


def _steps_text(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"the batch of step {steps[0]}"
    return f"the batches of steps {steps[0]} to {steps[-1]}"


def _numbers_text(numbers: Sequence[int]) -> str:
    more = f", … ({len(numbers)} in all)" if len(numbers) > _SHOWN else ""
    return ", ".join(map(str, numbers[:_SHOWN])) + more
