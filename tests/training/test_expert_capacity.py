"""Experts with a capacity drop the same tokens under any plan: those that come last in the global batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.job_texts import EXPERTS_JOB
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, exchanges_as_planned, filled, train_job

from dslc.runtime.model.experts.expert_modules import Experts, MixtureOfExperts, Router

JOB = filled(EXPERTS_JOB, {"moe": ", capacity = 0.75", "steps": "4", "rate": "0.1"})
TWO = ("devices.cpus=2",)
FOUR = ("devices.cpus=4", "parallelism.expert=2")
PLANS: dict[str, tuple[str, ...]] = {
    "two ranks": TWO,
    "zero 3 over experts, recomputed": (*FOUR, "parallelism.zero=3", "memory.recompute=full"),
    "compiled": (*TWO, "train.compile=true"),
    "tensor axis": (*FOUR, "parallelism.tensor=2", "parallelism.sequence=true"),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capacity") / "job.plt"
    path.write_text(JOB)
    return path


@cache
def one_process(launcher: Launcher, job: Path) -> Trained:
    return train_job(launcher, job)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PLANS])
def test_any_plan_drops_the_same_tokens(launcher: Launcher, job: Path, name: str) -> None:
    expected, found = one_process(launcher, job), train_job(launcher, job, *PLANS[name])
    agree(expected, found)
    for key, line in expected.records.items():
        assert ("dropped_share" in line) == (key[0] == "train")
        if key[0] == "train":
            assert 0 < line["dropped_share"] == pytest.approx(found.records[key]["dropped_share"], abs=1e-9)


@pytest.mark.slow
def test_what_is_exchanged_is_planned(launcher: Launcher, job: Path, tmp_path: Path) -> None:
    """With room for all tokens, of which each goes to all experts."""
    even = "model.network.experts=moe(experts = 4, top_k = 4, hidden = 16, capacity = 1.0)"
    plan = (*TWO, "parallelism.expert=2", "parallelism.zero=3", "memory.recompute=full")
    exchanges_as_planned(launcher, tmp_path, job, *plan, even)


def test_an_expert_takes_the_first_tokens() -> None:
    torch.manual_seed(0)
    mixture, tokens = MixtureOfExperts(), torch.randn(40, 16)
    mixture.gate = Router(16, 4, 2, "softmax", True, 1.0, None, capacity=0.8)
    mixture.experts = Experts(4, 16, 8)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    chosen, weights = mixture.gate(tokens)
    expected, taken = torch.zeros_like(tokens), [0] * 4
    for token in range(40):
        for place in range(2):
            expert = int(chosen[token, place])
            if taken[expert] == 16:  # 0.8 of 20
                continue
            taken[expert] += 1
            counts = torch.zeros(4, dtype=torch.int64)
            counts[expert] = 1
            expected[token] += weights[token, place] * mixture.experts(tokens[token : token + 1], counts)[0]
    assert max(taken) == 16 and sum(taken) < 80
    torch.testing.assert_close(mixture(tokens), expected)
    assert int(mixture.gate.dropped_rows.sum()) == 80 - sum(taken)  # type: ignore[union-attr]
    dropless = mixture.eval()(tokens)
    assert not torch.allclose(dropless, expected)
