"""`bytegrad()`, beside all ranks simulated in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.exchanges import Array, Simulated, Weights, agree, apart, descend, flat, job, mean_of, run, weights_of
from helpers.launcher import Launcher

STEPS = 6
ORDER = ("2.weight", "2.bias", "0.weight", "0.bias")  # in the only bucket


def coded(row: Array) -> Array:
    """Returns a row after MinMaxUInt8, as docs/exchanges.md has it."""
    low, high = row.min(), row.max()
    scale = np.float32(255) / (high - low + np.float32(1e-7))
    upper = np.round(high * scale)
    lower = upper - 255
    code = (np.minimum(np.round(row * scale), upper) - lower).astype(np.uint8)
    return (code.astype(np.float32) + lower) / scale


def exchanged(buckets: list[Array]) -> Array:
    """Returns what all members agree on."""
    members, count = len(buckets), buckets[0].size
    rows = [np.pad(each, (0, -count % members)).reshape(members, -1) for each in buckets]
    agreed = [
        coded(np.mean([coded(each[owner]) for each in rows], axis=0, dtype=np.float32)) for owner in range(members)
    ]
    return np.concatenate(agreed)[:count]


def agreed(gradients: list[Weights], names: tuple[str, ...], pieces: int = 1) -> Weights:
    whole = [flat(each, names) for each in gradients]
    nodes = [np.mean(whole[n : n + pieces], axis=0, dtype=np.float32) for n in range(0, len(whole), pieces)]
    cut = [np.pad(each, (0, -each.size % pieces)).reshape(pieces, -1) for each in nodes]
    found = np.concatenate([exchanged([each[piece] for each in cut]) for piece in range(pieces)])
    return apart(found[: whole[0].size], gradients[0], names)


@pytest.mark.parametrize(("ranks", "pieces"), ((2, 1), (3, 1), (4, 1), (4, 2)))
def test_gradients_are_those_of_the_rule(launcher: Launcher, tmp_path: Path, ranks: int, pieces: int) -> None:
    trained = run(launcher, job(tmp_path / "job", ranks, "bytegrad()"), pieces=pieces)
    simulated = Simulated(weights_of(trained, 0, 0), ranks)
    for step in range(1, STEPS + 1):
        found = agreed(simulated.gradients(), ORDER, pieces)
        simulated.weights = [descend(each, found) for each in simulated.weights]
        agree(trained, simulated, step)
