"""How well predictions of published runs find the fastest plan of a job, and what bounds that in vTrain's table.

Steps of its networks of 12, 16, 20 and 24 layers lie on a line for each plan. So the table rests on one time of a layer
for each width, tensor axis and micro-batch: 32 of them, which all plans of all depths share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from benchmarks.published import Run
from benchmarks.published_fit import Array

DRAWS = 100
NEAR = 0.1  # a choice is good if it takes a tenth longer than the fastest plan at most
LEAST_PLANS = 3  # of a job whose choice counts


class LayerKind(NamedTuple):
    """The runs that share one time of a layer."""

    width: int
    tensor: int
    microbatch: int

    @staticmethod
    def of(run: Run) -> LayerKind:
        return LayerKind(run.width, run.tensor, run.microbatch)


@dataclass(frozen=True)
class Choices:
    """The predicted choices of jobs: how many are good, and how much slower than the fastest plan each is."""

    slower: tuple[float, ...]

    @property
    def good(self) -> int:
        return sum(share <= NEAR for share in self.slower)


def choices(runs: Sequence[Run], predicted: Sequence[float] | Array, least_plans: int = LEAST_PLANS) -> Choices:
    """Returns the choices by predicted seconds, in jobs with at least some plans."""
    jobs: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for run, seconds in zip(runs, predicted, strict=True):
        jobs.setdefault((run.model, run.length, run.gpus, run.batch), []).append((seconds, run.seconds))
    several = [plans for plans in jobs.values() if len(plans) >= least_plans]
    return Choices(tuple(min(plans)[1] / min(seconds for _, seconds in plans) - 1 for plans in several))


def predicted_seconds(runs: Sequence[Run], errors: Array) -> Array:
    """Returns the predicted seconds of runs from the logarithms of predicted over published time."""
    return np.array([run.seconds for run in runs]) * np.exp(errors)


def choice_lines(runs: Sequence[Run], errors: Array, errors_of_all: Array) -> Iterator[str]:
    """Says how well predictions order the plans of one job, and find the fastest.

    `errors_of_all` are those by a fit to runs of all widths.
    """
    predicted = predicted_seconds(runs, errors)
    jobs: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for run, seconds in zip(runs, predicted, strict=True):
        jobs.setdefault((run.model, run.length, run.gpus, run.batch), []).append((run.seconds, seconds))
    pairs = [pair for plans in jobs.values() for pair in combinations(plans, 2)]
    apart = [(a, b) for a, b in pairs if abs(np.log(a[0] / b[0])) > NEAR]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in apart)
    what = "Order of two plans of one job on as many devices, whose times differ by more than a tenth"
    yield f"{what}: right in {right:,} of {len(apart):,} pairs ({right / len(apart):.1%})."
    yield ""
    chosen, pairwise = choices(runs, predicted), choices(runs, predicted, least_plans=2)
    fitted = choices(runs, predicted_seconds(runs, errors_of_all))
    yield (
        f"The plan that is predicted to be the fastest is within a tenth of the fastest in {chosen.good} of "
        f"{len(chosen.slower)} jobs with three plans or more, and {max(chosen.slower):.0%} slower at worst; with the "
        f"jobs of two plans, in {pairwise.good} of {len(pairwise.slower)}. By a fit to runs of both widths, in "
        f"{fitted.good} of {len(fitted.slower)}."
    )


# ------------------------------------------------------------------------------------------------- what bounds choices


def off_the_line(runs: Sequence[Run]) -> Array:
    """Returns how far the steps of a plan's networks are from a line over their depth, as shares."""
    shares = []
    for plan in _plans(runs):
        depths, seconds = np.array([run.layers for run in plan]), np.array([run.seconds for run in plan])
        shares.append(np.abs(np.polyval(np.polyfit(depths, seconds, 1), depths) / seconds - 1))
    return np.concatenate(shares)


def layer_seconds(runs: Sequence[Run]) -> dict[LayerKind, float]:
    """Returns the seconds of a layer's passes over a micro-batch, by kind.

    This is the slope of a plan's line over each turn of its pipeline. What a plan exchanges after the passes is also in
    the slope, so the least of all plans counts.
    """
    least: dict[LayerKind, float] = {}
    for plan in _plans(runs):
        slope = float(np.polyfit([run.layers for run in plan], [run.seconds for run in plan], 1)[0])
        kind = LayerKind.of(plan[0])
        least[kind] = min(least.get(kind, np.inf), slope / _layer_turns(plan[0]) * plan[0].layers)
    return least


def seconds_with_factors(
    runs: Sequence[Run], layers: Mapping[LayerKind, float], factors: Mapping[LayerKind, float]
) -> Array:
    """Returns the published seconds of runs, with the times of their layers multiplied by factors."""
    kinds = [LayerKind.of(run) for run in runs]
    return np.array(
        [
            run.seconds + (factors[kind] - 1) * layers[kind] * _layer_turns(run)
            for run, kind in zip(runs, kinds, strict=True)
        ]
    )


def bound_lines(runs: Sequence[Run], errors: Array) -> Iterator[str]:
    """Shows the times of a layer that the table rests on, and how many choices are good when these are off."""
    layers, kinds = layer_seconds(runs), [LayerKind.of(run) for run in runs]
    shares = off_the_line(runs)
    yield (
        f"The steps of a plan's networks of 12, 16, 20 and 24 layers lie on a line: off by {np.median(shares):.4%} at "
        f"the median, {shares.max():.1%} at worst. So the {len(runs):,} rows rest on {len(layers)} times of a layer. "
        "In milliseconds of a micro-batch's passes, with the median error of the predicted steps that have it:"
    )
    yield ""
    sizes = sorted({kind.microbatch for kind in layers})
    yield f"| width | tensor | {' | '.join(f'micro-batch of {size}' for size in sizes)} |"
    yield "| ---: | ---: |" + " ---: |" * len(sizes)
    medians = {
        kind: float(np.expm1(np.median([error for error, other in zip(errors, kinds, strict=True) if other == kind])))
        for kind in layers
    }
    for width, tensor in sorted({(kind.width, kind.tensor) for kind in layers}):
        row = [LayerKind(width, tensor, size) for size in sizes]
        cells = [f"{1000 * layers[kind]:.2f} ({medians[kind]:+.0%})" for kind in row]
        yield f"| {width} | {tensor} | {' | '.join(cells)} |"
    yield ""
    worst = sorted(medians, key=lambda kind: -medians[kind])[:2]
    predicted = predicted_seconds(runs, errors)
    known = [run.seconds if kind in worst else guess for run, kind, guess in zip(runs, kinds, predicted, strict=True)]
    chosen = choices(runs, known)
    yield (
        "With the published times of the runs with the two times of a layer that are overrated most, in place of their "
        f"predictions, the choice is within a tenth in {chosen.good} of {len(chosen.slower)} jobs. If all else were "
        "known and only the times of a layer were off, at random by a standard deviation of 5%, 7% or 10%, it would be "
        f"in {_counts(runs, layers)} of them, in the mean of {DRAWS} draws."
    )


def _counts(runs: Sequence[Run], layers: Mapping[LayerKind, float]) -> str:
    chance = np.random.default_rng(0)
    counts = []
    for deviation in (0.05, 0.07, 0.1):
        good = []
        for _ in range(DRAWS):
            factors = {kind: float(np.exp(deviation * chance.standard_normal())) for kind in layers}
            good.append(choices(runs, seconds_with_factors(runs, layers, factors)).good)
        counts.append(f"{np.mean(good):.0f}")
    return f"{', '.join(counts[:-1])} or {counts[-1]}"


def _plans(runs: Sequence[Run]) -> list[list[Run]]:
    """Returns the runs of each plan for networks of one width, which differ in depth."""
    plans: dict[tuple[int, ...], list[Run]] = {}
    for run in runs:
        key = (run.width, run.gpus, run.batch, run.tensor, run.pipeline, run.microbatch)
        plans.setdefault(key, []).append(run)
    return list(plans.values())


def _layer_turns(run: Run) -> float:
    """Returns how many passes of a layer over a micro-batch are on the critical path of a step."""
    return run.layers / run.pipeline * (run.microbatches + run.pipeline - 1)


# --------------------------------------------------------------------------------------------------------- odd pairs


def odd_pair_lines(runs: Sequence[Run]) -> Iterator[str]:
    """Says in how many pairs of runs more work takes less time, which no model of the plan can tell."""
    plans: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        plan = (run.model, run.length, run.tensor, run.pipeline, run.replicas, run.microbatches)
        plans.setdefault(plan, []).append(run)
    pairs = [pair for group in plans.values() for pair in combinations(group, 2)]
    odd = [pair for pair in pairs if _takes_less_for_more(*pair)]
    what = f"Of {len(pairs):,} pairs of runs that differ in the size of a micro-batch alone"
    yield f"{what}, in {len(odd):,} the larger one takes less time, by more than 3%."


def _takes_less_for_more(one: Run, other: Run) -> bool:
    small, large = sorted((one, other), key=lambda run: run.microbatch)
    return small.seconds > 1.03 * large.seconds
