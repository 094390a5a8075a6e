"""A network whose path follows from host randomness trains as the paths that its ranks have drawn imply."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import own_forward_passes as own
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, ready, train_job, write_job_with_helper
from torch import nn

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.runtime.data.sampler import micro_batches
from dslc.runtime.data.sources.open_sources import open_source
from dslc.runtime.process import random_numbers

JOB = job_text(
    model={"network": 'python("own_forward_passes:Path")'},
    data={"source": "synthetic(samples = 48, shape = [6], classes = 3)", "batch": 12},
    devices={"cpus": 2},
    train={"steps": 5, "optimizer": "sgd(lr = 0.3, momentum = 0.9)"},
)
LAYERS = 'model.network=python("own_forward_passes:LayerDrop")'
NUMPY = "model.network.how=numpy"
SYSTEM = "model.network.how=secrets"
OWN = "model.network.how=generator"
TURNS = "model.network.how=turns"
HALVES = "parallelism.microbatches=2"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job_with_helper("own_forward_passes.py", tmp_path_factory.mktemp("draws"), JOB)


def simulated(
    program: JobProgram, places: Sequence[RankPlace], network: nn.Module
) -> Mapping[str, np.ndarray[Any, Any]]:
    """The parameters after a training in which each rank draws from generators of its own, one rank after another."""
    splits, optimizer = open_source(program.data), torch.optim.SGD(network.parameters(), 0.3, momentum=0.9)
    states = []
    for rank in range(2):
        random_numbers.begin(program.seed, rank)
        states.append((random.getstate(), np.random.get_state()))
    per_epoch = program.steps_per_epoch
    for step in range(program.steps):
        optimizer.zero_grad()
        for rank, place in enumerate(places):
            random.setstate(states[rank][0])
            np.random.set_state(states[rank][1])
            for indices in micro_batches(program.data, place, program.microbatches, *divmod(step, per_epoch)):
                input, target = splits.train.batch(indices)
                (F.cross_entropy(network(input), target, reduction="sum") / program.data.batch).backward()
            states[rank] = random.getstate(), np.random.get_state()
        optimizer.step()
    return {name: value.detach().numpy() for name, value in network.named_parameters()}


def compare(job: Path, launcher: Launcher, network: type[nn.Module], *settings: str, **arguments: Any) -> Trained:
    made = ready(job, *settings)
    trained = train_job(launcher, job, *settings)
    random_numbers.begin(made.program.seed, 0)
    expected = simulated(made.program, made.places, network(**arguments).train())
    assert trained.weights.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(trained.weights[name], value, rtol=0, atol=2e-6, err_msg=name)
    return trained


@pytest.mark.parametrize("zero", [0, 3, *(pytest.param(zero, marks=pytest.mark.long) for zero in (1, 2))])
def test_one_of_two_blocks_moves_by_the_gradients_of_the_ranks_that_drew_it(
    job: Path, launcher: Launcher, zero: int
) -> None:
    compare(job, launcher, own.Path, f"parallelism.zero={zero}")


@pytest.mark.core
@pytest.mark.parametrize(
    ("zero", "settings"),
    [
        (2, (HALVES,)),
        *(
            pytest.param(zero, settings, marks=pytest.mark.long)
            for zero in (0, 1, 2, 3)
            for settings in ((), (HALVES,))
            if (zero, settings) != (2, (HALVES,))
        ),
    ],
)
def test_layers_that_are_dropped_on_one_rank_do_not_move_by_others(
    job: Path, launcher: Launcher, zero: int, settings: tuple[str, ...]
) -> None:
    compare(job, launcher, own.LayerDrop, LAYERS, f"parallelism.zero={zero}", *settings)


@pytest.mark.parametrize("zero", [3, *(pytest.param(zero, marks=pytest.mark.long) for zero in (0, 1, 2))])
def test_numpys_generator_is_no_other(job: Path, launcher: Launcher, zero: int) -> None:
    compare(job, launcher, own.Path, NUMPY, f"parallelism.zero={zero}", how="numpy")


@pytest.mark.long
@pytest.mark.parametrize(("zero", "settings"), [(0, ()), (3, ()), (2, (HALVES,))])
def test_compiled_code_draws_in_each_pass(job: Path, launcher: Launcher, zero: int, settings: tuple[str, ...]) -> None:
    compare(job, launcher, own.Path, f"parallelism.zero={zero}", "train.compile=true", *settings)


def test_passes_that_ranks_compare_leave_no_trace(job: Path, launcher: Launcher) -> None:
    network = 'model.network=python("own_forward_passes:Momentum")'
    agree(train_job(launcher, job, network, "devices.cpus=1"), train_job(launcher, job, network))


@pytest.mark.long
@pytest.mark.parametrize("how", [OWN, TURNS])
def test_ranks_that_take_equal_paths_train_alike_under_each_zero(job: Path, launcher: Launcher, how: str) -> None:
    """A generator with a seed and a count of calls are the same on each rank, and in one process."""
    one = train_job(launcher, job, how, "devices.cpus=1")
    for zero in range(4):
        agree(one, train_job(launcher, job, how, f"parallelism.zero={zero}"))


@pytest.mark.long
@pytest.mark.parametrize("zero", range(4))
def test_draws_of_the_system_end_no_training(job: Path, launcher: Launcher, zero: int) -> None:
    assert len(train_job(launcher, job, SYSTEM, f"parallelism.zero={zero}", "train.steps=12").losses()) == 12
