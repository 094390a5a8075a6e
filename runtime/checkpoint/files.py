"""The folders of checkpoints: their names and manifests, tests for damage, and the choice of a checkpoint that fits a
job.

Model: a checkpoint is a folder `step-00000050` with the files of `torch.distributed.checkpoint` and `manifest.json`.
The manifest has the step and sample of the training, and the size and checksum of every file and of itself. It also has
the properties that a job must share to resume from it (`Compatibility`). A checkpoint is written as
`step-00000050.part`, and renamed once it is complete; a removed one is renamed to `step-00000050.gone` first. So a
folder with the plain name is complete, and `damage` finds later damage. Where the job asks for the best checkpoint, a
link `best` names it.

Contract: nothing here needs torch. Only folders of checkpoints are ever removed: of a link only the link, never its
target; a folder that holds other files is refused before the first step. Reading a checkpoint returns the numbers that
were written, or raises `CorruptCheckpointError`.

Limits: checksums find accidents, not forgery. A forged checkpoint can have wrong numbers, and nothing more: it is read
without running anything (transport/unpickling.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import reprlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from dslc.compiler.facts.checkpoint_names import MANIFEST, NAME, name_of, names_in
from dslc.compiler.facts.untrusted_files import naming, open_file, read_text
from dslc.compiler.ir.codec import DecodeError, from_json, parse, to_json
from dslc.compiler.ir.program import JobProgram

FORMAT = 2
# The goals, by which their progress is kept. `best` is also the name of a link.
BEST, STOPPING, PLATEAU = "best", "early_stopping", "plateau"
METADATA = ".metadata"  # torch's index: the file of each part of each tensor
_LEFT = re.compile(r"step-\d{8,}\.(part|gone)")
_FILES = re.compile(r"__\d+_\d+\.distcp|\.metadata.*|manifest\.json")  # the files in a checkpoint's folder
_PIECE = 1 << 22  # bytes read at once
_MANIFEST_LIMIT = 1 << 28  # bytes of a manifest that is read
_NUMBER_LIMIT = 2**53  # counts and seconds stay far below, and seeds are no counts

Shapes = Mapping[str, tuple[int, ...]]


class CorruptCheckpointError(Exception):
    """A checkpoint is not as it was written; the text says how."""


@dataclass(frozen=True, kw_only=True)
class File:
    size: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Compatibility:
    """The properties that a job must share with a checkpoint to resume from it: the same tensors, the same optimizer,
    and the same samples in the same order. All else (ranks, sharding, precision, steps, learning rate) may differ.
    `tensors` are the model's parameters and persistent buffers, a tied weight once; None if they are not known.
    """

    tensors: Shapes | None
    optimizer: str
    states: tuple[str, ...]  # names of the optimizer's state for each parameter
    seed: int
    shuffle: bool
    batch: int
    train_samples: int  # 0 for a stream without a length, as the next
    steps_per_epoch: int
    order: str = ""  # of a sampler or a mixture
    numbers: str = ""  # BLAKE2b of the numbers by which a sampler orders the samples; "" if they are not known
    stream: tuple[int, ...] | None = None  # shards, lanes and window of a stream
    adamw: tuple[str, ...] | None = None  # matrices that Muon leaves to AdamW; None if they are not known
    frozen: tuple[str, ...] = ()  # patterns of parameters that do not train


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The best value of a metric over the evaluations so far, None if none was finite; its step; and the number of
    evaluations since. If the learning rate follows the metric (runtime/loop/best_metric.py), `factor` is its present
    share of the full rate, and `cooldown` the number of evaluations that do not count yet.
    """

    metric: str
    highest: bool
    best: float | None = None
    step: int = 0
    since: int = 0
    factor: float = 1.0
    cooldown: int = 0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of `manifest.json`. `samples` and `seconds` are as in metrics.jsonl after `step` steps. `goals` has
    the progress of each goal; `stream` the place in each lane of a stream (data/streams.py). `next_rate` is the
    learning rate of the step that follows in a training of `steps` steps; None if it is not known.
    """

    format: int
    step: int
    samples: int
    seconds: float
    job: str
    plan_hash: str
    world_size: int
    fit: Compatibility
    files: Mapping[str, File]
    goals: Mapping[str, Progress] = field(default_factory=dict)
    stream: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0
    next_rate: float | None = None
    skipped_steps: tuple[int, ...] = ()  # steps whose batches are skipped after a spike of the loss
    losses: tuple[float, ...] = ()  # the last ones, if spikes are looked for (loop/loss_spikes.py)


@dataclass(frozen=True, kw_only=True)
class CheckpointCandidate:
    """A checkpoint's folder; its manifest, or the reason why it cannot be used."""

    path: str
    manifest: Manifest | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen checkpoint, if any, and those that were passed over, each with the reason; `whole` of them are not
    damaged.
    """

    taken: CheckpointCandidate | None
    passed_over: tuple[CheckpointCandidate, ...]
    whole: int = 0


# ------------------------------------------------------------------------------------------------------- what fits


def fit_of(job: JobProgram, tensors: Shapes | None, numbers: str = "") -> Compatibility:
    """Returns the properties that `job` needs in a checkpoint. None and "" are not compared."""
    stream = job.data.stream
    endless = stream is not None and not stream.length
    return Compatibility(
        tensors=None if tensors is None else {name: tuple(shape) for name, shape in tensors.items()},
        optimizer=job.optimizer.kind,
        states=job.optimizer.state,
        seed=job.data.seed,
        shuffle=job.data.shuffle,
        batch=job.data.batch,
        train_samples=0 if endless else job.data.train_samples,
        steps_per_epoch=0 if endless else job.steps_per_epoch,
        order=job.data.order,
        numbers=numbers,
        stream=None if stream is None else (stream.shards, stream.lanes, stream.window),
        adamw=None if job.optimizer.adamw is None else tuple(sorted(name for name, _ in job.optimizer.adamw)),
        frozen=job.model.frozen,
    )


_ADAMS = {"adam", "qadam", "onebitadam"}  # optimizers whose state means the same


def same_state(first: str, second: str) -> bool:
    """True if an optimizer can go on with the state of another, by their kinds."""
    kinds = {first.lower(), second.lower()}
    return len(kinds) == 1 or kinds <= _ADAMS


def misfits(manifest: Manifest, fit: Compatibility, steps: int) -> list[str]:
    """Returns the reasons why a job of `steps` steps cannot resume from a checkpoint; [] if it can."""
    reasons = incompatibilities(manifest.fit, fit)
    if manifest.step > steps:
        reasons.append(f"it is at step {manifest.step}, and the job ends after {steps}")
    return reasons


def _trained(names: set[str], frozen: tuple[str, ...]) -> set[str]:
    return {name for name in names if not any(fnmatchcase(name, pattern) for pattern in frozen)}


def incompatibilities(checkpoint: Compatibility, fit: Compatibility) -> list[str]:
    """Returns the properties of a checkpoint that are not those that a job needs, in words."""
    tensor_reason = misfitting_tensors(checkpoint.tensors, fit.tensors)
    reasons = [tensor_reason] if tensor_reason else []
    if not same_state(checkpoint.optimizer, fit.optimizer):
        reasons.append(f"its optimizer is {checkpoint.optimizer}, and the job's {fit.optimizer}")
    elif set(checkpoint.states) != set(fit.states):
        kept_states, expected_states = (", ".join(states) or "nothing" for states in (checkpoint.states, fit.states))
        reasons.append(f"its optimizer keeps {kept_states} for each parameter, and the job's {expected_states}")
    elif checkpoint.adamw is not None and fit.adamw is not None:
        only_there = _trained(set(checkpoint.adamw) - set(fit.adamw), fit.frozen)
        only_here = _trained(set(fit.adamw) - set(checkpoint.adamw), checkpoint.frozen)
        if only_there:
            reasons.append(f"its AdamW updates `{min(only_there)}`, and the job's Muon does")
        elif only_here:
            reasons.append(f"its Muon updates `{min(only_here)}`, and the job's AdamW does")
    for name, label in (
        ("seed", "seed"),
        ("shuffle", "shuffling"),
        ("batch", "global batch"),
        ("train_samples", "number of training samples"),
        ("steps_per_epoch", "number of steps in an epoch"),
        ("order", "order of samples"),
    ):
        theirs, ours = getattr(checkpoint, name), getattr(fit, name)
        if theirs != ours:
            reasons.append(f"its {label} is {value_text(theirs)}, and the job's {value_text(ours)}")
    if checkpoint.numbers and fit.numbers and checkpoint.numbers != fit.numbers:
        reasons.append("its samples had other weights, classes or lengths, by which the sampler orders them")
    if checkpoint.stream != fit.stream:
        reasons.append(f"its {_stream(checkpoint)}, and the job's {_stream(fit)}")
    return reasons


def _stream(fit: Compatibility) -> str:
    if fit.stream is None:
        return "data is no stream"
    shards, lanes, window = fit.stream
    return f"data is a stream of {shards} shards, {lanes} at a time, {window} samples shuffled at a time"


def misfitting_tensors(theirs: Shapes | None, ours: Shapes | None) -> str:
    """Describes the first difference between the tensors of a checkpoint and of a model; "" if they agree."""
    if theirs is None or ours is None:
        return ""
    for name, shape in ours.items():
        if name not in theirs:
            return f"its model has no `{name}`"
        if tuple(theirs[name]) != tuple(shape):
            return f"its `{name}` is of shape {_shape(theirs[name])}, and the job's of {_shape(shape)}"
    extra_names = [name for name in theirs if name not in ours]
    return f"its model has a `{extra_names[0]}`, and the job's has none" if extra_names else ""


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def value_text(value: int | bool | str) -> str:
    """Returns a value of a `Compatibility` in words."""
    if isinstance(value, str):
        return f"`{value}`" if value else "that of each sample once"
    return ("off", "on")[value] if isinstance(value, bool) else f"{value:,}"


# ------------------------------------------------------------------------------------------------- reading, choosing


def folder_of(job: JobProgram, run_dir: str) -> str:
    return job.checkpoint.folder or os.path.join(run_dir, "checkpoints")


def is_checkpoint(path: str) -> bool:
    return bool(NAME.fullmatch(os.path.basename(os.path.normpath(path)))) or os.path.exists(
        os.path.join(path, MANIFEST)
    )


def checkpoints_in(place: str) -> list[str]:
    """Returns the paths of the checkpoints in a folder, the newest first; `place` itself if it is one."""
    if is_checkpoint(place):
        return [place] if os.path.isdir(place) else []
    try:
        return [os.path.join(place, name) for name in reversed(names_in(place))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def look(path: str) -> CheckpointCandidate:
    try:
        return CheckpointCandidate(path=path, manifest=read_manifest(path))
    except CorruptCheckpointError as damage:
        return CheckpointCandidate(path=path, manifest=None, reason=str(damage))


def read_manifest(path: str) -> Manifest:
    """Returns the manifest of the checkpoint at `path`. Raises CorruptCheckpointError."""
    try:
        document = parse(read_text(os.path.join(path, MANIFEST), _MANIFEST_LIMIT))
        content, checksum, number = document["manifest"], document["checksum"], document["manifest"]["format"]
        if checksum != _checksum_of(content):
            raise CorruptCheckpointError(f"{MANIFEST} has another checksum than when it was written")
        if number != FORMAT:
            raise CorruptCheckpointError(f"it is of format {number}, and this version of dslc reads {FORMAT}")
        manifest = from_json(Manifest, content)
        _check_numbers(to_json(replace(manifest, stream={})), "Manifest")
    except FileNotFoundError:
        raise CorruptCheckpointError(f"it has no {MANIFEST}") from None
    except DecodeError as error:
        raise CorruptCheckpointError(f"{MANIFEST} cannot be read ({error})") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpointError(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from None
    for name in manifest.files:
        if not is_plain_name(name):
            raise CorruptCheckpointError(f"it names {name}, which is not a file of its folder")
    return manifest


def _check_numbers(value: object, place: str) -> None:
    """Raises DecodeError if a number of a manifest is none that a training can have written."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name != "seed":
                _check_numbers(inner, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_numbers(inner, place)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        negative = value < 0 and not place.endswith((".best", ".losses"))
        if negative or abs(value) > _NUMBER_LIMIT or not math.isfinite(value):
            raise DecodeError(f"{place} is {reprlib.repr(value)}")


def is_plain_name(name: str) -> bool:
    """True for the name of a file within a folder, false for a path that leads elsewhere."""
    return name == os.path.basename(name) and name not in ("", os.curdir, os.pardir)


def damage(path: str, manifest: Manifest, names: Iterable[str] | None = None) -> list[str]:
    """Returns the faults of a checkpoint's files (with `names`, of those files); reads them whole."""
    reasons = []
    for name in manifest.files if names is None else names:
        description, file = manifest.files[name], os.path.join(path, name)
        try:
            size = os.path.getsize(file)
            if size != description.size:
                reasons.append(f"{name} has {size:,} bytes, and had {description.size:,} when it was written")
            elif checksum(file) != description.checksum:
                reasons.append(f"{name} has another checksum than when it was written")
        except FileNotFoundError:
            reasons.append(f"{name} is missing")
        except OSError as error:
            reasons.append(f"{name} cannot be read ({error.strerror})")
    return reasons


def choose(
    candidates: Iterable[CheckpointCandidate],
    fit: Compatibility,
    steps: int,
    examine: Callable[[str, Manifest], list[str]] = damage,
) -> Choice:
    """Returns the first of `candidates` (the newest first) that fits and is undamaged. `examine` reads the files of the
    candidates that fit.
    """
    skipped_candidates: list[CheckpointCandidate] = []
    fitting = 0
    for candidate in candidates:
        if candidate.manifest is None:
            skipped_candidates.append(candidate)
            continue
        reasons = misfits(candidate.manifest, fit, steps)
        if reasons:
            fitting += 1
        else:
            reasons = examine(candidate.path, candidate.manifest)
        if not reasons:
            return Choice(taken=candidate, passed_over=tuple(skipped_candidates), whole=fitting)
        skipped_candidates.append(
            CheckpointCandidate(path=candidate.path, manifest=candidate.manifest, reason="; ".join(reasons))
        )
    return Choice(taken=None, passed_over=tuple(skipped_candidates), whole=fitting)


# ---------------------------------------------------------------------------------------------- writing, publishing


def checksum(path: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open_file(path) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def describe_file(path: str) -> File:
    return File(size=os.path.getsize(path), checksum=checksum(path))


def publish(part: str, manifest: Manifest) -> str:
    """Completes a checkpoint whose other files are at `part`, gives it its name, and returns its path."""
    content = to_json(manifest)
    path = os.path.join(part, MANIFEST)
    with naming(path), open(path, "w", encoding="utf-8") as file:
        json.dump({"checksum": _checksum_of(content), "manifest": content}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(part)
    folder = os.path.dirname(part)
    path = os.path.join(folder, name_of(manifest.step))
    if os.path.lexists(path):
        remove(path)  # a damaged one that was passed over when the training resumed from an older one
    os.rename(part, path)
    _sync(folder)
    return path


def remove(path: str) -> None:
    """Removes a checkpoint without ever leaving a half that passes for one."""
    os.rename(path, path + ".gone")
    _delete(path + ".gone")


def drop(part: str) -> None:
    """Removes what there is of a checkpoint that could not be written or removed, if that is possible."""
    with contextlib.suppress(OSError):
        _delete(part)


def point(folder: str, name: str) -> None:
    """Makes `best`, in a folder of checkpoints, a link to the one called `name`; never leaves it without a target."""
    link = os.path.join(folder, BEST)
    with naming(link):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(link + ".part")  # of a training that was killed
        os.symlink(name, link + ".part")
        os.replace(link + ".part", link)
    _sync(folder)


def point_nowhere(folder: str) -> None:
    link = os.path.join(folder, BEST)
    if os.path.islink(link):
        os.unlink(link)


def clear_away(folder: str) -> None:
    """Removes checkpoints that an earlier training left half written or half removed, if that is possible."""
    for name in os.listdir(folder):
        if _LEFT.fullmatch(name):
            drop(os.path.join(folder, name))


def foreign(folder: str, best: bool = False) -> str:
    """Returns the path in `folder` that is named like a checkpoint, or a part of one, but is none of ours, so that a
    training would overwrite it; "" if there is none. With `best`, that includes what has the name of the link.
    """
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if best and name == BEST and not os.path.islink(path):
            return path
        if (NAME.fullmatch(name) or _LEFT.fullmatch(name)) and not _ours(path):
            return path
    return ""


def _ours(path: str) -> bool:
    """True if `path` has only files of a checkpoint, or is a link to nothing."""
    try:
        return all(_FILES.fullmatch(name) for name in os.listdir(path))
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False


def _delete(path: str) -> None:
    """Removes a folder; of a link to one, which may be kept where there is more room, the link alone."""
    if os.path.islink(path):
        os.unlink(path)
    else:
        shutil.rmtree(path)


def _sync(folder: str) -> None:
    """Syncs a folder, so that the names in it survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum_of(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
