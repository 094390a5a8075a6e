"""`powersgd(rank)`, beside all ranks simulated in numpy."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.exchanges import (
    JOB,
    NAMES,
    Array,
    Simulated,
    Weights,
    agree,
    descend,
    flat,
    job,
    mean_of,
    run,
    weights_of,
)
from helpers.launcher import Launcher

STEPS = 6
SEED = 0


def drawn(name: str, columns: int, rank: int, seed: int = SEED) -> Array:
    told = hashlib.sha256(f"powersgd {seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(told[:8], "little", signed=True))
    return torch.randn((columns, rank), generator=generator).numpy()


class LowRank:
    """The state of all ranks, by the name of a matrix."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.rank = rank
        self.errors: dict[str, list[Array]] = {}
        self.factors: dict[str, Array] = {}
        self.ranks = ranks

    def agreed(self, gradients: list[Weights]) -> Weights:
        found = mean_of(gradients)
        for name, whole in found.items():
            rows, columns = whole.shape[0], int(np.prod(whole.shape[1:]))
            if whole.ndim < 2 or (rows + columns) * self.rank >= rows * columns:
                continue
            errors = self.errors.setdefault(name, [np.zeros((rows, columns), np.float32) for _ in range(self.ranks)])
            right = self.factors.get(name, drawn(name, columns, self.rank))
            matrices = [each[name].reshape(rows, columns) + e for each, e in zip(gradients, errors, strict=True)]
            left, _ = np.linalg.qr(np.mean([each @ right for each in matrices], axis=0, dtype=np.float32))
            self.factors[name] = np.mean([each.T @ left for each in matrices], axis=0, dtype=np.float32)
            low = left @ self.factors[name].T
            self.errors[name] = [each - low for each in matrices]
            found[name] = low.reshape(whole.shape)
        return found


@pytest.mark.parametrize(("ranks", "rank"), ((2, 1), (3, 2), (4, 1)))
def test_gradients_are_those_of_the_rule(launcher: Launcher, tmp_path: Path, ranks: int, rank: int) -> None:
    trained = run(launcher, job(tmp_path / "job", ranks, f"powersgd(rank = {rank})"))
    simulated, exchange = Simulated(weights_of(trained, 0, 0), ranks), LowRank(ranks, rank)
    for step in range(1, STEPS + 1):
        found = exchange.agreed(simulated.gradients())
        simulated.weights = [descend(each, found) for each in simulated.weights]
        agree(trained, simulated, step, 2e-6)
    assert exchange.factors.keys() == ({"0.weight", "2.weight"} if rank == 1 else {"0.weight", "2.weight"})
