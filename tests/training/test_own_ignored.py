"""A loss of a user's own and targets that do not count: the divisor, the accuracy and the ranks' shares are those of
`cross_entropy`, which has it from torch.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, beside_own_networks, exchanges_as_planned, train_job

# Of the sequences of a batch some have no target that counts, others all.
JOB = job_text(
    model={
        "network": 'python("own_networks:Decoder", vocab = 32, blocks = 2)',
        "loss": 'python("own_networks:token_loss")',
    },
    data={"source": 'python("own_networks:padded")', "batch": 8, "shuffle": "false"},
    devices={"cpus": 1},
    train={"steps": 4},
    evaluate={"every": "2 steps", "metrics": "[loss, accuracy]"},
)
TWO = ("devices.cpus=2", "parallelism.microbatches=2")
STAGES = (*TWO, "parallelism.pipeline=2")
OF_THE_LIBRARY = "model.loss=cross_entropy()"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beside_own_networks(tmp_path_factory.mktemp("ignored"), JOB)


@pytest.fixture(scope="module")
def library(job: Path, launcher: Launcher) -> Trained:
    return train_job(launcher, job, OF_THE_LIBRARY)


@pytest.mark.parametrize("plan", [(), TWO, STAGES], ids=["one process", "two ranks", "two stages"])
def test_it_is_the_mean_over_what_counts(
    job: Path, launcher: Launcher, library: Trained, plan: tuple[str, ...]
) -> None:
    agree(library, train_job(launcher, job, *plan))


def test_another_target_may_be_the_one_that_does_not_count(job: Path, launcher: Launcher, library: Trained) -> None:
    other = train_job(launcher, job, "model.loss.ignore=-1", "data.source.ignore=-1")
    agree(library, other)


def test_the_ranks_agree_on_the_count_as_planned(job: Path, launcher: Launcher, tmp_path: Path) -> None:
    exchanges_as_planned(launcher, tmp_path, job, "devices.cpus=2")


@pytest.mark.parametrize("loss", ["own", OF_THE_LIBRARY])
def test_where_nothing_counts_the_loss_is_none(job: Path, launcher: Launcher, loss: str) -> None:
    """The accuracy is neither 0, which would be a result, nor a number that JSON lacks; and nothing is learnt."""
    found = train_job(launcher, job, "data.source.kept=0.0", *([loss] if loss != "own" else []), *TWO)
    lines = [json.loads(line) for line in (found.folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["split"] for line in lines} == {"train", "validation"}
    assert all(line["loss"] is None for line in lines)
    assert all(line["accuracy"] is None for line in lines if line["split"] == "validation")
