"""Exchanges of gradients together with what else a training may have, beside all ranks simulated in numpy; resumed; on
one rank; and with numbers that are not finite.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.exchanged_gradients import LowRank, in_codes, rounded
from helpers.exchanges import JOB, Simulated, agree, descend, job, run, weights_of
from helpers.launcher import Launcher
from helpers.trained import ready

from dslc.runtime.process.failure import describe

STEPS = 6
EXCHANGES = ("bytegrad()", "powersgd(rank = 1)")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_beside_a_sharded_optimizer(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    trained = run(launcher, job(tmp_path / "job", 3, exchange), "parallelism.zero=1")
    agreed = LowRank(3, 1).agreed if exchange.startswith("powersgd") else in_codes
    simulated = Simulated(weights_of(trained, 0, 0), 3)
    for step in range(1, STEPS + 1):
        found = agreed(simulated.gradients())
        simulated.weights = [descend(each, found) for each in simulated.weights]
        agree(trained, simulated, step, 2e-6)


@pytest.mark.parametrize("exchange", (*EXCHANGES, "fp16()", "bf16()"))
def test_under_loss_scaling_steps_that_overflow_leave_no_trace(
    launcher: Launcher, tmp_path: Path, exchange: str
) -> None:
    text = JOB.replace("lr = 0.1)", "lr = 0.1)\n  precision = fp16").replace("[linear(7)", "[linear(7)")
    exact, found = (
        run(launcher, job(tmp_path / word, 2, each, text))
        for word, each in (("exact", "allreduce()"), ("found", exchange))
    )
    np.testing.assert_allclose(found.losses(), exact.losses(), rtol=0, atol=0.05)


@pytest.mark.parametrize("exchange", (*EXCHANGES, "fp16()", "bf16()"))
def test_one_rank_trains_as_without_an_exchange(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    exact, found = (run(launcher, job(tmp_path / each[:2], 1, each)) for each in ("allreduce()", exchange))
    one, other = weights_of(exact, 0, STEPS), weights_of(found, 0, STEPS)
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.cases(1)
@pytest.mark.parametrize("exchange", (*EXCHANGES, "fp16()"))
def test_a_resumed_training_goes_on_to_the_bit(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    made, kept = job(tmp_path / "job", 2, exchange), f"checkpoint.dir={tmp_path / 'kept'}"
    settings = ("train.optimizer.momentum=0.9", "checkpoint.every=3 steps")
    whole = run(launcher, made, *settings)
    run(launcher, made, *settings, kept, steps=3)
    parts = run(launcher, made, *settings, kept, "checkpoint.resume=auto")
    for rank in range(2):
        for step in (4, 5, 6):
            one, other = weights_of(whole, rank, step), weights_of(parts, rank, step)
            assert all(np.array_equal(one[name], other[name]) for name in one), step


def test_on_another_number_of_ranks_errors_begin_anew(launcher: Launcher, tmp_path: Path) -> None:
    kept = f"checkpoint.dir={tmp_path / 'kept'}"
    run(launcher, job(tmp_path / "two", 2, "powersgd(rank = 1)"), "checkpoint.every=3 steps", kept, steps=3)
    three = run(launcher, job(tmp_path / "three", 3, "powersgd(rank = 1)"), "checkpoint.resume=auto", kept)
    assert "error.0.weight" in three.shown and "factor.0.weight" not in three.shown


@pytest.mark.cases(3)
@pytest.mark.parametrize("exchange", ("fp16()", "bf16()"))
@pytest.mark.parametrize("zero", (1, 2, 3))
def test_shards_are_summed_in_16_bits(launcher: Launcher, tmp_path: Path, exchange: str, zero: int) -> None:
    text = JOB.replace('hooks     = python("own_hooks:Weights", ranks = all)', "")
    exact, plain, found = (
        run(launcher, job(tmp_path / word, 2, each, text), f"parallelism.zero={z}")
        for word, each, z in (("exact", "allreduce()", 0), ("plain", exchange, 0), ("found", exchange, zero))
    )
    for name, each in found.weights.items():
        np.testing.assert_allclose(each, plain.weights[name], rtol=0, atol=1e-6, err_msg=name)
    assert any(not np.allclose(found.weights[n], each, rtol=0, atol=1e-6) for n, each in exact.weights.items())


@pytest.mark.parametrize("exchange", ("fp16()", "bf16()"))
def test_sums_over_replicas_of_shards_are_rounded_once_more(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    text = JOB.replace('hooks     = python("own_hooks:Weights", ranks = all)', "")
    made = job(tmp_path / "job", 4, exchange, text)
    trained = run(launcher, made, "parallelism.zero=3", "parallelism.replicas=2")
    start = run(launcher, job(tmp_path / "start", 1, "allreduce()"))
    simulated = Simulated(weights_of(start, 0, 0), 4)
    for _ in range(STEPS):
        gradients = simulated.gradients()
        pairs = [rounded(each, exchange[:-2]) for each in (gradients[:2], gradients[2:])]
        agreed = rounded(pairs, exchange[:-2])
        simulated.weights = [descend(each, agreed) for each in simulated.weights]
    for name, each in simulated.weights[0].items():
        np.testing.assert_allclose(trained.weights[name], each, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("exchange", ("fp16()", "bf16()"))
def test_sums_of_micro_batches_stay_exact_over_replicas(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    text = JOB.replace('hooks     = python("own_hooks:Weights", ranks = all)', "")
    one, other = (
        run(
            launcher,
            job(tmp_path / str(pieces), 2, exchange, text),
            *("parallelism.zero=3", "parallelism.replicas=2", f"parallelism.microbatches={pieces}"),
        )
        for pieces in (1, 4)
    )
    for name, each in one.weights.items():
        np.testing.assert_allclose(other.weights[name], each, rtol=0, atol=1e-6, err_msg=name)


NOT_FINITE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 4)
        self.scale = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.last(self.first(x)) + (self.scale * x[:, :3]).abs().sum().sqrt()
"""


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_gradient_that_is_not_finite_is_named_before_the_update(
    launcher: Launcher, tmp_path: Path, exchange: str
) -> None:
    text = JOB.replace("[linear(7), relu(), linear(4)]", 'python("own:Net")')
    made = job(tmp_path / "job", 2, exchange, text)
    (made.parent / "own.py").write_text(NOT_FINITE)
    found = ready(made)
    (tmp_path / "run").mkdir()
    outcome, _ = launcher.launch(found.program, found.places, tmp_path / "run")
    assert outcome is not None and outcome.failure is not None
    message = describe(outcome)
    assert "the loss of step 1 is finite, and its gradient is not" in message
    assert "as the backward pass goes, is `scale`" in message
