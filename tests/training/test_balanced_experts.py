"""A loss that balances experts trains under any plan as in one process, counts before the first backward pass what the
plan says, and is part of no evaluation.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from helpers.job_texts import EXPERTS_JOB
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, exchanges_as_planned, filled, train_job

JOB = filled(EXPERTS_JOB, {"moe": ", balance = loss(2.0)", "steps": "4", "rate": "0.1"})
TWO, FOUR, MICRO = ("devices.cpus=2",), ("devices.cpus=4",), ("parallelism.microbatches=2",)
EXPERTS = ("parallelism.expert=2",)
PIPELINE = ("parallelism.pipeline=2", *MICRO)
MIXTURE = "model.network.experts=moe"
PLANS: dict[str, tuple[str, ...]] = {
    "micro-batches": MICRO,
    "zero 0": TWO,
    "zero 1, recomputed": (*TWO, "parallelism.zero=1", "memory.recompute=selective"),
    "zero 2 over experts": (*FOUR, *EXPERTS, *MICRO, "parallelism.zero=2"),
    "zero 3 over experts": (*FOUR, *EXPERTS, "parallelism.zero=3", "memory.recompute=full"),
    "pipeline": (*TWO, *PIPELINE, "parallelism.schedule=gpipe"),
    "looped pipeline, zero 2, over experts": (
        *FOUR,
        *EXPERTS,
        *PIPELINE,
        "parallelism.schedule=looped_bfs",
        "parallelism.zero=2",
    ),
    "compiled": (*TWO, *EXPERTS, *MICRO, "train.compile=true"),
    "tensor axis": (*FOUR, *EXPERTS, *MICRO, "parallelism.tensor=2", "parallelism.sequence=true", "parallelism.zero=2"),
    "context axis": (*FOUR, *EXPERTS, *MICRO, "parallelism.context=2", "parallelism.zero=3"),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("balance") / "job.plt"
    path.write_text(JOB)
    return path


@cache
def one_process(launcher: Launcher, job: Path, *settings: str) -> Trained:
    return train_job(launcher, job, *settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PLANS])
def test_any_plan_trains_as_one_process_does(launcher: Launcher, job: Path, name: str) -> None:
    expected, found = one_process(launcher, job), train_job(launcher, job, *PLANS[name])
    agree(expected, found)
    for key, line in expected.records.items():
        assert ("balance_loss" in line) == (key[0] == "train")
        if key[0] == "train":
            assert found.records[key]["balance_loss"] == pytest.approx(line["balance_loss"], abs=1e-5)


@pytest.mark.slow
def test_all_tokens_on_one_expert(launcher: Launcher, job: Path) -> None:
    """Routers begin with equal scores, and the first experts win: rank 1 of the axis gets no row."""
    settings = ("model.network.init_std=0.0", f"{MIXTURE}(experts = 4, top_k = 1, hidden = 16, balance = loss(2.0))")
    agree(one_process(launcher, job, *settings), train_job(launcher, job, *TWO, *EXPERTS, *settings))


@pytest.mark.slow
def test_what_a_pipeline_exchanges_is_planned(launcher: Launcher, job: Path, tmp_path: Path) -> None:
    even = f"{MIXTURE}(experts = 4, top_k = 4, hidden = 16, balance = loss(2.0))"
    exchanges_as_planned(launcher, tmp_path, job, *FOUR, *EXPERTS, *PIPELINE, "parallelism.schedule=gpipe", even)


def test_what_is_exchanged_is_planned(launcher: Launcher, job: Path, tmp_path: Path) -> None:
    even = f"{MIXTURE}(experts = 4, top_k = 4, hidden = 16, balance = loss(2.0))"
    plan = (*TWO, *EXPERTS, *MICRO, "parallelism.zero=3", "memory.recompute=full")
    exchanges_as_planned(launcher, tmp_path, job, *plan, even)


@pytest.mark.slow
def test_passes_ahead_compute_a_loss_in_chunks(launcher: Launcher, job: Path, tmp_path: Path) -> None:
    plan = (*TWO, *MICRO, "parallelism.tensor=2", "model.loss=cross_entropy(chunks = 4)")
    exchanges_as_planned(launcher, tmp_path, job, *plan)
