"""Fits the constants of `PublishedFit` to published runs, by least squares of the logarithm of a step's time.

The fit is Levenberg's and Marquardt's over the logarithms of the constants. A row that is off by more than a tenth
counts less than its square, because single rows are wrong. A share of a data sheet's figure stays at 1 or below.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.published import HERE, Run
from dslc.compiler.cost.published_times import UPDATE_BYTES
from dslc.compiler.facts.hardware import CATALOGUE, PublishedFit

KERNELS = os.path.join(HERE, "measured", "h200_kernels.jsonl")
Array = NDArray[np.float64]
SECONDS = ("latency", "launch", "rest")  # constants that are no shares
TENTH = 0.1  # the error from which on a row counts less
PRIOR = 1e-3  # how much a constant that no row tells stays where it began
STEP = 1e-3  # of the logarithms, for differences


def errors(fit: PublishedFit, runs: Sequence[Run]) -> Array:
    """Returns the logarithm of predicted over published seconds, of each run."""
    return np.array([log((run.estimate(fit).step_time or 1.0) / run.seconds) for run in runs])


def fit_constants(begin: PublishedFit, names: Sequence[str], runs: Sequence[Run], turns: int = 12) -> PublishedFit:
    """Returns `begin` with the constants `names` fitted to the runs."""
    least = np.array([log(getattr(begin, name)) for name in names])
    most = np.array([np.inf if name in SECONDS else 0.0 for name in names])

    def made(values: Array) -> PublishedFit:
        return replace(begin, **dict(zip(names, np.exp(values).tolist(), strict=True)))

    def residuals(values: Array) -> Array:
        return np.concatenate([errors(made(values), runs), PRIOR * (values - least)])

    return made(_minimum(residuals, least, most, len(runs), turns))


def _minimum(residuals: Callable[[Array], Array], begin: Array, most: Array, rows: int, turns: int) -> Array:
    """Returns the values with the least cost, each `most` at most."""
    values, damping = np.minimum(begin, most), 1e-2
    now = residuals(values)
    for _ in range(turns):
        slopes = np.array([residuals(values + STEP * unit) - now for unit in np.eye(len(values))]).T / STEP
        weights = np.where(np.arange(len(now)) < rows, (1 + (now / TENTH) ** 2) ** -0.5, 1.0)
        normal, gradient = slopes.T @ (slopes * weights[:, None]), slopes.T @ (now * weights)
        free = (values < most - 1e-9) | (gradient > 0)  # the others would leave their range
        gain = 0.0
        while gain <= 0 and damping < 1e6:
            damped = normal + damping * np.diag(np.diag(normal) + 1e-9)
            change = np.zeros(len(values))
            change[free] = np.linalg.solve(damped[np.ix_(free, free)], -gradient[free])
            tried = np.minimum(values + np.clip(change, -1, 1), most)
            after = residuals(tried)
            gain = _cost(now, rows) - _cost(after, rows)
            damping *= 0.2 if gain > 0 else 5
        if gain <= 1e-6 * _cost(now, rows):
            break
        values, now = tried, after
    return values


def _cost(found: Array, rows: int) -> float:
    """Returns the sum of squares, of which large ones count like their root."""
    robust = TENTH**2 * (np.sqrt(1 + (found[:rows] / TENTH) ** 2) - 1)
    return float(robust.sum() + (found[rows:] ** 2).sum() / 2)


# ------------------------------------------------------------------------------------------------------- the kinds

MEGATRON = ("products", "memory", "scores", "loss", "latency", "launch")
FOUNDRY = ("products", "memory", "attention", "overlap")
# Not fitted: `links` is NCCL's usual rate of large collectives, 230 of 300 GB/s within eight A100; `launch` is five
# kernels of 10 us, as measured on an H200, and `rest` the 2 ms between kernels of a step there.
BEGIN = PublishedFit(
    kind="a100_40g",
    products=0.85,
    memory=0.35,
    attention=0.55,
    scores=0.0,
    loss=0.28,
    update=0.64,
    links=0.77,
    overlap=0.1,
    latency=55e-6,
    launch=50e-6,
    rest=2e-3,
    width=(768, 8192),
    length=(512, 65_536),
)
# Megatron-DeepSpeed exchanges gradients after the passes, and its attention stores scores.
MEGATRON_BEGIN = replace(
    BEGIN, products=0.95, memory=0.7, scores=0.26, loss=0.08, launch=330e-6, overlap=0.0, width=(1024, 2048)
)
EVERY = 9  # of vTrain's runs, which are many and alike, every ninth is fitted to, and all are predicted


def fit_megatron(runs: Sequence[Run]) -> PublishedFit:
    """Returns the fit to runs of Megatron-DeepSpeed, which hides no exchange and stores the scores of attention."""
    return fit_constants(MEGATRON_BEGIN, MEGATRON, runs[::EVERY])


def fit_foundry(runs: Sequence[Run], kernels: PublishedFit, megatron: PublishedFit) -> PublishedFit:
    """Returns the fit to runs of llm-foundry on both kinds of A100, which have one fit.

    The loss and the update are those of `kernels`, the latency is that of `megatron`.
    """
    begin = replace(BEGIN, loss=kernels.loss, update=kernels.update, latency=megatron.latency)
    return fit_constants(begin, FOUNDRY, runs)


def fit_kernels(path: str = KERNELS) -> PublishedFit:
    """Returns the constants of an H200 from the times of its kernels. Others are those of `BEGIN`."""
    hardware = CATALOGUE["h200"]
    peak, bandwidth = hardware.flops_bf16, hardware.bandwidth
    assert peak is not None and bandwidth is not None
    with open(path) as file:
        kernels = [json.loads(line) for line in file]
    shares: dict[str, list[float]] = {name: [] for name in ("products", "attention", "loss", "update")}
    for each in kernels:
        match each:
            case {"kind": "product", "dtype": "bf16", "m": m, "k": k, "n": n} if 2 * m * k * n > 30e-6 * peak:
                shares["products"].append(2 * m * k * n / peak / each["seconds"])
            case {"kind": "attention", "dtype": "bf16", "causal": True, "length": length} if length >= 1024:
                flops = 4 * each["batch"] * each["heads"] * length**2 * each["dim"]
                if flops > 30e-6 * peak:
                    shares["attention"].append(3 * flops / peak / (each["forward"] + each["backward"]))
            case {"kind": "cross_entropy", "dtype": "fp32", "classes": classes, "rows": rows} if classes >= 30_000:
                shares["loss"].append(12 * rows * classes / bandwidth / (each["forward"] + each["backward"]))
            case {"kind": "update", "optimizer": "adamw", "parameters": numbers} if numbers >= 1e8:
                shares["update"].append(UPDATE_BYTES * numbers / bandwidth / each["seconds"])
    medians: dict[str, Any] = {name: float(np.median(found)) for name, found in shares.items()}
    return replace(BEGIN, kind="h200", **medians)
