"""`fp16()`, `bf16()` and `local_sgd()`, beside all ranks simulated in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.exchanged_gradients import rounded
from helpers.exchanges import Simulated, agree, descend, flat, job, mean_of, run, weights_of
from helpers.launcher import Launcher

STEPS = 6


@pytest.mark.cases(2)
@pytest.mark.core
@pytest.mark.parametrize("ranks", (2, 3, 4))
@pytest.mark.parametrize("exchange", ("fp16", "bf16"))
def test_rounded_gradients_are_those_of_the_rule(launcher: Launcher, tmp_path: Path, exchange: str, ranks: int) -> None:
    trained = run(launcher, job(tmp_path / "job", ranks, f"{exchange}()"))
    simulated = Simulated(weights_of(trained, 0, 0), ranks)
    for step in range(1, STEPS + 1):
        agreed = rounded(simulated.gradients(), exchange)
        simulated.weights = [descend(each, agreed) for each in simulated.weights]
        # Sums of three and four are rounded in the order in which messages arrive.
        atol = 1e-6 if ranks == 2 else {"fp16": 3e-4, "bf16": 3e-3}[exchange]
        agree(trained, simulated, step, atol)


@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_local_sgd_averages_every_few_steps(launcher: Launcher, tmp_path: Path, ranks: int) -> None:
    trained = run(launcher, job(tmp_path / "job", ranks, "local_sgd(period = 3)"))
    simulated = Simulated(weights_of(trained, 0, 0), ranks)
    for step in range(1, STEPS + 1):
        taken = [descend(w, g) for w, g in zip(simulated.weights, simulated.gradients(), strict=True)]
        simulated.weights = [mean_of(taken)] * ranks if step % 3 == 0 else taken
        agree(trained, simulated, step)
    together = [flat(each) for each in simulated.weights]
    assert all(np.array_equal(each, together[0]) for each in together)


def test_a_period_of_one_step_is_an_exact_sum(launcher: Launcher, tmp_path: Path) -> None:
    exact, local = (
        run(launcher, job(tmp_path / word, 3, exchange))
        for word, exchange in (("a", "allreduce()"), ("b", "local_sgd(period = 1)"))
    )
    np.testing.assert_allclose(exact.losses(), local.losses(), rtol=0, atol=1e-6)


@pytest.mark.core
def test_nodes_sum_exactly_and_average_between_them(launcher: Launcher, tmp_path: Path) -> None:
    trained = run(launcher, job(tmp_path / "job", 4, "local_sgd(period = 2)"), pieces=2)
    simulated = Simulated(weights_of(trained, 0, 0), 4)
    for step in range(1, STEPS + 1):
        gradients = simulated.gradients()
        nodes = [mean_of(gradients[:2]), mean_of(gradients[2:])]
        taken = [descend(each, nodes[rank // 2]) for rank, each in enumerate(simulated.weights)]
        simulated.weights = [mean_of([taken[0], taken[2]])] * 4 if step % 2 == 0 else taken
        agree(trained, simulated, step)


@pytest.mark.parametrize("exchange", ("local_sgd(period = 3)", "bf16()"))
def test_a_resumed_training_goes_on_to_the_bit(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    made = job(tmp_path / "job", 2, exchange)
    momentum = ("train.optimizer.momentum=0.9", "checkpoint.every=4 steps")
    whole = run(launcher, made, *momentum)
    parts = run(launcher, made, *momentum, f"checkpoint.dir={tmp_path / 'kept'}", steps=4)
    parts = run(launcher, made, *momentum, f"checkpoint.dir={tmp_path / 'kept'}", "checkpoint.resume=auto")
    for rank in range(2):
        for step in (5, 6):
            one, other = weights_of(whole, rank, step), weights_of(parts, rank, step)
            assert all(np.array_equal(one[name], other[name]) for name in one)


def test_what_is_saved_and_evaluated_is_the_mean(launcher: Launcher, tmp_path: Path) -> None:
    made = job(tmp_path / "job", 3, "local_sgd(period = 4)")
    trained = run(launcher, made)
    of_ranks = [weights_of(trained, rank, STEPS) for rank in range(3)]
    assert not np.array_equal(flat(of_ranks[0]), flat(of_ranks[1]))
    np.testing.assert_allclose(flat(dict(trained.weights)), flat(mean_of(of_ranks)), rtol=0, atol=1e-7)
