"""Code of a user's own over ranks: metrics on structures are exact, and each optimizer trains as in one process or is
refused, on 1, 2 and 4 ranks and under every sharding.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import own_table
from helpers.launcher import Launcher
from helpers.paths import HELPERS
from helpers.trained import Trained, agree, train_job

from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.check_job import inspect

JOB = """
model { network = python("own_table:Two"), loss = python("own_table:loss") }
data { source = python("own_table:Samples"), batch = 8, validation = 11/43 }
devices { cpus = 1 }
train { steps = 9, optimizer = adam(lr = 0.02) }
evaluate {
  every   = 3 steps
  metrics = [loss, python("own_table:MeanIoU"), python("own_table:F1"), python("own_table:Bleu")]
}
log { every = 1 step, tensorboard = false }
"""
NAMES = ("loss", "MeanIoU.mean", "F1", "Bleu")
PLANS = {(ranks, zero): (f"devices.cpus={ranks}", f"parallelism.zero={zero}") for ranks in (2, 4) for zero in range(4)}
IN_CI = ((2, 1), (4, 3))  # of metrics

pytestmark = pytest.mark.usefixtures("loaded")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    shutil.copy(HELPERS / "own_table.py", folder)
    (folder / "job.plt").write_text(JOB)
    return folder / "job.plt"


@pytest.fixture(scope="module")
def one(job: Path, launcher: Launcher) -> Trained:
    return train_job(launcher, job)


def validated(trained: Trained) -> list[dict[str, Any]]:
    found = [line for line in trained.lines if line["split"] == "validation"]
    assert [line["step"] for line in found] == [3, 6, 9]
    return found


def test_metrics_are_those_of_the_whole_split(one: Trained) -> None:
    """Computed here from the weights, over all samples that no step has seen."""
    from dslc.runtime.data.splits import parted

    last = validated(one)[-1]
    network = own_table.Two()
    network.load_state_dict({name: torch.from_numpy(value) for name, value in one.weights.items()})
    samples = [own_table.Samples()[n] for n in parted(0, 32, 43)[1].tolist()]
    pairs = {part: torch.stack([input[part] for input, _ in samples]) for part in ("cells", "words")}
    labels = torch.stack([target["labels"] for _, target in samples])
    words = torch.stack([target["text"]["words"] for _, target in samples])
    output, target = network(**pairs), {"labels": labels, "text": {"words": words}}
    for kind in (own_table.MeanIoU, own_table.F1, own_table.Bleu):
        metric = kind()
        metric.update(output, target)
        value = metric.compute()
        expected = value["mean"] if isinstance(value, dict) else value
        name = f"{kind.__name__}.mean" if isinstance(value, dict) else kind.__name__
        assert last[name] == pytest.approx(float(expected)), name
        assert 0.2 < last[name] < 1, "neither all nor none"
    scores = output["text"][0].argmax(2)
    assert last["Bleu"] < (scores == words).float().mean(), "n-grams are rarer than words"


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in IN_CI else pytest.mark.long) for plan in PLANS], ids=str
)
def test_metrics_over_ranks(job: Path, launcher: Launcher, one: Trained, plan: tuple[int, int]) -> None:
    """11 samples over 2 and 4 ranks are uneven shares."""
    other = train_job(launcher, job, *PLANS[plan])
    agree(one, other)
    for line, expected in zip(validated(other), validated(one), strict=True):
        for name in NAMES:
            assert line[name] == pytest.approx(expected[name], abs=1e-5), name
        np.testing.assert_allclose(line["MeanIoU.each"], expected["MeanIoU.each"], atol=1e-6)


# ------------------------------------------------------------------------------------------------------- optimizers

LAYERS = """
model {
  network = [linear(24), gelu(), linear(20), gelu(), linear(24), gelu(), linear(10)]
  loss    = cross_entropy()
}
data { source = synthetic(samples = 72, shape = [12], classes = 10), batch = 8, validation = 8/72 }
devices { cpus = 1 }
train { steps = 6, optimizer = OPTIMIZER, lr_schedule = warmup_cosine(warmup = 2 steps) }
"""
OPTIMIZERS = {
    "lion": ('python("own_optimizers:Lion", lr = 1e-3, weight_decay = 0.1)', {}),
    "muon": ('python("own_optimizers:Muon", lr = 0.02, besides = ["6."])', {2: "E0723", 3: "E0723"}),
    "adam8": ('python("own_optimizers:Adam8", lr = 1e-2)', {2: "E0723", 3: "E0723"}),
    "together": ('python("own_optimizers:Together", lr = 0.1)', {1: "E0613", 2: "E0723", 3: "E0723"}),
    "torchao": ('python("torchao.optim:AdamW8bit", lr = 1e-3)', {}),  # of so few numbers, 8 bits are not its state
}  # and why a sharding refuses it


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_over_ranks(launcher: Launcher, tmp_path: Path, optimizer: str, ranks: int) -> None:
    shutil.copy(HELPERS / "own_optimizers.py", tmp_path)
    made = tmp_path / "job.plt"
    call, refused = OPTIMIZERS[optimizer]
    made.write_text(LAYERS.replace("OPTIMIZER", call))
    alone = train_job(launcher, made)
    for zero in range(4):
        if zero in refused:
            assert {refused[zero]} == codes(made, *PLANS[ranks, zero])
        else:
            agree(alone, train_job(launcher, made, *PLANS[ranks, zero]), weights=1e-4)


def codes(job: Path, *settings: str) -> set[str]:
    report = Report()
    inspect(load(str(job), list(settings)), report, run=True, trace=True)
    return {found.code for found in report.errors}


@pytest.mark.slow
def test_the_table_is_whole() -> None:
    """No sharding is left out, and what is refused is refused for a reason that has a page."""
    from dslc.dsl.codes import explain

    assert len(PLANS) == 8 and set(IN_CI) <= set(PLANS)
    assert all(explain(code) for _, refused in OPTIMIZERS.values() for code in refused.values())
