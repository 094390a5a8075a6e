"""`decentralized()`, beside all ranks simulated in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.exchanged_weights import averaged
from helpers.exchanges import Simulated, agree, descend, flat, job, mean_of, run, weights_of
from helpers.launcher import Launcher

STEPS = 6


@pytest.mark.cases(4)
@pytest.mark.core
@pytest.mark.parametrize(
    ("ranks", "peers", "interval"),
    [(2, "all", 1), (3, "all", 1), (3, "all", 2), (4, "all", 1), (2, "shift_one", 1), (4, "shift_one", 1),
     (4, "shift_one", 2)],
)  # fmt: skip
def test_gradients_are_applied_to_the_average(
    launcher: Launcher, tmp_path: Path, ranks: int, peers: str, interval: int
) -> None:
    exchange = f"decentralized(peers = {peers}, interval = {interval})"
    trained = run(launcher, job(tmp_path / "job", ranks, exchange))
    simulated = Simulated(weights_of(trained, 0, 0), ranks)
    for step in range(1, STEPS + 1):
        gradients, before = simulated.gradients(), simulated.weights
        if step % interval == 0:
            before = averaged(before, step // interval - 1, peers == "shift_one")
        simulated.weights = [descend(w, g) for w, g in zip(before, gradients, strict=True)]
        agree(trained, simulated, step)
    assert not np.array_equal(flat(simulated.weights[0]), flat(simulated.weights[-1]))


def test_nodes_sum_exactly_and_average_with_one_another(launcher: Launcher, tmp_path: Path) -> None:
    trained = run(launcher, job(tmp_path / "job", 4, "decentralized(peers = shift_one)"), pieces=2)
    simulated = Simulated(weights_of(trained, 0, 0), 4)
    for step in range(1, STEPS + 1):
        gradients = simulated.gradients()
        nodes = [mean_of(gradients[:2]), mean_of(gradients[2:])]
        before = mean_of([simulated.weights[0], simulated.weights[2]])
        simulated.weights = [descend(before, nodes[rank // 2]) for rank in range(4)]
        agree(trained, simulated, step)
