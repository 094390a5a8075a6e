"""Chooses the steps of two runs that `dslc bisect` replays: from the last checkpoint before their curves part.

Model: losses that both runs have logged are compared, to the 1e-5 that plans of a job agree to. This chooses where to
begin, and judges nothing. A loss is of the weights before the update of its step. So both sides, and the trainings that
measure rounding, resume from a checkpoint of an earlier step than the last loss that agrees.

Limits: at most `MOST` steps are recorded, up to the step at which the losses part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from dslc.compiler.facts.checkpoint_names import checkpoint_folder, step_of
from dslc.runtime.checkpoint.files import checkpoints_in
from dslc.runtime.process.records import NAME as METRICS

MOST = 200
AGREED = 1e-5


@dataclass(frozen=True, kw_only=True)
class ReplayWindow:
    """Trains from `checkpoint` ("": the beginning) to step `last`, and records from step `first` on."""

    last: int
    first: int = 1
    checkpoint: str = ""
    text: str = ""


def window_from(checkpoint: str, steps: int) -> ReplayWindow:
    """Returns the window of some steps after a checkpoint."""
    begin = step_of(os.path.basename(os.path.normpath(checkpoint)))
    return ReplayWindow(first=begin + 1, last=begin + steps, checkpoint=os.path.abspath(checkpoint))


def window_of_runs(first: str, second: str, steps: int) -> ReplayWindow:
    """Returns the window of two run directories; of the first `steps` steps if their losses do not part."""
    one, other = logged_losses(first), logged_losses(second)
    agreed = 0
    for step in sorted(one.keys() & other.keys()):
        if not abs(one[step] - other[step]) <= AGREED * max(1.0, abs(one[step])):
            break
        agreed = step
    else:
        return ReplayWindow(last=steps, text=f"the {len(one.keys() & other.keys())} logged losses agree")
    saved = [
        path
        for run in (first, second)
        for path in checkpoints_in(checkpoint_folder(run))
        if step_of(os.path.basename(path)) < agreed
    ]
    path = max(saved, key=lambda path: step_of(os.path.basename(path)), default="")
    begin = step_of(os.path.basename(path)) if path else 0
    where = f"the checkpoint of step {begin}" if path else "the beginning"
    return ReplayWindow(
        first=max(begin + 1, step - MOST + 1),
        last=step,
        checkpoint=os.path.abspath(path) if path else "",
        text=f"the logged losses part at step {step}, and agree up to step {agreed}: both are replayed from {where}",
    )


def logged_losses(run: str) -> Mapping[int, float]:
    """Returns the losses of a run's training by step. Raises OSError if it has no records."""
    with open(os.path.join(run, METRICS), encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.endswith("\n")]
    return {
        line["step"]: float("nan") if line["loss"] is None else line["loss"]
        for line in lines
        if line["split"] == "train"
    }
