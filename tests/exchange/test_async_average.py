"""`async_average()`: no step waits, weights come together, and it ends on every path."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.exchanged_weights import alone
from helpers.exchanges import (
    TIED,
    Array,
    Forward,
    Simulated,
    Weights,
    agree,
    descend,
    flat,
    job,
    mean_of,
    run,
    three_layers,
    two_layers,
    weights_of,
)
from helpers.launcher import Launcher
from helpers.trained import Trained, profiled, ready

from dslc.compiler.ir.actions import Cadence

STEPS = 12
OFTEN, NEVER = "async_average(interval = 1us)", "async_average(interval = 10h)"
SELDOM = "log.every=1000 steps"  # so that no step waits for a loss


def hooks(*more: str) -> str:
    made = ['python("own_hooks:Course", ranks = all)', *more]
    return f"train.hooks=[{', '.join(made)}]"


def held_back(folder: Path, at: int, until: int) -> str:
    """Returns the hook that holds rank 1 back in step `at` until rank 0 has done step `until`."""
    os.mkfifo(folder / "pipe")
    return (
        f'python("own_hooks:HeldBack", ranks = all, pipe = "{folder / "pipe"}", rank = 1, at = {at}, until = {until})'
    )


def numbers(weights: Weights) -> Array:
    return flat(weights, tuple(sorted(weights)))


def left(trained: Trained, name: str) -> Array:
    with np.load(trained.folder / f"{name}.npz") as found:
        return numbers(dict(found))


def hold_the_rule(trained: Trained, ranks: int, steps: int = STEPS, forward: Forward = two_layers) -> Array:
    """Asserts that each rank's steps are its own, and that what is added between them leaves the mean as it was.
    Returns what each rank was given in all.
    """
    simulated = Simulated(weights_of(trained, 0, 0), ranks, forward=forward)
    given = np.zeros((ranks, numbers(simulated.weights[0]).size))
    for step in range(1, steps + 1):
        for rank in range(ranks):
            begun = left(trained, f"begun-{rank}-{step}")
            given[rank] += begun - numbers(weights_of(trained, rank, step - 1))
            with np.load(trained.folder / f"begun-{rank}-{step}.npz") as found:
                simulated.weights[rank] = dict(found)
        gradients = alone(simulated.gradients(), simulated.count)
        simulated.weights = [descend(w, g) for w, g in zip(simulated.weights, gradients, strict=True)]
        agree(trained, simulated, step)
    for rank in range(ranks):
        given[rank] += left(trained, f"end-{rank}") - numbers(weights_of(trained, rank, steps))
    np.testing.assert_allclose(given.sum(0), 0, atol=2e-5)
    return given


def are_together(trained: Trained, ranks: int) -> None:
    saved = numbers(dict(trained.weights))
    for rank in range(ranks):
        np.testing.assert_allclose(left(trained, f"end-{rank}"), saved, rtol=0, atol=1e-6)


@pytest.mark.core
def test_no_step_waits_for_a_rank_that_is_held_back(launcher: Launcher, tmp_path: Path) -> None:
    made = job(tmp_path / "job", 3, OFTEN)
    held = hooks(held_back(tmp_path, at=3, until=STEPS - 1))
    trained = run(launcher, made, held, SELDOM, f"train.steps={STEPS}")
    given = hold_the_rule(trained, 3)
    assert np.abs(given).max() > 1e-3
    are_together(trained, 3)


def test_a_rank_that_is_done_goes_on_taking_part(launcher: Launcher, tmp_path: Path) -> None:
    """With a tied weight."""
    made = job(tmp_path / "job", 2, NEVER)
    trained = run(launcher, made, TIED, hooks(), SELDOM, f"train.steps={STEPS}")
    apart = [numbers(weights_of(trained, rank, STEPS)) for rank in range(2)]
    assert np.abs(apart[0] - apart[1]).max() > 1e-3
    hold_the_rule(trained, 2, forward=three_layers)
    are_together(trained, 2)


def test_steps_alone_are_those_of_each_rank(launcher: Launcher, tmp_path: Path) -> None:
    """With exact sums in the first three steps."""
    exchange = NEVER.replace(")", ", warmup = 3 steps)")
    trained = run(launcher, job(tmp_path / "job", 3, exchange))
    simulated = Simulated(weights_of(trained, 0, 0), 3)
    for step in range(1, 7):
        gradients = simulated.gradients()
        gradients = [mean_of(gradients)] * 3 if step <= 3 else alone(gradients, simulated.count)
        simulated.weights = [descend(w, g) for w, g in zip(simulated.weights, gradients, strict=True)]
        agree(trained, simulated, step)


@pytest.mark.parametrize("warmup", (0, 3))
def test_the_count_of_samples_is_planned_while_sums_are_exact(tmp_path: Path, warmup: int) -> None:
    """Samples with no target are left out of the mean, over all ranks while they sum gradients."""
    exchange = NEVER.replace(")", f", warmup = {warmup} steps)")
    made = ready(job(tmp_path / "job", 2, exchange), "model.loss=cross_entropy(ignore = 0)")
    whens = [
        node.when
        for place in made.compiled.plan.ranks
        for node in place.traffic
        if node.what == "count of what is kept"
    ]
    assert whens == [Cadence(until=3)] * bool(warmup)


def test_the_exchanges_without_a_warmup_are_those_of_the_plan(launcher: Launcher, tmp_path: Path) -> None:
    made = job(tmp_path / "job", 2, NEVER).rename(tmp_path / "job" / "made.plt")
    found = profiled(launcher, tmp_path, made, "model.loss=cross_entropy(ignore = 0)", SELDOM)
    assert all(rank["collectives"] == [] for rank in found), found


def test_ranks_of_a_node_stay_alike(launcher: Launcher, tmp_path: Path) -> None:
    made = job(tmp_path / "job", 4, OFTEN)
    trained = run(launcher, made, hooks(), SELDOM, f"train.steps={STEPS}", pieces=2)
    for step in range(1, STEPS + 1):
        weights = [flat(weights_of(trained, rank, step)) for rank in range(4)]
        assert np.array_equal(weights[0], weights[1]) and np.array_equal(weights[2], weights[3])
    are_together(trained, 4)


def test_evaluations_and_checkpoints_complete_the_rounds(launcher: Launcher, tmp_path: Path) -> None:
    made = job(tmp_path / "job", 3, OFTEN)
    kept = (f"checkpoint.dir={tmp_path / 'kept'}", "checkpoint.every=2 steps", "data.validation=10/82")
    more = ("evaluate.every=3 steps", SELDOM, hooks())
    trained = run(launcher, made, *kept, *more, f"train.steps={STEPS}")
    assert len(trained.losses("validation")) == 4
    resumed = run(launcher, made, *kept, *more, "checkpoint.resume=auto", "train.steps=20")
    mean = np.mean([flat(weights_of(resumed, rank, STEPS)) for rank in range(3)], axis=0)
    np.testing.assert_allclose(mean, flat(dict(trained.weights)), rtol=0, atol=1e-6)
    are_together(resumed, 3)


def test_a_training_without_rounds_goes_on_to_the_bit(launcher: Launcher, tmp_path: Path) -> None:
    made = job(tmp_path / "job", 2, NEVER)
    settings = ("train.optimizer.momentum=0.9", "checkpoint.every=4 steps")
    whole = run(launcher, made, *settings)
    run(launcher, made, *settings, f"checkpoint.dir={tmp_path / 'kept'}", steps=4)
    parts = run(launcher, made, *settings, f"checkpoint.dir={tmp_path / 'kept'}", "checkpoint.resume=auto")
    for rank in range(2):
        assert np.array_equal(flat(weights_of(whole, rank, 6)), flat(weights_of(parts, rank, 6)))


@pytest.mark.parametrize("exchange", (OFTEN, NEVER, "local_sgd(period = 7)"))
def test_ctrl_c_ends_it_after_one_step(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    """Ranks that do not wait for each other find the step to leave after where they agree on the loss."""
    asks = hooks('python("own_hooks:Asks", at = 5)').replace("Course", "Diary")
    ready_ = ready(job(tmp_path / "job", 2, exchange), asks, "log.every=10 steps", "train.steps=100000")
    (tmp_path / "run").mkdir()
    outcome, shown = launcher.launch(ready_.program, ready_.places, tmp_path / "run")
    assert outcome is not None and outcome.failure is None and 0 < outcome.steps < 100000, (outcome, shown)
    assert outcome.steps % 10 == 0
    assert (tmp_path / "run" / "weights.safetensors").exists()


def test_a_failing_rank_ends_all(launcher: Launcher, tmp_path: Path) -> None:
    """Rank 0 fails while both step."""
    made = job(tmp_path / "job", 2, OFTEN)
    fails = hooks('python("own_hooks:Fails", at = 9)').replace("Course", "Diary")
    ready_ = ready(made, fails, SELDOM, "train.steps=100000")
    (tmp_path / "run").mkdir()
    outcome, shown = launcher.launch(replace(ready_.program), ready_.places, tmp_path / "run")
    assert outcome is not None and outcome.failure is not None, shown
    assert (outcome.failure.rank, outcome.failure.message) == (0, "ValueError: no more")
