"""`powersgd(rank)`, beside all ranks simulated in numpy."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.exchanged_gradients import LowRank
from helpers.exchanges import Simulated, agree, descend, job, run, weights_of
from helpers.launcher import Launcher

STEPS = 6


@pytest.mark.core
@pytest.mark.parametrize(("ranks", "rank"), ((2, 1), (3, 3), (4, 2)))
def test_gradients_are_those_of_the_rule(launcher: Launcher, tmp_path: Path, ranks: int, rank: int) -> None:
    trained = run(launcher, job(tmp_path / "job", ranks, f"powersgd(rank = {rank})"))
    simulated, exchange = Simulated(weights_of(trained, 0, 0), ranks), LowRank(ranks, rank)
    for step in range(1, STEPS + 1):
        found = exchange.agreed(simulated.gradients())
        simulated.weights = [descend(each, found) for each in simulated.weights]
        agree(trained, simulated, step, 2e-6)
    assert exchange.factors.keys() == ({"0.weight"} if rank == 3 else {"0.weight", "2.weight"})
