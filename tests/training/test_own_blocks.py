"""A module of a user's own, whose blocks the plan found, sharded and recomputed: it trains as in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.job_texts import model_job
from helpers.launcher import Launcher
from helpers.trained import agree, beside_own_networks, ready, train, train_job

from dslc.jobs.prepare_run import write_run_directory

JOB = model_job('python("own_networks:Decoder", width = 32, blocks = 4)')


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beside_own_networks(tmp_path_factory.mktemp("own"), JOB)


@pytest.mark.slow
def test_the_job_that_a_run_leaves_finds_the_same_function(job: Path, tmp_path: Path) -> None:
    first = ready(job)
    write_run_directory(first, str(tmp_path))
    again = ready(tmp_path / "job.plt")
    assert first.program.model.python is not None and again.program.model.python is not None
    assert again.program.model.python == replace(first.program.model.python, line=again.program.model.python.line)


def test_blocks_are_sharded_and_recomputed(job: Path, launcher: Launcher, tmp_path: Path) -> None:
    one = train_job(launcher, job)
    assert one.losses()[-1] < one.losses()[0]
    for settings, again in (
        (("parallelism.zero=3", "memory.recompute=full"), ("blocks.0", "blocks.1", "blocks.2", "blocks.3")),
        (
            ("parallelism.zero=2", "parallelism.microbatches=2", "memory.recompute=every(2)"),
            ("blocks.0", "blocks.2"),
        ),
    ):
        made = ready(job, "devices.cpus=2", *settings)
        program = made.program
        assert program.gradients.units == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
        assert program.recompute.modules == again
        assert program.model.ties == (("head.weight", "table.weight"),)
        agree(one, train(launcher, tmp_path / settings[0], program, made.places))


@pytest.mark.parametrize(
    ("container", "blocks"),
    [
        ("dictionary", ("blocks.a", "blocks.b", "blocks.c", "blocks.d")),
        pytest.param(
            "nested", ("blocks.0.even", "blocks.0.odd", "blocks.1.even", "blocks.1.odd"), marks=pytest.mark.long
        ),
        pytest.param("attributes", ("block0", "block1", "block2", "block3"), marks=pytest.mark.long),
    ],
)
def test_blocks_are_found_wherever_a_network_keeps_them(
    job: Path, launcher: Launcher, container: str, blocks: tuple[str, ...]
) -> None:
    there = f'model.network.container="{container}"'
    sharded = ("devices.cpus=2", "parallelism.zero=3", "memory.recompute=full")
    program = ready(job, there, *sharded).program
    assert program.gradients.units == blocks and program.recompute.modules == blocks
    agree(train_job(launcher, job, there), train_job(launcher, job, there, *sharded))
