"""Structures of tensors over a pipeline: inputs, targets and outputs, and losses that count by themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, exchanges_as_planned, staged, train_job, write_job_with_helper

JOB = """
model { network = python("own_parts:Layered", gives = "GIVES"), loss = LOSS }
data { source = python("own_parts:SOURCE"), batch = 8, validation = 25% }
devices { cpus = 1 }
train { steps = 4, optimizer = adamw(lr = 0.05), clip = 1.0 }
log { every = 1 step, tensorboard = false }
"""
OWN = 'own(mean_of = "labels")'
JOBS = {
    # A network that returns its loss, of a whole batch of which some tokens do not count.
    "own": (OWN, "Texts", "dict"),
    # The same in other forms: (logits, loss), of a batch (words, labels); (loss, logits, …); an object of transformers.
    "scores first": ('own(mean_of = "1")', "Sequences", "scores first"),
    "loss first": (OWN, "Texts", "loss first"),
    "ModelOutput": (OWN, "Texts", "ModelOutput"),
    # Dicts as input, target and output, and a loss that gives (sum, count, further losses).
    "pair": ('python("own_parts:sized")', "Masked", "dict"),
}
PLANS = [
    ("own", staged("1f1b", 2, 1, 2)),
    ("scores first", staged("1f1b", 2, 1, 2)),
    ("pair", staged("gpipe", 2, 2, 2, "parallelism.zero=2")),
]
MORE = [
    ("loss first", staged("zbv", 2, 1, 2, "parallelism.stages=[2, 1, 1, 2]")),
    ("ModelOutput", staged("gpipe", 2, 1, 2)),
    ("own", staged("gpipe", 2, 2, 2, "parallelism.zero=3")),
    ("own", staged("zbv", 2, 1, 2, "parallelism.stages=[2, 1, 1, 2]")),
    ("pair", staged("1f1b", 2, 1, 2)),
    ("pair", staged("interleaved_1f1b", 2, 1, 2)),
]

Run = Callable[..., Trained]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def written(name: str) -> Path:
        loss, source, gives = JOBS[name]
        text = JOB.replace("LOSS", loss).replace("SOURCE", source).replace("GIVES", gives)
        return write_job_with_helper("own_parts.py", tmp_path_factory.mktemp("job"), text)

    return written


@pytest.fixture(scope="module")
def trained(job: Callable[[str], Path], launcher: Launcher) -> Run:
    @cache
    def run(name: str, *settings: str) -> Trained:
        return train_job(launcher, job(name), *settings)

    return run


def _id(plan: object) -> str:
    return plan if isinstance(plan, str) else ""


@pytest.mark.core
@pytest.mark.parametrize("name, plan", PLANS, ids=_id)
def test_structures_train_as_in_one_process(name: str, plan: tuple[str, ...], trained: Run) -> None:
    one, two = trained(name), trained(name, *plan)
    assert ("validation", 4) in one.records and len(set(one.losses())) == 4
    agree(one, two)
    further = [[record["size"] for record in run.records.values() if "size" in record] for run in (one, two)]
    assert len(further[0]) == (4 if name == "pair" else 0)
    assert further[1] == pytest.approx(further[0], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name, plan", MORE, ids=_id)
def test_and_in_more_ways(name: str, plan: tuple[str, ...], trained: Run) -> None:
    test_structures_train_as_in_one_process(name, plan, trained)


def test_the_count_of_the_losses_is_planned(tmp_path: Path, job: Callable[[str], Path], launcher: Launcher) -> None:
    exchanges_as_planned(launcher, tmp_path, job("own"), *staged("1f1b", 2, 1, 2))
