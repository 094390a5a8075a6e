"""The files through which dslc and the runner of a tool talk, and the network and samples that both train on.

setup.json          the configuration and its sizes (`ProofSetup`), written by dslc
program.json        the program of the job in one process, which has the network, its weights and the data
curve.json          the numbers of each step (`Curve`), written by rank 0 of the tool
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import TensorDataset

    from dslc.compiler.ir.program import JobProgram, RankPlace

CURVE = "curve.json"
_SETUP = "setup.json"


@dataclass(frozen=True, kw_only=True)
class ProofSetup:
    """The training of a tool: its configuration as plain data, and the sizes on this machine.

    `length` is the number of steps of the whole training, which schedules see; `steps` of them are run. `autos` are the
    values of keys that the configuration leaves to `auto`, as dotted paths. `engine` is the configuration of DeepSpeed
    that belongs to a tool's, and `path` the file of the configuration.
    """

    config: Mapping[str, object]
    micro: int
    accumulation: int
    ranks: int
    steps: int
    length: int
    autos: Mapping[str, object] = field(default_factory=dict)
    engine: Mapping[str, object] = field(default_factory=dict)
    path: str = ""

    @property
    def batch(self) -> int:
        return self.micro * self.accumulation * self.ranks


@dataclass(kw_only=True)
class Curve:
    """One training: the loss, the norm of the gradient before clipping, and the learning rate of each step.

    A loss is the mean over the samples of the global batch. A norm is None where the tool does not report it.
    `changes` are keys that this machine cannot run, each with what ran instead. `targets` are the least and the most
    targets of a micro-batch that are not ignored.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    targets: tuple[int, int] = (0, 0)

    def add(self, loss: float, norm: float | None, rate: float) -> None:
        self.losses.append(loss)
        self.norms.append(norm)
        self.rates.append(rate)


def as_section(value: object) -> dict[str, object]:
    """Returns a section of a configuration; an empty one in the place of None or "". Raises TypeError."""
    if not value:
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"a section of the configuration is {value!r}")
    return value


def write_setup(folder: str, setup: ProofSetup) -> None:
    with open(os.path.join(folder, _SETUP), "w", encoding="utf-8") as file:
        json.dump(asdict(setup), file)


def read_setup(folder: str) -> ProofSetup:
    with open(os.path.join(folder, _SETUP), encoding="utf-8") as file:
        return ProofSetup(**json.load(file))


def leave_curve(folder: str, curve: Curve) -> None:
    """Writes the curve on rank 0, and returns once all ranks are here. `entry.py` ends the process without more."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_rank() == 0:
        with open(os.path.join(folder, CURVE), "w", encoding="utf-8") as file:
            json.dump(asdict(curve), file)
    if dist.is_initialized():
        dist.barrier()


def read_curve(folder: str) -> Curve:
    with open(os.path.join(folder, CURVE), encoding="utf-8") as file:
        return Curve(**json.load(file))


def load_program(folder: str) -> tuple[JobProgram, RankPlace]:
    """Returns the program in one process, and the place of its only rank."""
    from dslc.runtime.process.program_file import read_program

    job, places = read_program(folder)
    return job, places[0]


def load_network(job: JobProgram) -> nn.Module:
    """Returns a module that maps input and target to the mean loss, with the weights that the job starts from."""
    import torch

    from dslc.runtime.loop.plain_loop import freeze_parameters, mean_loss
    from dslc.runtime.measure.observe import silence_dropout
    from dslc.runtime.model import documents, initial_weights
    from dslc.runtime.model.meta_model import build_model

    network = build_model(job.model, torch.device("cpu"))
    initial_weights.load(job.model, network)
    freeze_parameters(job.model, network)
    documents.apply(job.model.documents, network, masks=job.model.documents_masked)
    silence_dropout(network)
    loss = mean_loss(job.loss)

    class NetworkWithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return loss(self.network(input), target)

    return NetworkWithLoss()


def load_samples(job: JobProgram, place: RankPlace, steps: int) -> TensorDataset:
    """Returns the samples of the first steps, in the order of the job: step after step."""
    import torch

    from dslc.runtime.data.batches import batches
    from dslc.runtime.data.sources.open_sources import open_source

    source = open_source(job.data)
    pairs = [
        pair for batch in batches(job.data, source, place, 1, 0, steps, torch.device("cpu")) for pair in batch.micro
    ]
    inputs, targets = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
    return torch.utils.data.TensorDataset(inputs, targets)


def count_targets(samples: TensorDataset, setup: ProofSetup, job: JobProgram) -> tuple[int, int]:
    """Returns the least and the most targets of a micro-batch that the loss does not ignore."""
    ignored = -100 if job.loss.ignore is None else job.loss.ignore
    counts = [int((target != ignored).sum()) for target in samples.tensors[1].split(setup.micro)]
    return min(counts), max(counts)


def rank_batches(samples: TensorDataset, setup: ProofSetup, rank: int) -> list[tuple[Tensor, ...]]:
    """Returns the micro-batches of a rank, in the order of its steps: the ranks take turns."""
    first = range(rank * setup.micro, setup.steps * setup.batch, setup.micro * setup.ranks)
    return [samples[start : start + setup.micro] for start in first]


def mean_over_ranks(loss: Tensor) -> float:
    import torch.distributed as dist

    value = loss.detach().double().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return float(value)
