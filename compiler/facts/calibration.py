"""The measurements of `dslc calibrate` on a machine: the times of layers, of the loss, of an update and of collectives.

Model: a pass of a layer takes `fixed + each * samples` seconds. A layer is known by its signature, whatever job it
stands in: its kind, its shapes, its parameters and its work. So a measurement serves every plan that cuts a model into
the same layers, with micro-batches of any size.

Contract: times hold for one process while all processes of a host do the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from math import inf
from typing import TypeVar

from dslc.compiler.ir.codec import DecodeError, from_json, to_json
from dslc.compiler.ir.nodes import LayerNode
from dslc.dsl.language.job import JobSpec
from dslc.dsl.record import Record, record

TIMES = "times.json"  # the file of a run directory in which ranks leave their measurements
Passes = Mapping[str, tuple[float, float]]  # seconds forward and backward by layer; of the loss by ""


@record
class PassTime(Record):
    """Seconds of a pass: `fixed`, and `each` for each sample in it."""

    fixed: float
    each: float

    def seconds(self, samples: float) -> float:
        return self.fixed + self.each * samples


@record
class LayerTime(Record):
    """The passes of a layer; `backward` without a forward pass that recomputes."""

    forward: PassTime
    backward: PassTime


@record
class CollectiveTime(Record):
    """Seconds of a collective: `latency`, and `byte` for each byte of a rank's input."""

    latency: float
    byte: float


@record
class RestTime(Record):
    """Seconds of a step that no part of it accounts for: `seconds` with `microbatches` micro-batches, and `each` for
    each further one.
    """

    microbatches: int
    seconds: float
    each: float = 0.0

    def seconds_with(self, microbatches: int) -> float:
        return max(0.0, self.seconds + self.each * (microbatches - self.microbatches))

    def extended(self, microbatches: int, seconds: float) -> RestTime:
        """Returns the line through this time and the time of another number of micro-batches; it does not fall."""
        each = (seconds - self.seconds) / (microbatches - self.microbatches)
        return replace(self, each=max(0.0, each))


@record
class Calibration(Record):
    """One machine's times. `overlap` is the share of a gradient exchange's time that the backward pass hides."""

    machine: str  # its processor
    torch: str
    processes: int  # that ran at once on a host
    cores: int  # of the host
    layers: Mapping[str, LayerTime] = field(default_factory=dict)  # by signature
    losses: Mapping[str, LayerTime] = field(default_factory=dict)  # by signature
    updates: Mapping[str, float] = field(default_factory=dict)  # seconds for each parameter, by optimizer
    collectives: Mapping[str, CollectiveTime] = field(default_factory=dict)  # by operation and ranks: `all_reduce 2`
    data: Mapping[str, float] = field(default_factory=dict)  # seconds in which one sample is made, by source
    overlap: Mapping[str, float] = field(default_factory=dict)  # by network
    rest: Mapping[str, RestTime] = field(default_factory=dict)  # by network and engine

    @property
    def digest(self) -> str:
        """The name of the calibration by its content."""
        return _digest(self)


CONSTANTS = (  # of a RunFit
    "flop", "convolution", "byte", "kernel", "cut", "latency", "within", "turn", "link", "shard", "update", "tensor",
    "microbatch", "step",
)  # fmt: skip


CONSTANTS_VERSION = 3  # of the meaning of a fit's constants


@record
class RunFit(Record):
    """The constants of a machine, in seconds, fitted to the steps of `runs` trainings: of a FLOP, and one of
    convolutions; of a byte that a layer saves for a backward pass; of a kernel, and more of one that the tensor axis
    has `cut`; of a collective, of one `within` the passes besides, of the `turn` that each one waits for with two
    processes to a core, and of each byte; of the hooks of a unit of `fully_shard` in the passes of a micro-batch; of a
    byte of weights and state, and a `tensor` of the update; of a micro-batch, or an action of a pipeline; of a step.
    `error` is the median one of a step that the others predict. `constants` is the version of what the constants mean.
    A fit to past runs has the `typical` constants that it began with, of small jobs on the machine if it has any.
    """

    machine: str
    torch: str
    cores: int
    runs: int = 0
    error: float = 1.0
    constants: int = 0
    flop: float = 0.0
    convolution: float = 0.0
    byte: float = 0.0
    kernel: float = 0.0
    cut: float = 0.0
    latency: float = 0.0
    within: float = 0.0
    turn: float = 0.0
    link: float = 0.0
    shard: float = 0.0
    update: float = 0.0
    tensor: float = 0.0
    microbatch: float = 0.0
    step: float = 0.0
    typical: tuple[float, ...] = ()

    @property
    def digest(self) -> str:
        """The name of the fit by its content."""
        return _digest(self)


Times = TypeVar("Times", Calibration, RunFit)


def _digest(times: Calibration | RunFit) -> str:
    """Returns the name of times by their content, however their file is laid out."""
    return hashlib.blake2b(json.dumps(to_json(times), sort_keys=True).encode(), digest_size=8).hexdigest()


def with_constants(fit: RunFit, constants: Mapping[str, float]) -> RunFit:
    return from_json(RunFit, {**to_json(fit), **constants})


def read_times(kind: type[Times], data: object) -> Times:
    """Returns times from plain data. Raises DecodeError if these are of another form or version, negative, or not
    finite.
    """
    times = from_json(kind, data)
    if isinstance(times, RunFit) and times.constants != CONSTANTS_VERSION:
        raise DecodeError(f"its constants are of version {times.constants}, and those of this dslc {CONSTANTS_VERSION}")
    if isinstance(times, RunFit) and times.typical and (len(times.typical) != len(CONSTANTS) or not all(times.typical)):
        raise DecodeError(f"its typical constants are not {len(CONSTANTS)} times above zero")
    for name, number in _numbers("", to_json(times)):
        if not 0 <= number < inf:
            raise DecodeError(f"{name} is {number}, which is no time")
    return times


def _numbers(name: str, data: object) -> Iterator[tuple[str, float]]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _numbers(key, value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _numbers(name, value)
    elif isinstance(data, int | float):
        yield name, data


def fit_text(kind: str, fit: RunFit, heading: str) -> str:
    """Returns a catalogue file with a fit of one kind of device, as TOML."""
    lines = [*(f"# {line}" for line in heading.splitlines()), f"[{kind}]", f"[{kind}.fit]"]
    return "\n".join([*lines, *(f"{name} = {_toml(value)}" for name, value in to_json(fit).items())]) + "\n"


@record
class CollectiveMeasurement(Record):
    """The seconds of a collective among `ranks` with few and with many bytes of input on each."""

    operation: str
    ranks: int
    bytes: tuple[int, int]
    seconds: tuple[float, float]
    across: bool = False  # hosts


@record
class RankMeasurement(Record):
    passes: tuple[tuple[int, Passes], ...]  # by the samples of a micro-batch
    update: float
    parameters: int  # that were updated
    data: float  # seconds in which one sample is made
    collectives: tuple[CollectiveMeasurement, ...]
    overlap: float


def layer_signature(layer: LayerNode, arithmetic: str) -> str:
    """Returns the name of a layer's work: its word, and a digest of what decides its time."""
    shapes = sorted(parameter.shape for parameter in layer.parameters)
    work = (layer.input, layer.output, shapes, layer.forward_flops, layer.backward_flops, layer.float32, arithmetic)
    return f"{layer.kind} {hashlib.blake2b(repr(work).encode(), digest_size=5).hexdigest()}"


def loss_signature(loss: str, output: object, arithmetic: str) -> str:
    return f"{loss} {hashlib.blake2b(repr((output, arithmetic)).encode(), digest_size=5).hexdigest()}"


def network_signature(layers: Iterable[str], loss: str, exchange: str) -> str:
    """Returns the name of a network, by the signatures of its layers and its loss, with its gradient exchange if ranks
    compute more in it than sums.
    """
    digest = hashlib.blake2b(repr((sorted(layers), loss)).encode(), digest_size=5).hexdigest()
    return f"network {digest} {exchange}".strip()


def data_signature(job: JobSpec, samples: object) -> str:
    """Returns the name of the making of a job's samples, which are of one shape: its source, and a digest of what
    decides its time.
    """
    source = job.data.source
    augmentations = [each.word for each in getattr(source, "augment", None) or ()]
    return f"{source.word} {hashlib.blake2b(repr((samples, augmentations)).encode(), digest_size=5).hexdigest()}"


def update_name(job: JobSpec) -> str:
    """Returns the name of a job's update: its optimizer, and whether it limits gradients before."""
    return f"{job.train.optimizer.word}{' clip' if job.train.clip is not None else ''}"


def collective_name(operation: str, ranks: int, backend: str, *, across: bool = False) -> str:
    """Returns the name of a collective among `ranks`, on one host or `across` hosts; `ranks` is 0 for a message, which
    is between two.
    """
    memory = " over shared memory" if backend == "shared_memory" else ""
    return f"{operation} {ranks or 2}{' across hosts' if across else ''}{memory}"


def merge_calibrations(older: Calibration, newer: Calibration) -> Calibration:
    """Returns the times of both, of what both measured the newer ones. They are of one machine."""
    return replace(
        newer,
        layers={**older.layers, **newer.layers},
        losses={**older.losses, **newer.losses},
        updates={**older.updates, **newer.updates},
        collectives={**older.collectives, **newer.collectives},
        data={**older.data, **newer.data},
        overlap={**older.overlap, **newer.overlap},
        rest={**older.rest, **newer.rest},
    )


def calibration_text(kind: str, calibration: Calibration, heading: str) -> str:
    """Returns a catalogue file with a calibration of one kind of device, as TOML."""
    lines = [f"# {line}" for line in heading.splitlines()]
    data = to_json(calibration)
    tables = {name: value for name, value in data.items() if isinstance(value, dict)}
    lines += [f"[{kind}]", f"[{kind}.calibration]"]
    lines += [f"{name} = {_toml(value)}" for name, value in data.items() if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{kind}.calibration.{name}]", *(f"{_toml(key)} = {_toml(each)}" for key, each in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """Returns a number, a text or a table of them as TOML, which writes numbers and plain text as JSON does."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + " }"
    return json.dumps(value)
