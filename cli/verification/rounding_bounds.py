"""Measures what rounding does to each tensor of a training: the distance that other orders of the same sums explain.

Model: one process trains several times: in float64 (in float32 where the job computes in 16 bits), which is the
reference; in the job's precision; and with the samples of each batch in other orders. The rounding of a tensor is the
largest distance of these from the reference. It is at least half a unit in the last place of the tensor's numbers, as
each of them is rounded when it is stored. If the model cannot be float64, the training in the job's precision is the
reference. Other orders of samples do not change the rounding of an output, so outputs have no bound then. An
output whose first dim does not go sample by sample has no bound either, as other orders mix it.

A loss and a norm are one number, which may be exact by chance. The rounding of the loss is at least the median relative
rounding of the outputs, times the loss. The rounding of a norm is at least that of all gradients together. A tensor of
fewer than `SMALL_TENSOR` numbers has at least the median relative rounding of the tensors of its kind in its step.

A difference is a share of the rounding. One that is more than `SHARE_LIMIT` of it has another cause: a plan sums in
orders, and in pieces, that the measured ones do not have. The limit is the same for all tensors.

Limit: Adam and its kind divide by the size of a gradient. A single number whose gradient nearly vanishes then has most
of the distance of its tensor, and a few orders may all move it less than a plan does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from dslc.verification.comparison import HALF_LAST_PLACE
from dslc.verification.recordings import GRADIENT, LOSS, NORM, OUTPUT, STATE, TensorKey, TensorRecording

SMALL_TENSOR = 32
SHARE_LIMIT = 16.0  # times the rounding; one of 1,872 equal trainings reached 10.1 (docs/bisect.md)
_PLAUSIBLE = 0.1  # of a tensor's norm: rounding is less


def distance(one: TensorRecording, other: TensorRecording, key: TensorKey) -> float:
    """Returns the distance between two recordings of a tensor; infinite if other numbers of it are not finite."""
    if one.numbers[key][1] != other.numbers[key][1]:
        return math.inf
    return math.dist(one.sums[key], other.sums[key])


def norm(recording: TensorRecording, key: TensorKey) -> float:
    return math.hypot(*recording.sums[key])


def measure_bounds(reference: TensorRecording, trainings: Sequence[TensorRecording]) -> dict[TensorKey, float]:
    """Returns the rounding of each tensor of the reference. `trainings`: as it is, and with other orders of samples."""
    (first, *_) = trainings
    last_place = HALF_LAST_PLACE[first.precision]
    bounds: dict[TensorKey, float] = {}
    for key in reference.sums:
        if key.kind == OUTPUT and reference is first:
            continue
        distances = [distance(training, reference, key) for training in trainings if key in training.sums]
        if key.kind == OUTPUT and _mixes_samples(distances, norm(reference, key)):
            continue
        finite = [each for each in distances if math.isfinite(each)]
        stored = HALF_LAST_PLACE["float32"] if key.kind in (GRADIENT, STATE) else last_place
        bounds[key] = max([stored * norm(reference, key), *finite])
    for step in dict.fromkeys(key.step for key in bounds):
        _raise_chance_bounds(reference, bounds, step)
    return bounds


def _mixes_samples(distances: Sequence[float], size: float) -> bool:
    """Returns true of an output whose first dim does not go sample by sample: other orders of samples alone change it
    by far more than rounding does.
    """
    reordered = distances[1:]
    return bool(reordered) and distances[0] <= _PLAUSIBLE * size < min(reordered)


def _raise_chance_bounds(reference: TensorRecording, bounds: dict[TensorKey, float], step: int) -> None:
    """Raises the bounds of tensors of few numbers, which may be exact by chance, in place."""
    keys = reference.keys_of(step)
    for kind in (OUTPUT, GRADIENT, STATE):
        relative = _relative([key for key in keys if key.kind == kind], reference, bounds)
        if relative:
            typical = statistics.median(relative.values())
            for key in relative:
                if reference.numbers[key][0] < SMALL_TENSOR:
                    bounds[key] = max(bounds[key], typical * norm(reference, key))
    outputs = _relative([key for key in keys if key.kind == OUTPUT], reference, bounds)
    for key in keys:
        if key.kind == LOSS:
            made_of = outputs or _relative([each for each in keys if each.kind == GRADIENT], reference, bounds)
            typical = statistics.median(made_of.values()) if made_of else 0.0
            bounds[key] = max(bounds[key], typical * norm(reference, key))
        elif key.kind == NORM:
            gradients = [bounds[each] for each in keys if each.kind == GRADIENT]
            bounds[key] = max(bounds[key], math.sqrt(sum(each**2 for each in gradients)))


def _relative(
    keys: Sequence[TensorKey], reference: TensorRecording, bounds: Mapping[TensorKey, float]
) -> dict[TensorKey, float]:
    norms = {key: norm(reference, key) for key in keys if key in bounds}
    return {key: bounds[key] / size for key, size in norms.items() if size > 0}
