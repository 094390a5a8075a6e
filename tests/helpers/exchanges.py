"""Exchanges by the book: all ranks of a training simulated in one process, to be compared with real ones step by step.

The gradient of a rank's share is torch's; all that ranks send one another, and the update, is numpy, written from the
rules of docs/exchanges.md. `Simulated` is the frame: a subclass, or a function, says what a step does.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from helpers.launcher import Launcher
from helpers.trained import Trained, beside, ready, train

Array: TypeAlias = "np.ndarray[Any, Any]"
Weights: TypeAlias = dict[str, Array]

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
BATCH, LR = 24, np.float32(0.1)  # the fourth batch of an epoch has 10 samples, an uneven share on 3 and 4 ranks


def job(folder: Path, ranks: int, exchange: str, text: str = JOB) -> Path:
    """Writes the job with its data, which are made here, and its hook."""
    folder.mkdir(exist_ok=True)
    inputs, targets = made_data()
    np.savez(folder / "made.npz", x=inputs, y=targets)
    return beside("own_hooks.py", folder, text.replace("RANKS", str(ranks)).replace("EXCHANGE", exchange))


def made_data() -> tuple[Array, Array]:
    drawn = np.random.default_rng(7)
    inputs = drawn.normal(size=(SAMPLES, WIDTH)).astype(np.float32)
    return inputs, (inputs @ drawn.normal(size=(WIDTH, CLASSES))).argmax(1).astype(np.int64)


def run(launcher: Launcher, made: Path, *settings: str, pieces: int = 1, **changed: Any) -> Trained:
    """Trains the job: `pieces` ranks make a node, as far as the exchange knows, though all are here."""
    ready_ = ready(made, *settings)
    if pieces > 1:
        gradients = ready_.program.gradients
        assert gradients.exchange is not None
        changed["gradients"] = replace(gradients, exchange=replace(gradients.exchange, pieces=pieces))
    folder = made.parent / f"run{len(list(made.parent.iterdir()))}"
    folder.mkdir()
    return train(launcher, folder, ready_.program, ready_.places, **changed)


def weights_of(trained: Trained, rank: int, step: int) -> Weights:
    with np.load(trained.folder / f"weights-{rank}-{step}.npz") as found:
        return dict(found)


def flat(weights: Weights, names: tuple[str, ...] = NAMES) -> Array:
    return np.concatenate([weights[name].reshape(-1) for name in names])


def apart(numbers: Array, like: Weights, names: tuple[str, ...] = NAMES) -> Weights:
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


class Simulated:
    """All ranks of a training: `weights` of each after the last step."""

    def __init__(self, start: Weights, ranks: int, batch: int = BATCH) -> None:
        self.ranks, self.batch, self.step = ranks, batch, 0
        self.weights = [{name: each.copy() for name, each in start.items()} for _ in range(ranks)]
        self.inputs, self.targets = made_data()

    def gradients(self) -> list[Weights]:
        """Returns for the next step each rank's gradient of its share of the loss, times the ranks: the mean over the
        ranks is the gradient of the global batch.
        """
        first = self.step % -(-SAMPLES // self.batch) * self.batch
        count = min(self.batch, SAMPLES - first)
        self.step += 1
        return [
            self._gradient(self.weights[rank], slice(first + start, first + stop), count)
            for rank, (start, stop) in enumerate(shares(count, self.ranks))
        ]

    def _gradient(self, weights: Weights, samples: slice, count: int) -> Weights:
        network = nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, CLASSES))
        network.load_state_dict({name: torch.from_numpy(each) for name, each in weights.items()})
        output = network(torch.from_numpy(self.inputs[samples]))
        summed = nn.functional.cross_entropy(output, torch.from_numpy(self.targets[samples]), reduction="sum")
        (summed * (self.ranks / count)).backward()
        return {n: p.grad.numpy() for n, p in network.named_parameters() if p.grad is not None}


def descend(weights: Weights, gradient: Weights, lr: np.float32 = LR) -> Weights:
    """Plain gradient descent."""
    return {name: each - lr * gradient[name] for name, each in weights.items()}


def mean_of(parts: list[Weights]) -> Weights:
    return {name: np.asarray(np.mean([part[name] for part in parts], axis=0, dtype=np.float32)) for name in parts[0]}


def agree(trained: Trained, simulated: Simulated, step: int, atol: float = 1e-6) -> None:
    """Asserts that the weights of each rank after a step are the simulated ones."""
    for rank, wanted in enumerate(simulated.weights):
        found = weights_of(trained, rank, step)
        for name, each in wanted.items():
            np.testing.assert_allclose(
                found[name], each, rtol=0, atol=atol, err_msg=f"rank {rank}, step {step}: {name}"
            )
