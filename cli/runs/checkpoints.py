"""Finds the weights for `evaluate`, `predict` and `export`, and checks that they fit a job. Needs no torch.

Model: `--checkpoint` names a checkpoint (`step-00000050`), a folder of them, a run directory, or a `.safetensors` file;
`best` is the best checkpoint of the newest run that has one. Without it, the newest in `checkpoint.dir` and in the runs
under `runs/<job>/` is taken. Of a folder the newest undamaged one is taken, and damaged ones are named; of a run
directory without one the final weights.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from dslc.compiler.facts.checkpoint_names import MANIFEST
from dslc.compiler.facts.weights_file import NAME as WEIGHTS
from dslc.compiler.facts.weights_file import Unreadable, entries
from dslc.compiler.ir.number_text import path_text
from dslc.compiler.model.model import ModelGraph
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.language.job import JobSpec
from dslc.dsl.plain import plain
from dslc.runtime.checkpoint.files import (
    BEST,
    Manifest,
    Shapes,
    checkpoints_in,
    damage,
    is_checkpoint,
    look,
    misfitting_tensors,
)
from dslc.terminal.exit_codes import JOB_AT_FAULT, CommandFailedError


class NoCheckpoint(CommandFailedError):
    """No checkpoint was found; the text names the places searched, and the remedy."""


class WeightMismatchError(CommandFailedError):
    """The weights belong to another model than the job's, or cannot be read."""


@dataclass(frozen=True, kw_only=True)
class SelectedWeights:
    path: str
    manifest: Manifest | None

    def __str__(self) -> str:
        shown = path_text(self.path)
        return f"{shown} (step {self.manifest.step:,})" if self.manifest else shown


def select_weights(job: JobSpec, asked: str | None) -> SelectedWeights:
    """Returns the checkpoint that is asked for, else the newest of the job. Raises NoCheckpoint."""
    if asked == BEST and not os.path.lexists(asked):
        return _best_weights(job)
    if asked is not None:
        path = os.path.abspath(os.path.expanduser(asked))
        if not os.path.exists(path):
            raise NoCheckpoint(f"there is no {asked}")
        found = _weights_in(path)
        if found is None:
            raise NoCheckpoint(
                f"{asked} is not a checkpoint (a folder `step-00000050` with a {MANIFEST}), a folder that holds one, "
                "a run directory or a .safetensors file"
            )
        return found
    places = _places(job)
    for place in sorted(places, key=_age, reverse=True):
        found = _weights_in(place)
        if found is not None:
            return found
    looked = [os.path.join("runs", job.name, "*"), *([job.checkpoint.dir] if job.checkpoint.dir else [])]
    raise NoCheckpoint(
        f"there is no checkpoint of `{job.name}` in {' or '.join(looked)}: train first (`dslc run`), or name one with "
        "--checkpoint"
    )


def _best_weights(job: JobSpec) -> SelectedWeights:
    """Returns the checkpoint that the link of the newest run names. Raises NoCheckpoint."""
    for place in sorted(_places(job), key=_age, reverse=True):
        for link in (os.path.join(place, BEST), os.path.join(place, "checkpoints", BEST)):
            if os.path.islink(link):
                path = os.path.join(os.path.dirname(link), os.readlink(link))
                found, reasons = _open_checkpoint(path)
                if found is None:
                    raise NoCheckpoint(f"{link}, which is {path}: {'; '.join(reasons)}")
                return found
    raise NoCheckpoint(
        f"no run of `{job.name}` has a best checkpoint: `checkpoint.best = lowest(loss)` keeps one; --checkpoint also "
        "takes the path of a checkpoint"
    )


def _places(job: JobSpec) -> list[str]:
    """Returns the places of the job's checkpoints: its own folder, its run directories, and a sweep's."""
    runs = os.path.join(os.path.abspath("runs"), glob.escape(job.name))
    found = [path for depth in ("*", os.path.join("*", "*")) for path in glob.glob(os.path.join(runs, depth))]
    own = [job.checkpoint.dir] if job.checkpoint.dir and os.path.isdir(job.checkpoint.dir) else []
    return [*own, *(path for path in found if _is_run(path))]


def _is_run(path: str) -> bool:
    return os.path.isdir(path) and (
        os.path.exists(os.path.join(path, WEIGHTS)) or bool(checkpoints_in(os.path.join(path, "checkpoints")))
    )


def _age(place: str) -> float:
    return max((_time(path) for path in _candidates(place)), default=0.0)


def _candidates(place: str) -> Iterator[str]:
    yield from checkpoints_in(place)
    if not is_checkpoint(place):
        yield from checkpoints_in(os.path.join(place, "checkpoints"))
        if os.path.isfile(os.path.join(place, WEIGHTS)):
            yield os.path.join(place, WEIGHTS)


def _time(path: str) -> float:
    try:
        return os.path.getmtime(os.path.join(path, MANIFEST) if os.path.isdir(path) else path)
    except OSError:
        return 0.0


def _weights_in(place: str) -> SelectedWeights | None:
    """Returns the weights to take from a place that exists. Raises NoCheckpoint if all there are damaged."""
    if os.path.isfile(place):
        return SelectedWeights(path=place, manifest=None) if place.endswith(".safetensors") else None
    passed_over: list[str] = []
    for path in _candidates(place):
        found, reasons = _open_checkpoint(path)
        if found is not None:
            for each in passed_over:
                print(plain(f"skipped {each}"), file=sys.stderr)
            return found
        passed_over.append(f"{path}: {'; '.join(reasons)}")
    if passed_over:
        raise NoCheckpoint("\n".join([f"no checkpoint in {place} is whole", *passed_over]))
    return None


def _open_checkpoint(path: str) -> tuple[SelectedWeights | None, list[str]]:
    if os.path.isfile(path):
        return SelectedWeights(path=path, manifest=None), []
    seen = look(path)
    reasons = [seen.reason] if seen.manifest is None else damage(path, seen.manifest)
    return (None, reasons) if reasons else (SelectedWeights(path=path, manifest=seen.manifest), [])


# -------------------------------------------------------------------------------------------------- whether it fits


def tensors_of(model: ModelGraph, there: Shapes) -> Shapes:
    """Returns a checkpoint's tensors of `model`, without buffers that are not in `there`: state may leave them out."""
    found = {q.name: q.shape for layer in model.layers for q in layer.parameters if q.tied_to is None}
    kept = {
        b.name: b.shape for layer in model.layers for b in layer.buffers if (b.saved if model.root else b.name in there)
    }
    return found | kept


def check_compatibility(taken: SelectedWeights, analysis: Analysis) -> None:
    """Raises WeightMismatchError if the checkpoint is of another model, as far as is known before anything is read."""
    if taken.manifest is not None:
        theirs = taken.manifest.fit.tensors
    else:
        try:
            theirs = {name: entry.shape for name, entry in entries(taken.path).items()}
        except Unreadable as reason:
            raise WeightMismatchError(str(reason), JOB_AT_FAULT) from None
    if theirs is None or analysis.model is None:
        return
    ties = dict(analysis.model.ties)  # a file of weights may have them under each name
    own = {name: shape for name, shape in theirs.items() if name not in ties}
    wrong = misfitting_tensors(own, tensors_of(analysis.model, own))
    if wrong:
        raise WeightMismatchError(f"{taken} does not fit {analysis.job.source.name}: {wrong}", JOB_AT_FAULT)
