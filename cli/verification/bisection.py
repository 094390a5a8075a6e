"""Finds the first tensor of two recordings that differs by more than rounding explains.

Model: tensors are compared in the order in which a step makes them (recordings.py). What a step begins with is compared
before: samples, their numbers, the divisor of the losses, the learning rate. Copies of a tensor on several ranks are
compared with each other where the tensor is reached.

Limits: a tensor that one of the two has no summary of, or has another part of, or whose rounding is not measured, is
not compared; it is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dslc.dsl.words import plural, shorten_list
from dslc.verification.recordings import GRADIENT, LOSS, NORM, OUTPUT, STATE, RecordedStep, TensorKey, TensorRecording
from dslc.verification.rounding_bounds import SHARE_LIMIT, distance, norm

_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class TensorDistance:
    """How far apart a tensor is: absolute, relative to its norm, and as a share of its rounding."""

    key: TensorKey
    distance: float
    relative: float
    share: float

    @property
    def is_explained(self) -> bool:
        return self.share <= SHARE_LIMIT


@dataclass(kw_only=True)
class Bisection:
    """The result. `text` says at what the two part, "" if they do not; `first` is the tensor, if it is one."""

    text: str = ""
    step: int = 0
    first: TensorDistance | None = None
    line: str = ""
    details: list[str] = field(default_factory=list)
    compared: list[TensorDistance] = field(default_factory=list)  # up to the end of the step at which they part
    missing: list[TensorKey] = field(default_factory=list)  # tensors that were not compared

    @property
    def largest(self) -> TensorDistance | None:
        """The largest share of rounding."""
        return max(self.compared, key=lambda each: each.share, default=None)


def find_difference(
    one: TensorRecording,
    other: TensorRecording,
    bounds: Mapping[TensorKey, float],
    reference: TensorRecording | None = None,
) -> Bisection:
    """Compares the steps that both recordings have. `bounds` are the rounding of each tensor."""
    result = Bisection()
    steps = {each.step: each for each in other.steps}
    order = _by_step(reference.sums if reference is not None else one.sums)
    recorded = _by_step({**one.sums, **other.sums})
    for step in one.steps:
        if step.step not in steps:
            continue
        keys = order.get(step.step, {})
        text = _beginnings(step, steps[step.step])
        if text:
            result.text, result.step = text, step.step
            return result
        before = len(result.compared)
        for key in keys:
            _compare(one, other, bounds, key, result)
        result.missing += [key for key in recorded.get(step.step, ()) if key not in keys]
        late = _late_beginnings(step, steps[step.step])
        wrong = [each for each in result.compared[before:] if not each.is_explained]
        copies = next(_differing_copies((one, other), bounds, keys), None)
        if late and all(each.key.kind == STATE for each in wrong):
            result.text, result.step = late, step.step
            return result
        if copies is not None and (not wrong or keys[copies[0]] <= keys[wrong[0].key]):
            result.step = step.step
            result.text, result.line = copies[1], _line(copies[0], one, other)
            return result
        if wrong:
            _describe(result, wrong, one, other, bounds, reference)
            return result
    return result


def _by_step(keys: Iterable[TensorKey]) -> dict[int, dict[TensorKey, int]]:
    """Returns the tensors of each step with their places in it."""
    found: dict[int, dict[TensorKey, int]] = {}
    for key in keys:
        of_step = found.setdefault(key.step, {})
        of_step[key] = len(of_step)
    return found


def _compare(
    one: TensorRecording, other: TensorRecording, bounds: Mapping[TensorKey, float], key: TensorKey, result: Bisection
) -> None:
    held = all(key in values for values in (one.sums, other.sums, bounds))
    if not held or one.numbers[key][0] != other.numbers[key][0]:
        result.missing.append(key)
        return
    result.compared.append(tensor_distance(one, other, bounds, key))


def tensor_distance(
    one: TensorRecording, other: TensorRecording, bounds: Mapping[TensorKey, float], key: TensorKey
) -> TensorDistance:
    apart, size = distance(one, other, key), norm(one, key)
    bound = bounds.get(key, 0.0)
    return TensorDistance(
        key=key,
        distance=apart,
        relative=apart / size if size else math.inf if apart else 0.0,
        share=apart / bound if bound else math.inf if apart else 0.0,
    )


def _beginnings(one: RecordedStep, other: RecordedStep) -> str:
    """Returns how the samples or the divisor of a step differ; "" if they do not."""
    if one.samples != other.samples:
        first, second = set(one.samples) - set(other.samples), set(other.samples) - set(one.samples)
        only = "; ".join(
            f"{name} alone has {shorten_list(list(map(str, sorted(samples))), _NAMED)}"
            for name, samples in (("A", first), ("B", second))
            if samples
        )
        return f"the samples: {only or 'one has some of them more often'}"
    if len(one.digests) == len(other.digests) and all((*one.digests, *other.digests)):
        wrong = [n for n, pair in enumerate(zip(one.digests, other.digests, strict=True)) if pair[0] != pair[1]]
        if wrong:
            names = shorten_list([str(one.samples[n]) for n in wrong if n < len(one.samples)], _NAMED)
            return f"the numbers of the samples {names}: the data give others for the same index"
    if one.number != other.number:
        return f"the divisor of the losses: {one.number:,.0f} in A and {other.number:,.0f} in B"
    return ""


def _late_beginnings(one: RecordedStep, other: RecordedStep) -> str:
    """Returns how the learning rate differs, which only the update uses."""
    scale = max(abs(one.lr), abs(other.lr))
    if abs(one.lr - other.lr) <= 1e-12 * scale:  # both are computed in float64
        return ""
    return f"the learning rate: {one.lr:.9g} in A and {other.lr:.9g} in B"


def _differing_copies(
    recordings: Sequence[TensorRecording], bounds: Mapping[TensorKey, float], keys: Iterable[TensorKey]
) -> Iterator[tuple[TensorKey, str]]:
    for key in keys:
        for name, recording in zip("AB", recordings, strict=True):
            copies = recording.copies.get(key)
            if copies is not None and key in bounds and not copies.distance <= SHARE_LIMIT * bounds[key]:
                yield (
                    key,
                    f"{tensor_text(key)} within {name}: rank {copies.rank}'s copy is {copies.distance:.3g} away from "
                    f"rank {copies.reference}'s",
                )


def tensor_text(key: TensorKey) -> str:
    name, _, call = key.name.partition("#")
    again = f" (tensor {int(call) + 1} of the step's passes)" if call else ""
    match key.kind:
        case "output":
            return f"the output of `{name}`{again}" if name else f"the output of the network{again}"
        case "gradient":
            return f"the gradient of `{name}`"
        case "state":
            return f"`{name}` after the update"
        case "norm":
            return "the norm of the gradient"
        case _:
            return "the loss"


def _line(key: TensorKey, *recordings: TensorRecording) -> str:
    name = key.name.partition("#")[0]
    return next((each.lines[name] for each in recordings if each.lines.get(name)), "")


def _describe(
    result: Bisection,
    wrong: Sequence[TensorDistance],
    one: TensorRecording,
    other: TensorRecording,
    bounds: Mapping[TensorKey, float],
    reference: TensorRecording | None,
) -> None:
    first = wrong[0]
    key = first.key
    result.text, result.step, result.first = tensor_text(key), key.step, first
    result.line = _line(key, one, other)
    if math.isinf(first.distance):
        result.details.append(f"{one.numbers[key][1]} of its numbers are not finite in A, {other.numbers[key][1]} in B")
    else:
        result.details.append(
            f"the difference is {first.distance:.3g}, {first.relative:.2g} of its norm: "
            f"{_times(first.share)} what rounding explains ({bounds.get(key, 0.0):.2g})"
        )
    if reference is not None and key in reference.sums:
        shares = [tensor_distance(each, reference, bounds, key).share for each in (one, other)]
        verdicts = [share <= SHARE_LIMIT for share in shares]
        blame = {(True, False): "; B is the one that differs", (False, True): "; A is the one that differs"}
        result.details.append(
            f"from one process without rounding, A differs by {_times(shares[0])} the rounding and B by "
            f"{_times(shares[1])} the rounding{blame.get((verdicts[0], verdicts[1]), '')}"
        )
    result.details.append(f"{plural(result.compared.index(first), 'tensor')} before it agree")
    for kind, word in ((OUTPUT, "output"), (GRADIENT, "gradient"), (STATE, "tensor after the update")):
        of_kind = [each for each in result.compared if each.key.kind == kind and each.key.step == key.step]
        many = [each for each in of_kind if not each.is_explained]
        if many:
            words = word.replace("tensor", "tensors") if word.startswith("tensor") else f"{word}s"
            result.details.append(f"{len(many)} of {len(of_kind)} {words} of the step differ")


def _times(share: float) -> str:
    """Returns a share of rounding in words, before the rounding."""
    if math.isinf(share):
        return "infinitely many times"
    return f"{share:,.0f} times" if share >= 10 else f"{share:.0%} of"


def step_rows(
    one: TensorRecording, other: TensorRecording, bounds: Mapping[TensorKey, float]
) -> Iterator[tuple[int, tuple[float | None, float | None], TensorDistance, TensorDistance]]:
    """Yields for each step the losses, None for one that is not finite, and the distances of losses and norms."""
    steps = {each.step for each in other.steps}
    for step in (each.step for each in one.steps if each.step in steps):
        loss, gradient = TensorKey(step=step, kind=LOSS), TensorKey(step=step, kind=NORM)
        yield (
            step,
            (_number(one, loss), _number(other, loss)),
            tensor_distance(one, other, bounds, loss),
            tensor_distance(one, other, bounds, gradient),
        )


def _number(recording: TensorRecording, key: TensorKey) -> float | None:
    return None if recording.numbers[key][1] else float(recording.sums[key][0])
