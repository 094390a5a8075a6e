"""Loads one training of a job with a `sweep`, for commands that take one, and says on standard error which."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dslc.dsl.meaning.load import LoadResult, load_each
from dslc.dsl.meaning.resolve import Combination
from dslc.dsl.plain import plain
from dslc.runs.checkpoints import SelectedWeights, select_weights
from dslc.runs.sweep_file import read_sweep

_FIRST = "this is the first one, and `--set` chooses another"


def load_first(path: str, settings: Sequence[str]) -> LoadResult:
    """Loads a job; of a sweep the first training."""
    loaded, combinations = load_each(path, settings)
    _print_training(path, loaded, 0, _FIRST)
    return combinations[0]


def load_trained(
    path: str, settings: Sequence[str], checkpoint: str | None
) -> tuple[LoadResult, SelectedWeights | None]:
    """Loads a job; of a sweep the training that wrote the checkpoint, or the first one if none of them did, with the
    checkpoint, which was looked for. Raises NoCheckpoint.
    """
    loaded, combinations = load_each(path, settings)
    if loaded.job is None or not loaded.combinations or loaded.report.errors:
        return loaded, None
    selected = select_weights(loaded.job, checkpoint)
    trained = _settings_that_trained(selected.path)
    wrote = [n for n, combination in enumerate(loaded.combinations) if set(combination) <= set(trained)]
    number, which = (wrote[0], "this one wrote the checkpoint") if wrote else (0, _FIRST)
    _print_training(path, loaded, number, which)
    return combinations[number], selected


def _settings_that_trained(path: str) -> Combination:
    """Returns the settings of the sweep's training in whose folder a path lies; none outside of a sweep."""
    folder, name = os.path.split(os.path.abspath(path))
    while name:
        if (sweep := read_sweep(folder)) and name in (values := dict(sweep.runs)):
            return tuple(zip(sweep.paths, values[name], strict=True))
        folder, name = os.path.split(folder)
    return ()


def _print_training(path: str, loaded: LoadResult, number: int, which: str) -> None:
    if loaded.combinations:
        values = ", ".join(f"{path} = {text}" for path, text in loaded.combinations[number])
        count = len(loaded.combinations)
        print(plain(f"{path} sweeps over {count} trainings; {which}: {values}"), file=sys.stderr)
