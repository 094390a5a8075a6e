"""The times of a plan's parts by constants that were fitted to whole steps of trainings on a machine.

Model: a pass of a layer takes a time for each FLOP, with another constant for convolutions. It takes a time for each
byte that its kernels save for a backward pass, recomputed or not. oneDNN lays images out anew whose channels are not
last. Weights are read, and gradients written or added to. Each operation of torch takes a time, and backward each
parameter. It takes longer on the tensor axis, where DTensor dispatches it.

A collective has a latency, and a time for each byte that gloo moves. One within the passes, a gather or a reduction of
`fully_shard` or the statistics of a batch, costs more in Python. Where processes share cores, each one that must meet
the others waits for its turn. Stages of a pipeline exchange one after another. Units of `fully_shard` have hooks.

An update takes a time for each byte of parameters, gradients and state, and one for each parameter. Micro-batches, or
the actions of a pipeline, take a time of their own, and so does a step. A process computes on its share of the cores,
and takes as much longer as that is smaller.

`RunFit` has the constants of a fit. A step is linear in them, except for the schedule of a pipeline.

Limits: float32 on one host. One constant stands for products of all shapes. The context axis, compiled networks,
offloads and exchanges that compress are not covered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from dslc.compiler.cost.layer_bytes import Recomputation, saved_bytes
from dslc.compiler.cost.optimizer_bytes import OptimizerBytes
from dslc.compiler.facts.calibration import CONSTANTS, RunFit, with_constants
from dslc.compiler.ir.actions import Payload, TrafficNode
from dslc.compiler.ir.nodes import LayerNode
from dslc.compiler.placement.sharding import channels_last, recomputed
from dslc.compiler.placement.staging import Staging
from dslc.dsl.sums import float_sum

_WEIGHT_EXCHANGES = ("local_sgd", "diloco", "decentralized")  # exchanges of weights as they are
_ROUNDS = 20_000  # of the descent, which ends long before
_TOLERANCE = 1e-7  # a change of a round that ends it, as a share of a step
# The constants of a core of a server, as `dslc calibrate` fits them. A constant that no training tells stays near.
CORE = {
    "flop": 6e-12,
    "convolution": 9e-12,
    "byte": 3e-10,
    "kernel": 1.1e-5,
    "cut": 2.5e-4,
    "latency": 4e-4,
    "within": 5e-4,
    "turn": 4e-3,
    "link": 3e-10,
    "shard": 4e-4,
    "update": 4e-11,
    "tensor": 2.5e-5,
    "microbatch": 2e-4,
    "step": 7e-4,
}
_PRIOR = 0.2  # how much a constant that is off by its own size counts, beside the error of a step as a share of it


class FittedTimes:
    """The times of a plan's parts by a fit."""

    overlap = 0.0

    def __init__(self, staging: Staging, fit: RunFit) -> None:
        self._staging, self._fit = staging, fit
        self._state = OptimizerBytes(staging.job, staging.optimizer, staging.model).of_a_number()
        self._recomputed = set(recomputed(staging.job, staging.model))
        # What is recomputed moves as many bytes as what is kept, in each pass.
        self._moved = {q.name: saved_bytes(staging.job, q, Recomputation()) for q in staging.model.of_a_rank}
        if not channels_last(staging.layout, staging.sharding, staging.model):
            for layer in staging.model.of_a_rank:
                self._moved[layer.name] += _reordered(layer)

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
        fit, staging, layout = self._fit, self._staging, self._staging.layout
        stages = layout.sizes["pipeline"]
        again = layout.passes / stages if stages > 1 else layout.microbatches - 1
        units = len(staging.units) / stages if staging.sharding.engine == "fsdp" else 0.0
        return self.crowd * (fit.step + fit.microbatch * again + fit.shard * units * layout.microbatches)

    def layer(self, layer: LayerNode, samples: float) -> tuple[float, float]:
        """Returns seconds forward and backward of a pass over `samples`."""
        fit, staging = self._fit, self._staging
        convolves = any(len(parameter.shape) == 4 for parameter in layer.parameters)
        flop = fit.convolution if convolves else fit.flop
        weights = 4 * sum(parameter.count for parameter in layer.parameters)
        cut, tensors = fit.cut * (staging.layout.sizes["tensor"] > 1), len(layer.parameters)
        host = self.crowd * (fit.kernel * layer.operations + cut * _parts(layer))
        share, byte = self._core_share, samples * fit.byte * self._moved[layer.name]
        again = 4 if staging.layout.microbatches > 1 else 2  # gradients are written, or read and added to
        forward = host + share * (samples * flop * layer.forward_flops + byte + fit.update * weights)
        backward = (
            host
            + self.crowd * (fit.kernel + cut) * tensors
            + share * (samples * flop * layer.backward_flops + byte + fit.update * again * weights)
        )
        if staging.job.memory.recompute == "selective" and layer.name in self._recomputed:
            backward += host + share * byte  # all but products
        return forward, backward

    def loss(self, samples: float) -> tuple[float, float]:
        seconds = self.crowd * self._fit.kernel
        return seconds, seconds

    def launches(self, layer: LayerNode) -> tuple[float, float]:
        """Returns 0: kernels are a part of the passes."""
        return 0.0, 0.0

    def collective(self, traffic: TrafficNode) -> float:
        """Returns the seconds of a step, in the mean over later steps."""
        fit = self._fit
        waits = traffic.operation not in ("broadcast", "send", "receive")
        within = traffic.operation in ("all_gather", "reduce_scatter") or traffic.what is Payload.BATCH_STATISTICS
        crowd = max(1.0, self.crowd / self._staging.layout.sizes["pipeline"])  # stages exchange one after another
        start = fit.latency + crowd * fit.within * within + (crowd - 1) * fit.turn * waits
        return traffic.when.share * (start * traffic.count + crowd * fit.link * _moved(traffic))

    def update(self, pipeline: int) -> float:
        """Returns the seconds of the optimizer on a rank, which reads gradients, and reads and writes all else."""
        fit, staging = self._fit, self._staging
        layers = [staging.model.of_a_rank[n] for stage in staging.stages_of(pipeline) for n in staging.stages[stage]]
        tensors = sum(q.name in staging.trained for layer in layers for q in layer.parameters)
        moved = staging.updated_numbers(pipeline) * (12 + 2 * self._state)
        return self._core_share * fit.update * moved + self.crowd * fit.tensor * tensors

    def data(self, samples: float) -> float:
        """Returns 0: the making of samples is a part of what a step takes for itself."""
        return 0.0


def _parts(layer: LayerNode) -> int:
    """Returns the modules of a layer that DTensor may dispatch, or the moments of its backward pass."""
    moments = layer.float32.working.backward if layer.float32.working is not None else ()
    return max(1, len(layer.parts), len(moments))


def _reordered(layer: LayerNode) -> int:
    """Returns the bytes of a sample's images that oneDNN lays out anew for convolutions, where their channels are not
    last.
    """
    images = [part for part in layer.parts if part.kind == "conv2d"]
    return sum(4 * (prod(part.takes) + prod(part.gives)) for part in images)


def _moved(traffic: TrafficNode) -> float:
    """Returns the bytes that gloo moves for a rank, in rings, with those that `fully_shard` copies.

    gloo reduces whole tensors where a part of them is asked for.
    """
    ranks = max(1, traffic.ranks)
    if traffic.operation == "all_reduce":
        return traffic.bytes * 2 * (ranks - 1) / ranks
    if traffic.operation == "all_gather":
        return traffic.bytes * (2 * ranks - 1)
    if traffic.operation == "reduce_scatter":
        return traffic.bytes * (2 * (ranks - 1) / ranks + 1)
    return traffic.bytes


def uncovered(staging: Staging) -> str:
    """Returns what a fit does not cover in a plan, in words; "" if it covers the plan."""
    job, layout = staging.job, staging.layout
    reasons = {
        "`bf16` and `fp16`": job.train.precision.word != "fp32",
        "the context axis": layout.sizes["context"] > 1,
        "several hosts": layout.nodes > 1,
        "collectives over shared memory": layout.backend == "shared_memory",
        "compressed exchanges": staging.sharding.exchange is not None
        and staging.sharding.exchange.kind not in _WEIGHT_EXCHANGES,
        "compiled networks": bool(job.train.compile),
        "offloads": bool(job.memory.offload),
        "weights in 4 or 8 bits": staging.model.has_quantized_weights,
        "Muon's matrix products": job.train.optimizer.fallback is not None,
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
    wanted = [1.0] * len(steps) + [_PRIOR] * len(typical)
    rows += [[_PRIOR / value * (n == at) for at in range(len(typical))] for n, value in enumerate(typical)]
    columns = list(zip(*rows, strict=True))
    products = [[_dot(one, other) for other in columns] for one in columns]
    targets = [_dot(column, wanted) for column in columns]
    constants = [0.0] * len(columns)
    for _ in range(_ROUNDS):
        change = 0.0
        for n, (row, target) in enumerate(zip(products, targets, strict=True)):
            if not row[n]:
                continue
            value = max(0.0, constants[n] + (target - _dot(row, constants)) / row[n])
            change = max(change, abs(value - constants[n]) * row[n] ** 0.5)
            constants[n] = value
        if change < _TOLERANCE:
            break
    return constants


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return float_sum(a * b for a, b in zip(one, other, strict=True))


def left_out_errors(
    features: Sequence[Sequence[float]], steps: Sequence[float], typical: Sequence[float] = ()
) -> Iterator[float]:
    """Yields the relative error of each step, predicted by a fit to the others."""
    for n, (row, seconds) in enumerate(zip(features, steps, strict=True)):
        constants = fit_steps([*features[:n], *features[n + 1 :]], [*steps[:n], *steps[n + 1 :]], typical)
        yield float_sum(value * constant for value, constant in zip(row, constants, strict=True)) / seconds - 1


def run_fit(
    machine: RunFit, features: Sequence[Sequence[float]], steps: Sequence[float], typical: Sequence[float] = ()
) -> RunFit:
    """Returns the fit to steps on a machine, with the median error of each step by the others."""
    from statistics import median  # here, as no check fits

    constants = dict(zip(CONSTANTS, fit_steps(features, steps, typical), strict=True))
    errors = [abs(error) for error in left_out_errors(features, steps, typical)] if len(steps) > 1 else [1.0]
    return with_constants(replace(machine, runs=len(steps), error=median(errors)), constants)
