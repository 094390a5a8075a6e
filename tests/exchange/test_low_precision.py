"""`low_precision_decentralized()`, beside all ranks simulated in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.exchanged_weights import Ring
from helpers.exchanges import Simulated, agree, descend, flat, job, mean_of, run, unflatten, weights_of
from helpers.launcher import Launcher

STEPS = 6


@pytest.mark.core
@pytest.mark.parametrize(("ranks", "interval"), [(2, 1), (3, 1), (4, 1), (4, 2)])
def test_replicas_advance_by_what_was_sent(launcher: Launcher, tmp_path: Path, ranks: int, interval: int) -> None:
    exchange = f"low_precision_decentralized(interval = {interval})"
    trained = run(launcher, job(tmp_path / "job", ranks, exchange))
    like = weights_of(trained, 0, 0)
    simulated, ring = Simulated(like, ranks), Ring(flat(like), ranks)
    for step in range(1, STEPS + 1):
        simulated.weights = [descend(w, g) for w, g in zip(simulated.weights, simulated.gradients(), strict=True)]
        if step % interval == 0:
            advanced = ring.exchange([flat(each) for each in simulated.weights])
            simulated.weights = [unflatten(each, like) for each in advanced]
        # A difference next to the middle of two codes may be rounded either way: a code is about 1e-3 here.
        agree(trained, simulated, step, atol=1e-6 if step <= interval else 5e-3)


@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_the_rule_of_the_test_brings_members_together(ranks: int) -> None:
    drawn = np.random.default_rng(1)
    ring = Ring(np.zeros(50, np.float32), ranks)
    weights = ring.exchange([drawn.normal(size=50).astype(np.float32) for _ in range(ranks)])
    begun = np.ptp(weights, axis=0).max()
    for _ in range(12):
        weights = ring.exchange(weights)
    assert begun > 1 and np.ptp(weights, axis=0).max() < 0.05 * begun


def test_nodes_sum_exactly_and_are_members_of_the_ring(launcher: Launcher, tmp_path: Path) -> None:
    trained = run(launcher, job(tmp_path / "job", 4, "low_precision_decentralized()"), pieces=2)
    like = weights_of(trained, 0, 0)
    simulated, numbers = Simulated(like, 4), flat(like)
    half = -(-len(numbers) // 2)  # each rank of a node exchanges a piece of it, filled up with zeros
    filled = np.concatenate([numbers, np.zeros(2 * half - len(numbers), np.float32)])
    rings = [Ring(filled[:half], 2), Ring(filled[half:], 2)]
    for step in range(1, STEPS + 1):
        gradients = simulated.gradients()
        nodes = [mean_of(gradients[:2]), mean_of(gradients[2:])]
        taken = [flat(descend(simulated.weights[2 * node], nodes[node])) for node in range(2)]
        taken = [np.concatenate([each, filled[len(numbers) :]]) for each in taken]
        pieces = [ring.exchange([each[n * half : (n + 1) * half] for each in taken]) for n, ring in enumerate(rings)]
        whole = [unflatten(np.concatenate([piece[node] for piece in pieces]), like) for node in range(2)]
        simulated.weights = [whole[rank // 2] for rank in range(4)]
        agree(trained, simulated, step, atol=1e-6 if step == 1 else 5e-3)
