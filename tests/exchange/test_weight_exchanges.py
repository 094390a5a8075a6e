"""What holds of every exchange of weights: with other techniques, in checkpoints, and where something fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.exchanges import JOB, flat, job, mean_of, run, weights_of
from helpers.launcher import Launcher
from helpers.measured_memory import Case, measure
from helpers.trained import exchanges_as_planned, ready

from dslc.runtime.process.records import NOTES

STEPS = 6
EXCHANGES = (
    "diloco(period = 4)",
    "decentralized(interval = 2)",
    "decentralized(peers = shift_one)",
    "low_precision_decentralized()",
    "async_average(interval = 10h)",
)
OFTEN = (
    *("diloco(period = 1)", "decentralized()", "decentralized(peers = shift_one)"),
    *("low_precision_decentralized()", "async_average(interval = 10h)"),
)


@pytest.mark.cases(2)
@pytest.mark.core
@pytest.mark.parametrize("optimizer", ("sgd(lr = 0.1, momentum = 0.9)", "adamw(lr = 0.01)"))
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_resumed_training_goes_on_to_the_bit(
    launcher: Launcher, tmp_path: Path, exchange: str, optimizer: str
) -> None:
    made = job(tmp_path / "job", 2, exchange, JOB.replace("sgd(lr = 0.1)", optimizer))
    kept = f"checkpoint.dir={tmp_path / 'kept'}"
    whole = run(launcher, made, "checkpoint.every=3 steps")
    run(launcher, made, "checkpoint.every=3 steps", kept, steps=3)
    parts = run(launcher, made, "checkpoint.every=3 steps", kept, "checkpoint.resume=auto")
    for rank in range(2):
        for step in range(4, STEPS + 1):
            assert np.array_equal(flat(weights_of(whole, rank, step)), flat(weights_of(parts, rank, step)))


@pytest.mark.cases(2)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_on_other_ranks_the_mean_goes_on(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    kept = (f"checkpoint.dir={tmp_path / 'kept'}", "checkpoint.every=3 steps")
    first = run(launcher, job(tmp_path / "job", 2, exchange), *kept, steps=3)
    then = run(launcher, job(tmp_path / "more", 4, exchange), *kept, "checkpoint.resume=auto")
    mean = mean_of([weights_of(first, rank, 3) for rank in range(2)])
    for rank in range(4):
        np.testing.assert_allclose(flat(weights_of(then, rank, 3)), flat(mean), rtol=0, atol=1e-7)
    told = (then.folder / NOTES).read_text()
    assert ("begins anew" in told) == ("low_precision" in exchange), told
    assert "low_precision" not in exchange or "replica_of_left" in told


@pytest.mark.parametrize("exchange", EXCHANGES[:-1])
def test_what_is_saved_is_the_mean(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    trained = run(launcher, job(tmp_path / "job", 4, exchange))
    of_ranks = [weights_of(trained, rank, STEPS) for rank in range(4)]
    assert not np.array_equal(flat(of_ranks[0]), flat(of_ranks[1]))
    np.testing.assert_allclose(flat(dict(trained.weights)), flat(mean_of(of_ranks)), rtol=0, atol=1e-7)


@pytest.mark.parametrize("exchange", OFTEN)
def test_one_rank_is_plain_training(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    plain, other = (
        run(launcher, job(tmp_path / word, 1, each)) for word, each in (("a", "allreduce()"), ("b", exchange))
    )
    assert np.array_equal(flat(weights_of(plain, 0, STEPS)), flat(weights_of(other, 0, STEPS)))


CONV = """
model {
  network = [conv2d(5, padding = 1), batch_norm(), relu(), conv2d(5, padding = 1), flatten(), linear(10)]
  loss    = cross_entropy()
  freeze  = ["3.*"]
}
data {
  source     = digits()
  batch      = 48
  last_batch = keep
  validation = 20%
}
devices { cpus = 3 }
parallelism {
  gradients    = EXCHANGE
  microbatches = 2
}
memory { recompute = full }
train {
  epochs    = 2
  optimizer = adamw(lr = 1e-3)
  precision = bf16
}
evaluate { every = 7 steps }
log { every = 5 steps }
"""
TIED = """
model {
  network = gpt(layers = 2, width = 16, heads = 2, context = 16, vocab = 256, tie = true)
  loss    = cross_entropy()
}
data {
  source = stdlib()
  batch  = 8
}
devices { cpus = 2 }
parallelism { gradients = EXCHANGE }
train {
  steps     = 6
  optimizer = adamw(lr = 1e-3)
}
"""


@pytest.mark.parametrize("exchange", [each for each in OFTEN if "shift_one" not in each])
def test_with_other_techniques(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    """Batch statistics of each rank, frozen weights, micro-batches, recomputation, bfloat16, a small last batch."""
    made = tmp_path / "job.plt"
    made.write_text(CONV.replace("EXCHANGE", exchange))
    trained = run(launcher, made)
    losses = trained.losses("train")
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert np.isfinite(trained.losses("validation")).all()


@pytest.mark.parametrize("exchange", OFTEN[:-1])
def test_exchanges_are_as_planned(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    made = tmp_path / "job.plt"
    made.write_text(TIED.replace("EXCHANGE", exchange))
    exchanges_as_planned(launcher, tmp_path, made)


@pytest.mark.parametrize("exchange", OFTEN)
def test_nan_on_one_rank_ends_the_training(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    made = job(tmp_path / "job", 2, exchange)
    with np.load(tmp_path / "job" / "made.npz") as found:
        inputs, targets = found["x"].copy(), found["y"]
    inputs[24 + 12 + 3] = np.nan  # the second step's, of rank 1
    np.savez(tmp_path / "job" / "made.npz", x=inputs, y=targets)
    ready_ = ready(made)
    (tmp_path / "run").mkdir()
    outcome, shown = launcher.launch(replace(ready_.program), ready_.places, tmp_path / "run")
    assert outcome is not None and outcome.failure is not None, shown
    assert (outcome.failure.rank, outcome.failure.step) == (1, 2), outcome.failure
    assert "the loss of step 2 is nan" in outcome.failure.message


@pytest.mark.parametrize("exchange", OFTEN)
def test_memory_is_that_of_the_account(exchange: str) -> None:
    found = measure(Case(network="mlp", ranks=2, gradients=exchange).text)
    assert abs(found.error) <= 0.05, (found.error, found.predicted, found.at_peak, found.when)
    assert abs(found.error_at_rest) <= 0.01, (found.error_at_rest, found.predicted, found.at_rest)
