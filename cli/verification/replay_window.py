"""Chooses the steps of two runs that `dslc bisect` replays: from the last checkpoint before their curves part.

Model: losses that both runs have logged are compared, to the 1e-5 that plans of a job agree to. This chooses where to
begin, and judges nothing. A loss is of the weights before the update of its step. So both sides, and the trainings that
measure rounding, resume from a checkpoint of an earlier step than the last loss that agrees.

Limits: at most `MAX_STEPS` steps are recorded, up to the step at which the losses part.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from dslc.compiler.facts.checkpoint_names import checkpoint_folder, step_of
from dslc.runtime.checkpoint.files import checkpoints_in
from dslc.runtime.process.records import readable_records

MAX_STEPS = 200
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class ReplayWindow:
    """Trains from `checkpoint` ("": the beginning) to step `last`, and records from step `first` on."""

    last: int
    first: int = 1
    checkpoint: str = ""
    text: str = ""


def window_from(checkpoint: str, steps: int) -> ReplayWindow:
    begin = step_of(os.path.basename(os.path.normpath(checkpoint)))
    return ReplayWindow(first=begin + 1, last=begin + steps, checkpoint=os.path.abspath(checkpoint))


def window_of_runs(first: str, second: str, steps: int) -> ReplayWindow:
    """Returns the window of two run directories; of the first `steps` steps if their losses do not part."""
    one, other = logged_losses(first), logged_losses(second)
    logged = sorted(one.keys() & other.keys())
    agreed = 0
    for step in logged:
        if not _is_equal(one[step], other[step]):
            break
        agreed = step
    else:
        text = f"the {len(logged)} logged losses agree" if logged else "the runs have logged no step in common"
        return ReplayWindow(last=steps, text=text)
    saved = [
        path
        for run in (first, second)
        for path in checkpoints_in(checkpoint_folder(run))
        if step_of(os.path.basename(path)) < agreed
    ]
    path = max(saved, key=lambda path: step_of(os.path.basename(path)), default="")
    begin = step_of(os.path.basename(path)) if path else 0
    where = f"the checkpoint of step {begin}" if path else "the beginning"
    begin_recording = max(begin + 1, step - MAX_STEPS + 1)
    left_out = f"; steps before {begin_recording} are not compared" if begin_recording > max(agreed, 1) else ""
    return ReplayWindow(
        first=begin_recording,
        last=step,
        checkpoint=os.path.abspath(path) if path else "",
        text=f"the logged losses part at step {step}, and agree up to step {agreed}: both are replayed from {where}"
        f"{left_out}",
    )


def _is_equal(one: float, other: float) -> bool:
    return abs(one - other) <= LOSS_TOLERANCE * max(1.0, abs(one)) or (math.isnan(one) and math.isnan(other))


def logged_losses(run: str) -> Mapping[int, float]:
    """Returns the losses of a run's training by step, from the lines that can be read. Raises OSError."""
    records = [each for each in readable_records(run) if each["split"] == "train"]
    losses = {each["step"]: each["loss"] for each in records if not isinstance(each.get("loss", []), list)}
    return {step: math.nan if loss is None else loss for step, loss in losses.items()}
