"""Parameters of unusual kinds: they train sharded as in one process, whatever their place in memory was."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from helpers.job_texts import model_job
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, staged, train_job, write_job_with_helper

TWO = "devices.cpus=2"
PLANS = {
    "data": (TWO,),
    "zero 1": (TWO, "parallelism.zero=1"),
    "zero 2": (TWO, "parallelism.zero=2"),
    "zero 3": (TWO, "parallelism.zero=3"),
    "stages": staged("1f1b", 2, 2, 2, "parallelism.zero=3"),
}
CASES = [
    ("Last()", "zero 3"),
    ('Normed(kind = "orthogonal")', "zero 2"),
    ('Odd(kind = "strided")', "zero 1"),
    ("Freezes()", "data"),
    ("Beside()", "zero 3"),
]
MORE = [
    ('Freezes(kind = "one")', "data"),
    ("Freezes()", "zero 3"),
    ("Beside()", "stages"),
    ("Last()", "zero 2"),
    ('Normed(kind = "orthogonal")', "stages"),
    *(('Odd(kind = "strided")', plan) for plan in ("zero 3", "stages")),
    *(('Odd(kind = "transposed")', plan) for plan in ("zero 2", "zero 3", "stages")),
    *((f'Normed(kind = "{kind}")', "zero 3") for kind in ("weight_norm", "spectral_norm", "old_weight")),
    *((f'Odd(kind = "{kind}")', "zero 3") for kind in ("views", "named", "list", "expanded_buffer")),
    ('Odd(kind = "expanded_buffer")', "zero 1"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Callable[..., Trained]:
    @cache
    def run(network: str, *settings: str) -> Trained:
        name, _, arguments = network.removesuffix(")").partition("(")
        made = f'python("own_parameters:{name}"{arguments and f", {arguments}"})'
        folder: Path = tmp_path_factory.mktemp("parameters")
        job = write_job_with_helper("own_parameters.py", folder, model_job(made, source="digits()", steps=3))
        return train_job(launcher, job, *settings)

    return run


@pytest.mark.parametrize(("network", "plan"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)])
def test_they_train_as_in_one_process(trained: Callable[..., Trained], network: str, plan: str) -> None:
    one = trained(network)
    assert len(set(one.losses())) == 3
    agree(one, trained(network, *PLANS[plan]))
