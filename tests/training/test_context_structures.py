"""Structures of tensors over the context axis: dicts as batches, and losses that count by themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, exchanges_as_planned, ready, train_job, write_job_with_helper

JOB = """
model { network = python("own_parts:Attentive", mixes = "MIXES"), loss = LOSS }
data { source = python("own_parts:Kinds", ARGUMENTS), batch = 8, validation = 25% }
devices { cpus = 1 }
train { steps = 4, optimizer = adamw(lr = 0.05), clip = 1.0 }
log { every = 1 step, tensorboard = false }
"""
OWN = 'own(mean_of = "labels")'
FLATTENED = 'python("own_parts:flattened")'
COUNTED = 'python("own_parts:counted")'
CONTEXT = ("devices.cpus=2", "parallelism.data=1", "parallelism.context=2")

Run = Callable[..., Trained]


def written(folder: Path, loss: str, arguments: str = "pair = false", mixes: str = "") -> Path:
    text = JOB.replace("LOSS", loss).replace("ARGUMENTS", arguments).replace("MIXES", mixes)
    return write_job_with_helper("own_parts.py", folder, text)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Run:
    @cache
    def run(loss: str, arguments: str, *settings: str) -> Trained:
        return train_job(launcher, written(tmp_path_factory.mktemp("job"), loss, arguments), *settings)

    return run


@pytest.mark.parametrize(
    ("loss", "arguments", "settings"),
    [
        (OWN, "pair = false", CONTEXT),
        (COUNTED, "pair = true", (*CONTEXT, "parallelism.zero=2", "parallelism.microbatches=2")),
        (FLATTENED, "bare = true", CONTEXT),
        pytest.param(FLATTENED.replace("flattened", "classified"), "pair = true", CONTEXT, marks=pytest.mark.long),
        pytest.param(OWN, "pair = false", (*CONTEXT, "parallelism.zero=3"), marks=pytest.mark.long),
        pytest.param(
            COUNTED, "pair = true", (*CONTEXT, "parallelism.data=2", "devices.cpus=4"), marks=pytest.mark.long
        ),
    ],
    ids=["own", "pair", "flattened", "classified", "own-zero", "pair-data"],
)
def test_structures_train_as_in_one_process(loss: str, arguments: str, settings: tuple[str, ...], trained: Run) -> None:
    one = trained(loss, arguments)
    assert ("validation", 4) in one.records and len(set(one.losses())) == 4
    agree(one, trained(loss, arguments, *settings))


@pytest.mark.slow
def test_losses_in_a_row_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    run = dslc("verify", written(tmp_path, FLATTENED, "bare = true"), "--steps=2")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.core
def test_the_count_of_the_losses_is_planned(tmp_path: Path, launcher: Launcher) -> None:
    exchanges_as_planned(launcher, tmp_path, written(tmp_path, OWN), *CONTEXT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "arguments", "mixes", "reason"),
    [
        (OWN, "whole = true", "", r"`\['kinds'\]` of the input has no positions"),
        (OWN, "pair = false", "shift", "`slice` works across dim 1"),
        ("own()", "pair = false", "", "does not say of which positions"),
        (OWN, "pair = false", "root", "`sqrt` of a number that all positions make"),
        ('python("own_parts:counted", shift = 1)', "pair = true", "", "`slice` works across dim 1"),
        ('python("own_parts:weighed")', "pair = true", "", "reads numbers out of tensors"),
        ('python("own_parts:told")', "pair = true", "", "`entropy` beside the loss"),
    ],
)
def test_what_cannot_be_cut_is_named(loss: str, arguments: str, mixes: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=reason):
        ready(written(tmp_path, loss, arguments, mixes), *CONTEXT)
