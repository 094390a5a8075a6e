"""The times of a plan's parts by constants that were fitted to whole steps of trainings on a machine.

Model: a pass of a layer takes a time for each FLOP, with another constant for those of convolutions, and one for each
byte that it keeps for the backward pass. Each of its kernels, about one more than its parameters, takes a time. A
collective has a latency and a time for each byte, an update a time for each parameter, a step a time for itself. A
process computes on its share of the cores, and takes as much longer as that is smaller.

The constants of a fit are those of `RunFit`. A step is linear in them, but for the schedule of a pipeline.

Limits: float32 on one host. One constant stands for products of all shapes, and for images in any memory order. Layers
that the tensor or the context axis cuts, compiled networks and compressed gradients are not covered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from dslc.compiler.cost.layer_bytes import kept_bytes
from dslc.compiler.cost.measured_times import CUTTING
from dslc.compiler.facts.calibration import CONSTANTS, RunFit, with_constants
from dslc.compiler.ir.actions import TrafficNode
from dslc.compiler.ir.nodes import LayerNode
from dslc.compiler.placement.staging import Staging

_ROUNDS = 2000  # of the descent, which ends long before
# The constants of a core of a server, as `dslc calibrate` fits them. A constant that no training tells stays near.
CORE = {
    "flop": 3e-11,
    "convolution": 3e-11,
    "byte": 1e-10,
    "kernel": 2e-5,
    "latency": 3e-4,
    "link": 4e-10,
    "update": 2e-9,
    "step": 1e-3,
}
_PRIOR = 0.05  # how much a constant that is off by its own size counts, beside the error of a step as a share of it


class FittedTimes:
    """The times of a plan's parts by a fit."""

    overlap = 0.0

    def __init__(self, staging: Staging, fit: RunFit) -> None:
        self._staging, self._fit = staging, fit
        model = staging.model
        sizes = kept_bytes(staging.job, model, model.of_a_rank)
        self._kept = {layer.name: size for layer, size in zip(model.of_a_rank, sizes, strict=True)}

    @property
    def crowd(self) -> float:
        return max(1.0, self._core_share)

    @property
    def _core_share(self) -> float:
        """Processes for each core: one process alone on two cores computes on both."""
        layout = self._staging.layout
        return layout.processes / self._fit.cores if layout.device == "cpu" else 1.0

    @property
    def rest(self) -> float:
        return self._fit.step * self.crowd

    def layer(self, layer: LayerNode, samples: float) -> tuple[float, float]:
        """Returns seconds forward and backward of a pass over `samples`."""
        fit, convolves = self._fit, any(len(parameter.shape) == 4 for parameter in layer.parameters)
        flop, byte = fit.convolution if convolves else fit.flop, fit.byte * self._kept[layer.name]
        forward, backward = (
            self.crowd * fit.kernel * (1 + len(layer.parameters)) + self._core_share * samples * (flop * flops + byte)
            for flops in (layer.forward_flops, layer.backward_flops)
        )
        return forward, backward

    def loss(self, samples: float) -> tuple[float, float]:
        seconds = self.crowd * self._fit.kernel
        return seconds, seconds

    def launches(self, layer: LayerNode) -> tuple[float, float]:
        """Returns 0: kernels are a part of the passes."""
        return 0.0, 0.0

    def collective(self, traffic: TrafficNode) -> float:
        """Returns the seconds of a step, in the mean over later steps."""
        return traffic.when.share * (self._fit.latency * traffic.count + self._fit.link * traffic.bytes)

    def update(self, pipeline: int) -> float:
        """Returns the seconds of the optimizer on a rank."""
        return self._core_share * self._fit.update * self._staging.updated_numbers(pipeline)

    def data(self, samples: float) -> float:
        """Returns 0: the making of samples is a part of what a step takes for itself."""
        return 0.0


def uncovered(staging: Staging) -> str:
    """Returns what a fit does not cover in a plan, in words; "" if it covers the plan."""
    job, layout = staging.job, staging.layout
    reasons = {
        "`bf16` and `fp16`": job.train.precision.word != "fp32",
        "the tensor and the context axis": any(layout.sizes[axis] > 1 for axis in CUTTING),
        "several hosts": layout.nodes > 1,
        "exchanges other than sums": staging.sharding.exchange is not None,
        "compiled networks and offloads": job.train.compile or bool(job.memory.offload),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def fit_steps(
    features: Sequence[Sequence[float]], steps: Sequence[float], typical: Sequence[float] = ()
) -> list[float]:
    """Returns the constants, none below zero, that explain steps best: the sum of squared relative errors is least.

    `features` has a row for each step: its seconds by each constant alone, at 1. Constants that the steps tell little
    about stay near `typical` ones. Coordinates descend in turn.
    """
    rows = [[value / seconds for value in row] for row, seconds in zip(features, steps, strict=True)]
    rows += [[_PRIOR / value * (n == at) for at in range(len(typical))] for n, value in enumerate(typical)]
    residuals = [1.0] * len(steps) + [_PRIOR] * len(typical)  # of each row, as a share
    columns = list(zip(*rows, strict=True))
    squares = [sum(value * value for value in column) for column in columns]
    constants = [0.0] * len(columns)
    for _ in range(_ROUNDS):
        for n, column in enumerate(columns):
            if not squares[n]:
                continue
            change = sum(value * rest for value, rest in zip(column, residuals, strict=True)) / squares[n]
            change = max(change, -constants[n])
            constants[n] += change
            residuals = [rest - change * value for rest, value in zip(residuals, column, strict=True)]
    return constants


def left_out_errors(
    features: Sequence[Sequence[float]], steps: Sequence[float], typical: Sequence[float] = ()
) -> Iterator[float]:
    """Yields the relative error of each step, predicted by a fit to the others."""
    for n, (row, seconds) in enumerate(zip(features, steps, strict=True)):
        constants = fit_steps([*features[:n], *features[n + 1 :]], [*steps[:n], *steps[n + 1 :]], typical)
        yield sum(value * constant for value, constant in zip(row, constants, strict=True)) / seconds - 1


def run_fit(
    machine: RunFit, features: Sequence[Sequence[float]], steps: Sequence[float], typical: Sequence[float] = ()
) -> RunFit:
    """Returns the fit to steps on a machine, with the median error of each step by the others."""
    constants = dict(zip(CONSTANTS, fit_steps(features, steps, typical), strict=True))
    errors = [abs(error) for error in left_out_errors(features, steps, typical)] if len(steps) > 1 else [1.0]
    return with_constants(replace(machine, runs=len(steps), error=median(errors)), constants)
