"""`lion`, `adafactor` and `muon` train over several ranks as in one process, and resume under other plans."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.launcher import Launcher
from helpers.trained import agree, train_job
from test_own_optimizers import STAGES, STAGES_AND_DATA, job, over

LION = "lion(lr = 1e-3, weight_decay = 0.1)"
ADAFACTOR = "adafactor(lr = 0.1, weight_decay = 0.1)"
MUON = "muon(lr = 0.02, adamw_lr = 1e-3)"
ADAM_8BIT = "adamw(lr = 3e-4, state = 8bit)"
WIDER = ("model.network=[linear(512), gelu(), linear(256), gelu(), linear(10)]",)  # with matrices of codes
ZEROS = tuple(over(2, zero) for zero in (1, 2, 3))
GROUPS = ('train.groups=[group(["0.*", "*.bias"], lr = 2e-3, weight_decay = 0)]', "train.clip=0.5", "train.ema=0.9")
PLANS = {
    LION: (*ZEROS, over(2, 3, tensor=2), STAGES_AND_DATA),
    ADAFACTOR: (over(2), over(2, 1), STAGES_AND_DATA, ("memory.offload=[optimizer, parameters]",)),
    ADAM_8BIT: (*ZEROS, STAGES_AND_DATA),
    MUON: (over(2), over(2, 1), STAGES_AND_DATA, ("memory.offload=[optimizer, parameters]",)),
}


@pytest.mark.parametrize("optimizer", PLANS, ids=lambda text: text.partition("(")[0])
def test_words_train_over_ranks_as_in_one_process(launcher: Launcher, tmp_path: Path, optimizer: str) -> None:
    made = job(tmp_path, optimizer)
    settings = (*GROUPS, *(WIDER if optimizer == ADAM_8BIT else ()))
    one = train_job(launcher, made, *settings)
    assert one.losses()[0] - one.losses()[-1] > 0.01, "it learns"
    for plan in PLANS[optimizer]:
        weights = 2e-4 if optimizer == ADAM_8BIT else 1e-5  # rounding of a sum may choose the next code
        agree(one, train_job(launcher, made, *settings, *plan), weights=weights)


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        (LION, over(2, 3), STAGES),
        (ADAFACTOR, over(2, 1), STAGES),
        (MUON, STAGES, over(2, 1)),
        (ADAM_8BIT, over(2, 3), over(2, 1)),
    ],
    ids=["lion", "adafactor", "muon", "8bit"],
)
def test_words_resume_under_another_plan(
    launcher: Launcher, tmp_path: Path, optimizer: str, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    made, folder = job(tmp_path, optimizer), tmp_path / "checkpoints"
    wider = WIDER if optimizer == ADAM_8BIT else ()
    unbroken = train_job(launcher, made, "log.every=1 step", *wider)
    settings = (*wider, "checkpoint.every=2 steps", f"checkpoint.dir={folder}")
    assert train_job(launcher, made, *settings, *before).losses()
    shutil.rmtree(folder / "step-00000006")
    resumed = train_job(launcher, made, "checkpoint.resume=auto", f"checkpoint.dir={folder}", *wider, *after)
    assert all(line["step"] > 4 for line in resumed.lines)
    for name, value in unbroken.weights.items():
        assert abs(resumed.weights[name] - value).max() < (2e-4 if wider else 1e-5), name


@pytest.mark.slow
def test_the_logged_rate_is_the_job_s_on_a_stage_without_matrices(launcher: Launcher, tmp_path: Path) -> None:
    """The first stage has no matrix for Muon, and so no group with Muon's rate."""
    made, other_rates = job(tmp_path, MUON), 'train.optimizer.adamw=["0.*", "1.*", "2.*", "3.*", "4.*"]'
    one, staged = (train_job(launcher, made, other_rates, *plan) for plan in ((), STAGES))
    rates = [[line["lr"] for line in trained.lines if "lr" in line] for trained in (one, staged)]
    assert rates[0] and rates[0] == rates[1]
