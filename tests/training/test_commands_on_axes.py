"""Commands on checkpoints, `dslc verify` and `dslc plan`, for plans with a tensor axis or a pipeline axis."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import dslc
from helpers.job_texts import job_text
from helpers.paths import HELPERS
from safetensors.torch import load_file
from test_evaluate import run_of
from test_tensor_plans import OWN, PLAN

JOB = job_text(
    model={"network": "NETWORK"},
    data={"source": "synthetic(samples = 61, vocab = 256, context = 16)", "batch": 8, "validation": "13/61"},
    train={"steps": 4, "optimizer": "adamw(lr = 1e-3)"},
    evaluate={"metrics": '[loss, accuracy, f1, python("own_metrics:Spread")]'},
    checkpoint={"every": "4 steps"},
    log=None,
)
TRANSFORMER = 'python("own_transformer:network")'
GPT = "gpt(layers = 2, width = 32, heads = 2, context = 16, vocab = 256, tie = true)"
TENSOR, PIPELINE = ("parallelism.tensor=2",), ("parallelism.pipeline=2", "parallelism.microbatches=2")
PLANS = {
    "own, tensor": (TRANSFORMER, ("devices.cpus=2", *TENSOR, f"parallelism.tensor_plan={PLAN}")),
    "own, pipeline": (TRANSFORMER, ("devices.cpus=2", *PIPELINE)),
    "gpt, both": (GPT, ("devices.cpus=4", *TENSOR, *PIPELINE)),
}


class Planned:
    """A job of one process, in a folder, and a plan for it."""

    def __init__(self, folder: Path, network: str, settings: tuple[str, ...]) -> None:
        self.folder, self.plan = folder, [word for setting in settings for word in ("--set", setting)]
        shutil.copy(OWN, folder)
        shutil.copy(HELPERS / "own_metrics.py", folder)
        (folder / "job.plt").write_text(JOB.replace("NETWORK", network))

    def shown(self, command: str, *arguments: object) -> str:
        """Returns the output of `dslc COMMAND job.plt …`."""
        done = dslc(command, "job.plt", *arguments, cwd=self.folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(
    scope="module",
    params=["own, tensor", *(pytest.param(name, marks=pytest.mark.long) for name in ("own, pipeline", "gpt, both"))],
)
def planned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Planned:
    return Planned(tmp_path_factory.mktemp("planned"), *PLANS[request.param])


@pytest.fixture(scope="module")
def trained(planned: Planned) -> Planned:
    """The job, trained under its plan."""
    planned.shown("run", *planned.plan)
    return planned


@pytest.mark.slow
def test_an_evaluation_is_that_of_the_training(trained: Planned) -> None:
    found = json.loads(trained.shown("evaluate", "--json", *trained.plan))
    lines = map(json.loads, (run_of(trained.folder) / "metrics.jsonl").read_text().splitlines())
    record = next(line for line in lines if line["split"] == "validation")
    assert (found["step"], found["samples"]) == (4, 13)
    assert found["loss"] == pytest.approx(record["loss"], rel=1e-6)
    assert found["accuracy"] == pytest.approx(record["accuracy"], abs=1e-12)
    one = json.loads(trained.shown("evaluate", "--json"))
    kept = ("f1", "Spread.most", "Spread.least", "Spread.seen", "Spread.by_class")
    for name in kept:
        assert record[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
    assert one["Spread.seen"] == 13 * 16


@pytest.mark.slow
def test_predictions_are_those_of_one_process(trained: Planned) -> None:
    """One process loads the same checkpoint."""
    found = {}
    for name, settings in (("plan", trained.plan), ("one", [])):
        path = trained.folder / f"{name}.npz"
        assert "output 61 x 16 x 256" in trained.shown("predict", "-o", path, "--split", "all", *settings)
        found[name] = np.load(path)
    assert found["plan"]["index"].tolist() == list(range(61))
    np.testing.assert_allclose(found["plan"]["output"], found["one"]["output"], atol=1e-5)


@pytest.mark.slow
def test_what_is_exported_is_what_was_trained(trained: Planned) -> None:
    path = trained.folder / "weights.pt"
    trained.shown("export", "-o", path, *trained.plan)
    exported = torch.load(path, weights_only=True)
    for name, weight in load_file(run_of(trained.folder) / "weights.safetensors").items():
        assert torch.equal(exported[name], weight), name


@pytest.mark.slow
def test_it_is_verified(planned: Planned) -> None:
    shown = planned.shown("verify", "--steps", 2, *planned.plan)
    assert "the plan trains as one process does\n" in shown
    axes = [setting.removeprefix("parallelism.").replace("=", " ") for setting in (TENSOR[0], PIPELINE[0])]
    for axis in axes:
        assert (f", {axis}" in shown.splitlines()[0]) == (f"parallelism.{axis.replace(' ', '=')}" in planned.plan)


def test_it_is_planned(planned: Planned) -> None:
    shown = planned.shown("plan", "--trace", *planned.plan)
    assert "activations" in shown and "not traced" not in shown
