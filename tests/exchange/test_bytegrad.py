"""`bytegrad()`, beside all ranks simulated in numpy."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.exchanged_gradients import in_codes
from helpers.exchanges import Simulated, agree, descend, job, run, weights_of
from helpers.launcher import Launcher

STEPS = 6


@pytest.mark.core
@pytest.mark.parametrize(("ranks", "pieces"), ((2, 1), (3, 1), (4, 1), (4, 2)))
def test_gradients_are_those_of_the_rule(launcher: Launcher, tmp_path: Path, ranks: int, pieces: int) -> None:
    trained = run(launcher, job(tmp_path / "job", ranks, "bytegrad()"), pieces=pieces)
    simulated = Simulated(weights_of(trained, 0, 0), ranks)
    for step in range(1, STEPS + 1):
        found = in_codes(simulated.gradients(), pieces=pieces)
        simulated.weights = [descend(each, found) for each in simulated.weights]
        agree(trained, simulated, step)
