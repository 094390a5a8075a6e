"""A data set that draws random numbers gives the same samples on any number of ranks and workers, and wherever a
training resumes: the noise of a sample follows from the seed, the epoch and the sample.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.own_networks import Augmented
from helpers.trained import Trained, agree, beside_own_networks, ready, train, train_job

from dslc.runtime.data.samples import FetchedSamples

# Six steps an epoch.
JOB = job_text(
    model={"network": 'python("own_networks:network", inputs = 64, outputs = 10)'},
    data={"source": 'python("own_networks:augmented")', "batch": 8},
    devices={"cpus": 1},
    train={"steps": 9},
    evaluate={"every": "3 steps"},
)
DROPOUT = 'model.network=python("own_networks:noisy")'
WORKERS = "data.workers=2"
TWO = "devices.cpus=2"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beside_own_networks(tmp_path_factory.mktemp("samples"), JOB)


@pytest.fixture(scope="module")
def one(job: Path, launcher: Launcher) -> Trained:
    return train_job(launcher, job)


@pytest.mark.parametrize("plan", [(TWO,), (TWO, WORKERS)], ids=["two ranks", "with workers"])
def test_the_training_is_that_of_one_process(
    job: Path, launcher: Launcher, one: Trained, plan: tuple[str, ...]
) -> None:
    agree(one, train_job(launcher, job, *plan))
    assert len(one.losses("validation")) == 3


def test_it_goes_on_in_mid_epoch_with_the_very_next_sample(
    job: Path, launcher: Launcher, one: Trained, tmp_path: Path
) -> None:
    keeps = ("checkpoint.every=100 steps", "checkpoint.resume=auto")
    for steps, plan in ((4, (WORKERS,)), (9, (TWO,))):
        made = ready(job, *keeps, *plan)
        found = train(launcher, tmp_path / "run", made.program, made.places, steps=steps)
    np.testing.assert_allclose(found.losses(), one.losses(), rtol=0, atol=1e-5)
    for name, value in one.weights.items():
        np.testing.assert_allclose(found.weights[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_what_the_rank_draws_is_left_alone(job: Path, launcher: Launcher) -> None:
    """Dropout is equal to the bit whether the rank or its workers load the samples."""
    by_itself, by_others = train_job(launcher, job, DROPOUT), train_job(launcher, job, DROPOUT, WORKERS)
    agree(by_itself, by_others, losses=0, weights=0)


def test_a_sample_is_another_in_another_epoch_part_and_under_another_seed() -> None:
    data, some = Augmented(48), torch.tensor([5, 2])
    inputs, _ = FetchedSamples(data, "", seed=1).batch(some, 3)
    assert torch.equal(FetchedSamples(data, "", seed=1).batch(some.flip(0), 3)[0].flip(0), inputs)
    others = (
        FetchedSamples(data, "", seed=1).batch(some, 4),
        FetchedSamples(data, "", seed=2).batch(some, 3),
        FetchedSamples(data, "", seed=1, part="validation").batch(some, 3),
    )
    assert not any(torch.equal(other, inputs) for other, _ in others)
