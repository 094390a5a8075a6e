"""Exchanges by the book: all ranks of a training simulated in one process, to be compared with real ones step by step.

The gradient of a rank's share is torch's; all that ranks send one another, and the update, is numpy, written from the
rules of docs/exchanges.md. `Simulated` is the frame: a subclass, or a function, says what a step does.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, relu

from dslc.compiler.ir.program import JobProgram
from helpers.launcher import Launcher
from helpers.paths import HELPERS
from helpers.trained import Trained, ready, train, write_job_with_helper

Array: TypeAlias = "np.ndarray[Any, Any]"
Weights: TypeAlias = dict[str, Array]
Forward: TypeAlias = Callable[[Mapping[str, Tensor], Tensor], Tensor]

SAMPLES, WIDTH, CLASSES = 82, 6, 4
NAMES = ("0.bias", "0.weight", "2.bias", "2.weight")  # sorted, as buckets of weights are
JOB = """
model {
  network = [linear(7), relu(), linear(4)]
  loss    = cross_entropy()
}
data {
  source  = arrays("made.npz")
  batch   = 24
  shuffle = false
  last_batch = keep
}
devices { cpus = RANKS }
parallelism { gradients = EXCHANGE }
train {
  steps     = 6
  optimizer = sgd(lr = 0.1)
  hooks     = python("own_hooks:Weights", ranks = all)
}
log { every = 1 step }
"""
TIED, ASIDE, BOTH = (
    f'model.network=python("own_layers:Layers", {more})'
    for more in ("tied = true", "aside = true", "tied = true, aside = true")
)
MOST = 25 * 2**18  # numbers: a bucket is full once it holds 25 MiB
BATCH, LR = 24, np.float32(0.1)  # the fourth batch of an epoch has 10 samples, an uneven share on 3 and 4 ranks


def job(folder: Path, ranks: int, exchange: str, text: str = JOB) -> Path:
    """Writes the job with its data, which are made here, its hook and its network."""
    folder.mkdir(exist_ok=True)
    shutil.copy(HELPERS / "own_layers.py", folder)
    inputs, targets = made_data()
    np.savez(folder / "made.npz", x=inputs, y=targets)
    return write_job_with_helper(
        "own_hooks.py", folder, text.replace("RANKS", str(ranks)).replace("EXCHANGE", exchange)
    )


def made_data() -> tuple[Array, Array]:
    drawn = np.random.default_rng(7)
    inputs = drawn.normal(size=(SAMPLES, WIDTH)).astype(np.float32)
    return inputs, (inputs @ drawn.normal(size=(WIDTH, CLASSES))).argmax(1).astype(np.int64)


def run(launcher: Launcher, made: Path, *settings: str, pieces: int = 1, **changed: Any) -> Trained:
    """Trains the job: `pieces` ranks make a node, as far as the exchange knows, though all are here."""
    ready_ = ready(made, *settings)
    folder = made.parent / f"run{len(list(made.parent.iterdir()))}"
    folder.mkdir()
    return train(launcher, folder, in_pieces(ready_.program, pieces), ready_.places, **changed)


def in_pieces(program: JobProgram, pieces: int) -> JobProgram:
    """Returns the program in which so many ranks make a node, as far as the exchange knows."""
    if pieces == 1:
        return program
    assert program.gradients.exchange is not None
    exchange = replace(program.gradients.exchange, pieces=pieces)
    return replace(program, gradients=replace(program.gradients, exchange=exchange))


def weights_of(trained: Trained, rank: int, step: int) -> Weights:
    with np.load(trained.folder / f"weights-{rank}-{step}.npz") as found:
        return dict(found)


def flat(weights: Weights, names: tuple[str, ...] = NAMES) -> Array:
    return np.concatenate([weights[name].reshape(-1) for name in names])


def unflatten(numbers: Array, like: Weights, names: tuple[str, ...] = NAMES) -> Weights:
    """Undoes `flat`."""
    found, start = {}, 0
    for name in names:
        size = like[name].size
        found[name] = numbers[start : start + size].reshape(like[name].shape)
        start += size
    return found


def shares(batch: int, ranks: int) -> list[tuple[int, int]]:
    """Returns the samples of a global batch that each rank has: the larger shares first."""
    sizes = [batch // ranks + (rank < batch % ranks) for rank in range(ranks)]
    ends = np.cumsum(sizes)
    return [(int(end - size), int(end)) for end, size in zip(ends, sizes, strict=True)]


def two_layers(weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Returns the output of the job's network."""
    hidden = relu(linear(inputs, weights["0.weight"], weights["0.bias"]))
    return linear(hidden, weights["2.weight"], weights["2.bias"])


def three_layers(weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Returns the output of own_layers.py's."""
    second = weights.get("second.weight", weights["first.weight"])
    hidden = relu(linear(inputs, weights["first.weight"], weights["first.bias"]))
    return linear(relu(linear(hidden, second, weights["second.bias"])), weights["last.weight"], weights["last.bias"])


class Simulated:
    """All ranks of a training: `weights` of each after the last step, which had `count` samples. `forward` computes the
    network, and `names` are the parameters that are exchanged (None: all).
    """

    def __init__(
        self,
        start: Weights,
        ranks: int,
        batch: int = BATCH,
        *,
        forward: Forward = two_layers,
        names: Iterable[str] | None = None,
    ) -> None:
        self.ranks, self.batch, self.forward = ranks, batch, forward
        self.step = self.count = 0
        self.names = tuple(sorted(start if names is None else names))
        self.weights = [{name: each.copy() for name, each in start.items()} for _ in range(ranks)]
        self.inputs, self.targets = made_data()
        self.scale = 1.0  # of the loss
        self.around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext  # of the passes

    def exchanged(self, rank: int = 0) -> Weights:
        """Returns the weights of a rank that are exchanged."""
        return {name: self.weights[rank][name] for name in self.names}

    def take(self, found: list[Weights]) -> None:
        """Gives each rank these weights, and leaves it its others."""
        self.weights = [own | new for own, new in zip(self.weights, found, strict=True)]

    def gradients(self) -> list[Weights]:
        """Returns for the next step each rank's gradient of its share of the loss, times the ranks: the mean over the
        ranks is the gradient of the global batch. It is 0 of what the network does not use.
        """
        first = self.step % -(-len(self.inputs) // self.batch) * self.batch
        self.count = count = min(self.batch, len(self.inputs) - first)
        self.step += 1
        return [
            self._gradient(self.weights[rank], slice(first + start, first + stop), count)
            for rank, (start, stop) in enumerate(shares(count, self.ranks))
        ]

    def _gradient(self, weights: Weights, samples: slice, count: int) -> Weights:
        tensors = {name: torch.from_numpy(each).requires_grad_(name in self.names) for name, each in weights.items()}
        with self.around():
            output = self.forward(tensors, torch.from_numpy(self.inputs[samples]))
            summed = cross_entropy(output, torch.from_numpy(self.targets[samples]), reduction="sum")
        (summed * (self.ranks / count) * self.scale).backward()
        found = {name: tensors[name].grad for name in self.names}
        return {
            name: np.zeros_like(weights[name]) if each is None else each.numpy() / np.float32(self.scale)
            for name, each in found.items()
        }


def descend(weights: Weights, gradient: Weights, lr: np.float32 = LR) -> Weights:
    """Plain gradient descent."""
    return {name: each - lr * gradient[name] for name, each in weights.items()}


def buckets_of(weights: Weights, names: Iterable[str]) -> list[tuple[str, ...]]:
    """Returns names in the buckets in which their numbers are exchanged together."""
    found: list[tuple[str, ...]] = []
    held: list[str] = []
    for name in names:
        held.append(name)
        if sum(weights[each].size for each in held) >= MOST:
            found.append(tuple(held))
            held = []
    return [*found, tuple(held)] if held else found


def mean_of(parts: list[Weights]) -> Weights:
    return {name: np.asarray(np.mean([part[name] for part in parts], axis=0, dtype=np.float32)) for name in parts[0]}


def agree(trained: Trained, simulated: Simulated, step: int, atol: float = 1e-6, few: float = 0.0) -> None:
    """Asserts that the weights of each rank after a step are the simulated ones, but for a share of `few` numbers."""
    for rank, wanted in enumerate(simulated.weights):
        found = weights_of(trained, rank, step)
        for name, each in wanted.items():
            if few and np.mean(~np.isclose(found[name], each, rtol=0, atol=atol)) <= few:
                continue
            np.testing.assert_allclose(
                found[name], each, rtol=0, atol=atol, err_msg=f"rank {rank}, step {step}: {name}"
            )
