"""`diloco()`, beside all ranks simulated in numpy, and its outer step beside torch's SGD."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.exchanged_weights import Outer
from helpers.exchanges import Simulated, agree, descend, flat, job, mean_of, run, unflatten, weights_of
from helpers.launcher import Launcher

from dslc.runtime.process.records import NOTES

STEPS = 6
EXCHANGE = "diloco(period = 2, lr = 0.7, momentum = 0.9)"


@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_the_mean_of_what_changed_is_the_gradient_of_an_outer_step(
    launcher: Launcher, tmp_path: Path, ranks: int
) -> None:
    trained = run(launcher, job(tmp_path / "job", ranks, EXCHANGE))
    simulated = Simulated(weights_of(trained, 0, 0), ranks)
    outer = Outer(simulated.weights[0])
    for step in range(1, STEPS + 1):
        taken = [descend(w, g) for w, g in zip(simulated.weights, simulated.gradients(), strict=True)]
        simulated.weights = [outer.step(taken)] * ranks if step % 2 == 0 else taken
        agree(trained, simulated, step)
    of_ranks = [flat(weights_of(trained, rank, STEPS)) for rank in range(ranks)]
    assert all(np.array_equal(each, of_ranks[0]) for each in of_ranks)


def test_the_outer_step_is_that_of_torch(launcher: Launcher, tmp_path: Path) -> None:
    trained = run(launcher, job(tmp_path / "job", 2, "diloco(period = 1, lr = 0.7, momentum = 0.9)"))
    outer = torch.nn.Parameter(torch.from_numpy(flat(weights_of(trained, 0, 0))))
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    simulated = Simulated(weights_of(trained, 0, 0), 2)
    for step in range(1, STEPS + 1):
        taken = [flat(descend(w, g)) for w, g in zip(simulated.weights, simulated.gradients(), strict=True)]
        outer.grad = torch.from_numpy(np.mean([outer.detach().numpy() - each for each in taken], axis=0))
        optimizer.step()
        simulated.weights = [unflatten(outer.detach().numpy().copy(), simulated.weights[0])] * 2
        agree(trained, simulated, step)


def test_nodes_sum_exactly_and_step_outwards_together(launcher: Launcher, tmp_path: Path) -> None:
    trained = run(launcher, job(tmp_path / "job", 4, EXCHANGE), pieces=2)
    simulated = Simulated(weights_of(trained, 0, 0), 4)
    outer = Outer(simulated.weights[0])
    for step in range(1, STEPS + 1):
        gradients = simulated.gradients()
        nodes = [mean_of(gradients[:2]), mean_of(gradients[2:])]
        taken = [descend(each, nodes[rank // 2]) for rank, each in enumerate(simulated.weights)]
        simulated.weights = [outer.step([taken[0], taken[2]])] * 4 if step % 2 == 0 else taken
        agree(trained, simulated, step)


def test_outer_state_goes_on_with_other_ranks(launcher: Launcher, tmp_path: Path) -> None:
    kept = (f"checkpoint.dir={tmp_path / 'kept'}", "checkpoint.every=2 steps")
    run(launcher, job(tmp_path / "job", 2, EXCHANGE), *kept, steps=2)
    parts = run(launcher, job(tmp_path / "more", 3, EXCHANGE), *kept, "checkpoint.resume=auto")
    assert "begins anew" not in (parts.folder / NOTES).read_text()
    start = weights_of(parts, 0, 2)
    simulated = Simulated(weights_of(parts, 0, 2), 3)
    simulated.step = 2
    whole = run(launcher, job(tmp_path / "job2", 2, EXCHANGE), steps=2)
    outer = Outer(weights_of(whole, 0, 0))
    first = Simulated(weights_of(whole, 0, 0), 2)
    for _ in range(2):
        first.weights = [descend(w, g) for w, g in zip(first.weights, first.gradients(), strict=True)]
    outer.step(first.weights)
    np.testing.assert_allclose(outer.weights, flat(start), rtol=0, atol=1e-6)
    for step in range(3, STEPS + 1):
        taken = [descend(w, g) for w, g in zip(simulated.weights, simulated.gradients(), strict=True)]
        simulated.weights = [outer.step(taken)] * 3 if step % 2 == 0 else taken
        agree(parts, simulated, step)
