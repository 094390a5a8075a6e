"""The memory of a loss that compares samples: that of one micro-batch, and as the account says."""

from __future__ import annotations

import pytest
from helpers.job_texts import job_text
from helpers.measured_memory import MeasuredMemory, measure
from helpers.trained import filled

JOB = job_text(
    model={"network": "vit(layers = 4, width = 64, heads = 2, patch = 2, classes = 16)", "loss": "LOSS"},
    data={"source": "digits()", "batch": "BATCH"},
    devices={"cpus": "RANKS"},
    parallelism={"microbatches": "MICROBATCHES", "zero": "ZERO"},
    train={"steps": 3, "optimizer": "adamw(lr = 1e-3)"},
    log=None,
)


def held(loss: str, batch: int, ranks: int = 1, microbatches: int = 1, zero: int = 0) -> MeasuredMemory:
    choice = {"loss": loss, "batch": f"{batch}", "ranks": f"{ranks}", "microbatches": f"{microbatches}"}
    return measure(filled(JOB, {**choice, "zero": f"{zero}"}))


@pytest.mark.slow
def test_activations_are_those_of_one_micro_batch() -> None:
    whole, pieces = held("contrastive()", 256), held("contrastive()", 256, microbatches=8)
    alone = held("cross_entropy()", 32)
    for found in (whole, pieces, alone):
        assert abs(found.error) <= 0.10, (found.error, found.predicted, found.at_peak, found.when)
    assert pieces.at_peak["activations"] < 0.25 * whole.at_peak["activations"]
    assert pieces.at_peak["activations"] == pytest.approx(alone.at_peak["activations"], rel=0.10)


@pytest.mark.parametrize("microbatches, zero", [pytest.param(1, 0, marks=pytest.mark.slow), (4, 3)])
def test_a_rank_holds_what_the_account_says(microbatches: int, zero: int) -> None:
    found = held("contrastive(over = all)", 64, 2, microbatches, zero)
    assert abs(found.error) <= 0.20, (found.error, found.predicted, found.at_peak, found.when)


def test_pairs_of_samples_are_counted() -> None:
    """The matrix of similarities is most of what a small network of a large batch holds."""
    text = JOB.replace("vit(layers = 4, width = 64, heads = 2, patch = 2, classes = 16)", "[flatten(), linear(8)]")
    choice = {"loss": "contrastive(over = all)", "batch": "1024", "ranks": "2", "microbatches": "1", "zero": "0"}
    found = measure(filled(text, choice))
    assert abs(found.error) <= 0.20, (found.error, found.predicted, found.at_peak, found.when)
