"""A test split is evaluated once, after the training, on samples that nothing else has seen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, ready, train, train_job, write_job_with_helper

from dslc.main import main
from dslc.runtime.data.splits import for_test, held_out

JOB = job_text(
    data={"source": "digits()", "batch": 32, "validation": "5%", "test": "10%"},
    train={"steps": 6, "optimizer": "adam(lr = 1e-2)"},
    evaluate={"every": "3 steps", "metrics": "[loss, accuracy]"},
    checkpoint={"every": "3 steps", "resume": "auto"},
    log={"every": None},
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job_with_helper("own_streams.py", tmp_path_factory.mktemp("test"), JOB)


@pytest.fixture(scope="module")
def one(job: Path, launcher: Launcher) -> Trained:
    return train_job(launcher, job)


@pytest.mark.core
@pytest.mark.parametrize("plan", [("devices.cpus=2", "parallelism.zero=1"), ("devices.cpus=4", "parallelism.zero=3")])
def test_it_is_exact_on_any_number_of_ranks(job: Path, launcher: Launcher, one: Trained, plan: tuple[str, ...]) -> None:
    agree(one, train_job(launcher, job, *plan))
    assert [line["step"] for line in one.lines if line["split"] == "test"] == [6]
    assert one.lines[-1]["split"] == "test" and 0 <= one.lines[-1]["accuracy"] <= 1


def test_a_resumed_training_has_it_once(job: Path, launcher: Launcher, one: Trained, tmp_path: Path) -> None:
    made = ready(job)
    for steps in (3, 6, 6):
        found = train(launcher, tmp_path / "run", made.program, made.places, steps=steps)
        assert [line["step"] for line in found.lines if line["split"] == "test"] == [steps]
    np.testing.assert_allclose(found.losses("test"), one.losses("test"), rtol=0, atol=1e-6)


def test_the_splits_have_no_sample_in_common(job: Path) -> None:
    data = ready(job).program.data
    assert (data.train_samples, data.validation_samples, data.test_samples) == (1527, 90, 180)
    train_part, validation = held_out(data)
    together = [n for part in (train_part, validation, for_test(data)) for n in part.tolist()]
    assert sorted(together) == list(range(1797))
    without = ready(job, "data.test=0", "data.validation=5%").program.data
    assert held_out(without)[1].tolist() == validation.tolist(), "a test takes nothing from the validation split"


def test_the_commands_take_it(job: Path, one: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--checkpoint", str(one.folder / "weights.safetensors"), "--set", "devices.cpus=2"]
    assert main(["evaluate", str(job), *at, "--json", "--split", "test"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["samples"] == 180 and told["loss"] == pytest.approx(one.losses("test")[-1], abs=1e-5)
    for split, count in (("test", 180), ("all", 1797)):
        output = job.parent / f"{split}.npz"
        assert main(["predict", str(job), *at, "--split", split, "-o", str(output)]) == 0
        found = np.load(output)
        assert found["output"].shape == (count, 10) and len(set(found["index"].tolist())) == count
    assert main(["evaluate", str(job), *at, "--split", "test", "--set", "data.test=0"]) == 2
    assert "--set data.test=10%" in capsys.readouterr().err


def test_a_triple(job: Path, launcher: Launcher) -> None:
    chosen = ('data.source=python("own_streams:triple")', "data.validation=0", "data.test=0", "data.batch=8")
    whole = train_job(launcher, job, *chosen, "model.network=[linear(3)]")
    assert whole.losses("test") == whole.losses("validation")[-1:]
