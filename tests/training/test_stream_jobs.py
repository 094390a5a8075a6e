"""A stream trains alike on any number of ranks, and goes on at the very next sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, ready, train, train_in_parts, train_job, write_job_with_helper

from dslc.runtime.checkpoint import files

JOB = job_text(
    model={"network": "[linear(8), tanh(), linear(3)]"},
    data={"source": 'python("own_streams:pair")', "batch": 8, "shuffle_buffer": 20},
    train={"steps": 14, "optimizer": "adam(lr = 1e-2)"},
    evaluate={"every": "7 steps"},
)
KEEPS = ("checkpoint.every=100 steps", "checkpoint.resume=auto")
FOUR = ("devices.cpus=4", "parallelism.zero=3", "data.workers=1")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job_with_helper("own_streams.py", tmp_path_factory.mktemp("streams"), JOB)


@pytest.fixture(scope="module")
def one(job: Path, launcher: Launcher) -> Trained:
    return train_job(launcher, job)


def same(one: Trained, other: Trained, bound: float) -> None:
    """Asserts equal losses and parameters; a training that was cut has been evaluated at each cut, too."""
    np.testing.assert_allclose(other.losses(), one.losses(), rtol=0, atol=bound and 1e-5)
    for name, value in one.weights.items():
        np.testing.assert_allclose(other.weights[name], value, rtol=0, atol=bound, err_msg=name)


@pytest.mark.core
@pytest.mark.parametrize(
    "plan", [("devices.cpus=2", "parallelism.zero=1"), FOUR, ("devices.cpus=2", "parallelism.pipeline=2")], ids=str
)
def test_the_training_is_that_of_one_process(
    job: Path, launcher: Launcher, one: Trained, plan: tuple[str, ...]
) -> None:
    agree(one, train_job(launcher, job, *plan), weights=5e-5)
    assert len(one.losses("validation")) == 2


def test_it_goes_on_in_mid_pass_with_the_very_next_sample(
    job: Path, launcher: Launcher, one: Trained, tmp_path: Path
) -> None:
    found = train_in_parts(launcher, tmp_path / "run", job, (5, ("devices.cpus=2",)), (9, FOUR), (14, ()))
    same(one, found, 5e-5)
    manifest = files.read_manifest(files.checkpoints_in(str(tmp_path / "run" / "checkpoints"))[0])
    assert manifest.fit.stream == (4, 4, 20) and sorted(manifest.stream) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("source", ["stateful", "plain"])
def test_it_goes_on_to_the_bit(job: Path, launcher: Launcher, tmp_path: Path, source: str) -> None:
    chosen = (f'data.source=python("own_streams:{source}")',)
    whole = train_job(launcher, job, *chosen)
    same(whole, train_in_parts(launcher, tmp_path / "run", job, (6, chosen), (14, chosen)), 0)


def test_a_length_makes_epochs(job: Path) -> None:
    made = ready(job, "data.samples=46", "train.epochs=3", "evaluate.every=1 epoch")
    assert made.program.steps == 15 and made.program.evaluate_every == 5
    assert ready(job, "train.steps=3").program.data.train_samples == 24


def test_another_buffer_does_not_resume(job: Path, launcher: Launcher, tmp_path: Path) -> None:
    made = ready(job, *KEEPS)
    train(launcher, tmp_path / "run", made.program, made.places, steps=3)
    made = ready(job, *KEEPS, "data.shuffle_buffer=30")
    outcome, _ = launcher.launch(made.program, made.places, tmp_path / "run")
    assert outcome.failure is not None
    assert "20 samples shuffled at a time, and the job's data is a stream of 4 shards, 4 at a time, 30" in str(
        outcome.failure
    )


def test_a_validation_set_beside_a_stream(job: Path, launcher: Launcher) -> None:
    chosen = ('data.source=python("own_streams:beside_a_set")', "train.steps=2", "evaluate.every=1 step")
    agree(train_job(launcher, job, *chosen), train_job(launcher, job, *chosen, "devices.cpus=2"))


@pytest.mark.parametrize(
    ("source", "said"),
    [("broken", "0003.tar is cut off"), ("empty", "shard 1 has none in pass"), ("ends", "the stream gives no more")],
)
def test_a_shard_that_fails_is_named(job: Path, launcher: Launcher, tmp_path: Path, source: str, said: str) -> None:
    made = ready(job, f'data.source=python("own_streams:{source}")', "data.shuffle=false", "devices.cpus=2")
    (tmp_path / "run").mkdir()
    outcome, _ = launcher.launch(made.program, made.places, tmp_path / "run")
    assert outcome.failure is not None and said in str(outcome.failure)
    assert "--set 1" in str(outcome.failure)


def test_files_of_hugging_face(job: Path, launcher: Launcher, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    for part in ("a", "b", "c"):
        drawn = np.random.default_rng(ord(part)).normal(size=(11, 4)).astype("f4")
        pq.write_table(pa.table({"x": list(drawn), "y": [n % 3 for n in range(11)]}), tmp_path / f"{part}.parquet")
    source = 'datasets("parquet", data_files = ["./a.parquet", "./b.parquet", "./c.parquet"], streaming = true)'
    job, chosen = tmp_path / "job.plt", ("data.batch=6", "train.steps=12", "data.shuffle_buffer=6")
    job.write_text(JOB.replace('python("own_streams:pair")', source))
    whole = train_job(launcher, job, *chosen)
    made = ready(job, *KEEPS, *chosen, "devices.cpus=2", "data.workers=1")
    train(launcher, tmp_path / "cut", made.program, made.places, steps=5)
    made = ready(job, *KEEPS, *chosen)
    assert made.program.data.stream is not None and made.program.data.stream.lanes == 3
    same(whole, train(launcher, tmp_path / "cut", made.program, made.places), 1e-5)
    manifest = files.read_manifest(files.checkpoints_in(str(tmp_path / "cut" / "checkpoints"))[0])
    assert any(mark["state"] for mark in manifest.stream.values())


def test_it_is_evaluated_and_predicted(job: Path, one: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    from dslc.main import main

    at = ["--checkpoint", str(one.folder / "weights.safetensors"), "--set", "devices.cpus=2"]
    assert main(["evaluate", str(job), *at, "--json"]) == 0
    assert f'"loss": {one.losses("validation")[-1]:.6f}'[:14] in capsys.readouterr().out
    output = job.parent / "out.npz"
    assert main(["predict", str(job), *at, "--split", "validation", "-o", str(output)]) == 0
    assert np.load(output)["output"].shape == (18, 3)
