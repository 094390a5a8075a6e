"""Recordings of trainings: the summaries of all ranks joined to one of each tensor, and files of them.

Model: a tensor of a step has a key: the step, the kind and the name. Its summary is the sum over its parts. Ranks that
hold the same part are copies: one counts, and the largest distance to another is kept beside it. `losses` and norms are
tensors of one number. The tensors of a step are in the order in which they come about: outputs of the forward pass, the
loss, gradients from the last layer to the first, the norm, the state after the update.

A file holds the recording of a plan, and recordings of the trainings in one process by which rounding is measured
(rounding_bounds.py). It is a safetensors file, and has all that a comparison needs: two machines, or two versions of
dslc, need not have the same job file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from dslc.compiler.facts.untrusted_files import atomic_write, parse_json, recreate_file
from dslc.compiler.ir.codec import from_json, to_json
from dslc.dsl.record import Record, record

if TYPE_CHECKING:
    import numpy as np

    from dslc.runtime.measure.observe import Observation
    from dslc.runtime.step.tensor_summaries import TensorSummary

Array: TypeAlias = "np.ndarray[Any, Any]"
FORMAT, SUFFIX = 2, ".recording"  # of the file
LOSS, OUTPUT, GRADIENT, NORM, STATE = "loss", "output", "gradient", "norm", "state"
_FORMAT_NAME = "recording"
_ORDER = (OUTPUT, LOSS, GRADIENT, NORM, STATE)


class RecordingError(Exception):
    """A file that is no recording, or of another format; the text says which."""


@record
class TensorKey(Record):
    step: int
    kind: str
    name: str = ""


@record
class CopyDistance(Record):
    """A rank whose copy of a part differs from `reference`'s."""

    rank: int
    reference: int
    distance: float


@record
class RecordedStep(Record):
    """The begin of a step: the samples and a digest of each, the learning rate and the divisor of the losses."""

    step: int
    samples: tuple[int, ...]
    digests: tuple[str, ...]
    lr: float
    number: float


@dataclass(kw_only=True)
class TensorRecording:
    """The tensors of a training, by key, in order. `numbers`: of the whole tensor, and of these nonfinite ones."""

    name: str
    description: str = ""
    lines: Mapping[str, str] = field(default_factory=dict)  # of the job, by the name of a module or parameter
    steps: list[RecordedStep] = field(default_factory=list)
    sums: dict[TensorKey, Array] = field(default_factory=dict)
    numbers: dict[TensorKey, tuple[int, int]] = field(default_factory=dict)
    shapes: dict[TensorKey, tuple[int, ...]] = field(default_factory=dict)  # of an output, for one sample
    copies: dict[TensorKey, CopyDistance] = field(default_factory=dict)
    precision: str = "float32"
    by_nature: tuple[str, ...] = ()  # reasons why plans of this job differ by more than rounding

    def keys_of(self, step: int) -> list[TensorKey]:
        return [key for key in self.sums if key.step == step]


def join_ranks(name: str, seen: Observation, single: TensorRecording | None = None) -> TensorRecording:
    """Returns the recording of a training from the files of its ranks. `single` is the recording of one process, whose
    outputs show which ones a tensor axis cuts.
    """
    import numpy as np

    joined = TensorRecording(name=name)
    rows: dict[TensorKey, list[tuple[int, TensorSummary, Array]]] = {}
    order: dict[int, list[TensorKey]] = {}
    for rank in range(len(seen.ranks)):
        summaries, sums = seen.summaries(rank)
        for summary, values in zip(summaries, sums, strict=True):
            key = TensorKey(step=summary.step, kind=summary.kind, name=summary.name)
            if key not in rows:
                order.setdefault(summary.step, []).append(key)
            rows.setdefault(key, []).append((rank, summary, values))
    for place, one in enumerate(seen.ranks[0]):
        ranks = [steps[place] for steps in seen.ranks]
        pairs = sorted(
            pair for each in ranks for pair in zip(each.samples, each.digests or [""] * len(each.samples), strict=False)
        )
        joined.steps.append(
            RecordedStep(
                step=one.step,
                samples=tuple(sorted(sample for each in ranks for sample in each.samples)),
                digests=tuple(digest for _, digest in pairs),
                lr=one.lr,
                number=one.number,
            )
        )
        loss = sum(each.total for each in ranks) / max(1.0, one.number)
        by_kind: dict[str, list[TensorKey]] = {kind: [] for kind in _ORDER}
        for key in order.get(one.step, ()):
            by_kind[key.kind].append(key)
        by_kind[GRADIENT].reverse()
        by_kind[LOSS] = [TensorKey(step=one.step, kind=LOSS)]
        by_kind[NORM] = [TensorKey(step=one.step, kind=NORM)]
        for kind in _ORDER:
            for key in by_kind[kind]:
                if kind in (LOSS, NORM):
                    value = loss if kind == LOSS else one.norm
                    is_finite = math.isfinite(value)
                    joined.sums[key], joined.numbers[key] = (
                        np.array([value if is_finite else 0.0]),
                        (1, int(not is_finite)),
                    )
                else:
                    _join(joined, key, rows[key], single)
    return joined


def _join(
    joined: TensorRecording,
    key: TensorKey,
    rows: Sequence[tuple[int, TensorSummary, Array]],
    single: TensorRecording | None,
) -> None:
    """Adds the summary of a tensor, for the layout by which its parts make the whole."""
    import numpy as np

    for layout in dict.fromkeys(summary.layout for _, summary, _ in rows):
        parts: dict[tuple[tuple[int, int], ...], list[tuple[int, TensorSummary, Array]]] = {}
        for rank, summary, values in rows:
            if summary.layout == layout:
                parts.setdefault(summary.part, []).append((rank, summary, values))
        numbers = sum(copies[0][1].numbers for copies in parts.values())
        shape = next(iter(parts.values()))[0][1].shape
        if single is not None and key in single.shapes:
            is_share = shape[-1:] != single.shapes[key][-1:]
            if numbers != single.numbers[key][0] or is_share != (layout == "share"):
                continue
        if key.kind == OUTPUT:
            joined.shapes[key] = shape
        joined.sums[key] = np.sum([copies[0][2] for copies in parts.values()], axis=0)
        joined.numbers[key] = numbers, sum(copies[0][1].nonfinite for copies in parts.values())
        worst = max(_copy_distances(parts.values()), key=lambda each: each.distance, default=None)
        if worst is not None and worst.distance > 0:
            joined.copies[key] = worst
        return


def _copy_distances(parts: Any) -> Iterator[CopyDistance]:

    for copies in parts:
        (first, _, values), *others = copies
        for rank, summary, other in others:
            distance = math.dist(other, values)
            if summary.nonfinite != copies[0][1].nonfinite:
                distance = math.inf
            yield CopyDistance(rank=rank, reference=first, distance=distance)


# ------------------------------------------------------------------------------------------------------------- files


def write_recording(path: str, recording: TensorRecording, bounds: Mapping[TensorKey, float]) -> None:
    """Writes a recording, with the measured rounding of each of its tensors. Raises OSError."""
    import numpy as np
    from safetensors.numpy import save

    width = max((len(sums) for sums in recording.sums.values()), default=1)
    table = np.zeros((len(recording.sums), width))
    rows = []
    for place, (key, sums) in enumerate(recording.sums.items()):
        table[place, : len(sums)] = sums
        copies = recording.copies.get(key)
        rows.append(
            [
                to_json(key),
                len(sums),
                *recording.numbers[key],
                bounds.get(key),
                to_json(copies) if copies else None,
                list(recording.shapes.get(key, ())),
            ]
        )
    header = {
        "name": recording.name,
        "description": recording.description,
        "lines": dict(recording.lines),
        "steps": to_json(recording.steps),
        "precision": recording.precision,
        "by_nature": list(recording.by_nature),
        "rows": rows,
    }
    described = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)  # may be too long for metadata
    content = save({"sums": table, "header": described}, {_FORMAT_NAME: str(FORMAT)})
    with atomic_write(path) as part, open(recreate_file(part), "wb") as file:
        file.write(content)


def is_recording(path: str) -> bool:
    return path.endswith(SUFFIX) and os.path.isfile(path)


def read_recording(path: str) -> tuple[TensorRecording, dict[TensorKey, float]]:
    """Returns a recording and the rounding of its tensors. Raises RecordingError if the file is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            if (file.metadata() or {}).get(_FORMAT_NAME) != str(FORMAT):
                raise RecordingError(f"{path} has no recording of format {FORMAT}, which this dslc reads")
            header: dict[str, Any] = parse_json(file.get_tensor("header").tobytes().decode())
            table: Array = file.get_tensor("sums")
        recording = TensorRecording(
            name=header["name"],
            description=header["description"],
            lines=header["lines"],
            steps=[from_json(RecordedStep, each) for each in header["steps"]],
            precision=header["precision"],
            by_nature=tuple(header["by_nature"]),
        )
        bounds = {}
        for values, row in zip(table, header["rows"], strict=True):
            described, width, numbers, nonfinite, bound, copies, shape = row
            key = from_json(TensorKey, described)
            recording.sums[key], recording.numbers[key] = values[:width], (numbers, int(nonfinite))
            if bound is not None:
                bounds[key] = bound
            if key.kind == OUTPUT:
                recording.shapes[key] = tuple(shape)
            if copies is not None:
                recording.copies[key] = from_json(CopyDistance, copies)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise RecordingError(f"{path} is no recording: {error}") from None
    return recording, bounds
