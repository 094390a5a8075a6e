"""The expert axis trains as one process does, under every `zero`, beside a pipeline, and with any routing; its
exchanges are those of the plan; and a checkpoint resumes on other ranks. So does a tensor axis, which cuts each expert.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.job_texts import EXPERTS_JOB
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, exchanges_as_planned, filled, profiled, ready, train_in_parts, train_job

from dslc.jobs.prepare_run import report_on

JOB = filled(EXPERTS_JOB, {"moe": "", "steps": "6", "rate": "0.05"})
EXPERTS = "model.network.experts=moe"
TWO = ("devices.cpus=2", "parallelism.expert=2")
FOUR = ("devices.cpus=4", "parallelism.expert=2")
PLANS: dict[str, tuple[str, ...]] = {
    "zero 0": FOUR,
    "zero 2 in replicas": (*FOUR, "parallelism.zero=2", "parallelism.replicas=2", "parallelism.microbatches=2"),
    "zero 3": (*FOUR, "parallelism.zero=3", "memory.recompute=full"),
    "two ranks": (*TWO, "parallelism.zero=3", "memory.recompute=selective"),
    "pipeline": (*FOUR, "parallelism.pipeline=2", "parallelism.microbatches=2", "parallelism.zero=2"),
    "context": (*FOUR, "parallelism.context=2"),
    "context, zero 3": (*FOUR, "parallelism.context=2", "parallelism.zero=3", "memory.recompute=full"),
    "compiled": (*TWO, "train.compile=true"),
    "compiled, zero 3": (*FOUR, "train.compile=true", "parallelism.zero=3", "memory.recompute=full"),
    "tensor": (*FOUR, "parallelism.tensor=2", "parallelism.sequence=true"),
    "tensor, zero 3": (*FOUR, "parallelism.tensor=2", "parallelism.zero=3", "memory.recompute=full"),
}
EIGHT = ("devices.cpus=8", "parallelism.expert=2")
LARGE: dict[str, tuple[str, ...]] = {
    "tensor, zero 3": (*EIGHT, "parallelism.tensor=2", "parallelism.zero=3"),
    "tensor, in replicas": (*EIGHT, "parallelism.tensor=2", "parallelism.zero=2", "parallelism.replicas=2"),
    "context": (*EIGHT, "parallelism.context=2"),
    "context, zero 3": (*EIGHT, "parallelism.context=2", "parallelism.zero=3"),
    "context, in replicas": (*EIGHT, "parallelism.context=2", "parallelism.zero=2", "parallelism.replicas=2"),
}
BALANCED = f"{EXPERTS}(experts = 4, top_k = 2, hidden = 16, shared = 1, score = sigmoid, balance = bias(0.01))"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "job.plt"
    path.write_text(JOB)
    return path


@cache
def one_process(launcher: Launcher, job: Path, *settings: str) -> Trained:
    return train_job(launcher, job, *settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PLANS])
def test_the_axis_trains_as_one_process_does(launcher: Launcher, job: Path, name: str) -> None:
    agree(one_process(launcher, job), train_job(launcher, job, *PLANS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LARGE])
def test_eight_ranks_train_as_one_process_does(launcher: Launcher, job: Path, name: str) -> None:
    """Over the context axis the ranks with the same experts are runs of ranks, some apart."""
    agree(one_process(launcher, job), train_job(launcher, job, *LARGE[name]))


def test_ranks_that_have_the_same_tokens_count_them_once(launcher: Launcher, job: Path) -> None:
    """Biases of experts follow the tokens of the global batch, and loads are those of one process."""
    one = one_process(launcher, job, BALANCED)
    found = train_job(launcher, job, "devices.cpus=2", "parallelism.tensor=2", BALANCED)
    agree(one, found)
    for key, record in one.records.items():
        assert {name: found.records[key][name] for name in record if name.startswith("load")} == {
            name: value for name, value in record.items() if name.startswith("load")
        }
    assert any(name.startswith("load.") for name in one.records["train", 1])


@pytest.mark.slow
def test_all_tokens_on_one_expert(launcher: Launcher, job: Path) -> None:
    """Routers that do not train begin with equal scores, and the first experts win: rank 1 of the axis gets no row."""
    settings = ("model.network.init_std=0.0", f"{EXPERTS}(experts = 4, top_k = 1, hidden = 16)")
    agree(one_process(launcher, job, *settings), train_job(launcher, job, *TWO, *settings))


def test_an_even_routing_exchanges_what_is_planned(launcher: Launcher, job: Path, tmp_path: Path) -> None:
    """Each token goes to all experts."""
    even = f"{EXPERTS}(experts = 4, top_k = 4, hidden = 16)"
    exchanges_as_planned(launcher, tmp_path, job, *FOUR, even, "parallelism.zero=3", "memory.recompute=full")


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor=2", "context=2"])
def test_an_even_routing_beside_another_axis(launcher: Launcher, job: Path, tmp_path: Path, axis: str) -> None:
    even = f"{EXPERTS}(experts = 4, top_k = 4, hidden = 16)"
    exchanges_as_planned(launcher, tmp_path, job, *FOUR, f"parallelism.{axis}", even, "memory.recompute=full")


@pytest.mark.slow
def test_any_routing_exchanges_as_much_in_all(launcher: Launcher, job: Path, tmp_path: Path) -> None:
    ranks = profiled(launcher, tmp_path, job, *TWO, "parallelism.microbatches=2")
    sums = {
        kind: sum(e[kind]["bytes"] for rank in ranks for e in rank["collectives"] if e["operation"] == "all_to_all")
        for kind in ("measured", "predicted")
    }
    assert sums["measured"] == sums["predicted"] > 0


def test_the_report_compares_the_routing_with_the_stated_skew(launcher: Launcher, job: Path, tmp_path: Path) -> None:
    """Equal scores send all tokens to one expert, and so twice its share to one rank."""
    one_of_all = f"{EXPERTS}(experts = 4, top_k = 1, hidden = 16)"
    all_to_one = (*TWO, "train.steps=1", "model.network.init_std=0.0", one_of_all)

    def reported(skew: str) -> dict[str, Any]:
        stated = ready(job, *all_to_one, f"parallelism.expert_skew={skew}")
        routing: Any = report_on(stated, str(folder), 1)["experts"]
        assert routing is not None
        return routing

    folder = train_job(launcher, job, *all_to_one, folder=tmp_path / "run").folder
    routing = reported("1.5")
    assert routing.pop("rank") in (0, 1), "equal scores have the same best expert on both ranks"
    assert routing == {"stated": 1.5, "measured": 2.0, "layer": "model.layers.0.mlp", "exceeded": True}
    assert (reported("2.0")["exceeded"], reported("none")["exceeded"]) == (False, False)


@pytest.mark.slow
def test_a_checkpoint_resumes_on_other_ranks(launcher: Launcher, job: Path, tmp_path: Path) -> None:
    """From two experts a rank on four, under `zero = 3`, to one process, to one expert each, under `zero = 1`, to
    halves of two experts, to pieces of sequences, and to one process again.
    """
    adamw = "train.optimizer=adamw(lr = 1e-3)"
    last = ("devices.cpus=4", "parallelism.expert=4")
    halves = (*FOUR, adamw, "parallelism.tensor=2", "parallelism.zero=2")
    pieces = (*FOUR, adamw, "parallelism.context=2", "parallelism.zero=3")
    parts = (
        (1, (*FOUR, adamw, "parallelism.zero=3")),
        (2, (adamw,)),
        (3, (*last, adamw, "parallelism.zero=1")),
        (4, halves),
        (5, pieces),
        (6, (adamw,)),
    )
    resumed = train_in_parts(launcher, tmp_path, job, *parts)
    expected = one_process(launcher, job, adamw)
    np.testing.assert_allclose(resumed.losses(), expected.losses(), atol=1e-5)
    for name, value in expected.weights.items():
        np.testing.assert_allclose(resumed.weights[name], value, atol=2e-5, err_msg=name)
