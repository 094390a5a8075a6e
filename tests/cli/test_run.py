"""`dslc run` on real processes: the same training on 1, 2 and 4 of them, and what it leaves behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import dslc
from helpers.launcher import Launcher
from helpers.paths import ROOT
from helpers.trained import train_job
from safetensors.numpy import load_file

from dslc.compiler.plan_file import read_plan

EXAMPLES = ROOT / "examples"


Run = tuple[list[dict[str, Any]], dict[str, np.ndarray[Any, Any]]]  # lines of metrics.jsonl, and the final weights
EVERY_STEP = "log.every=1 step"


def command(job: Path, out: Path, *settings: str) -> Run:
    """Trains with `dslc run`."""
    flags = [word for text in (EVERY_STEP, *settings) for word in ("--set", text)]
    run = dslc("run", job, "--out", out, *flags)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return lines, load_file(out / "weights.safetensors")


def train(launcher: Launcher, job: Path, out: Path, *settings: str) -> Run:
    """Trains what `dslc run` would, without a process for the command."""
    out.mkdir()
    made = train_job(launcher, job, EVERY_STEP, *settings, folder=out)
    return made.lines, made.weights


def losses(lines: list[dict[str, Any]], split: str = "train") -> list[float]:
    return [line["loss"] for line in lines if line["split"] == split]


def agree(one: Run, other: Run, parameters: float = 1e-5) -> None:
    """Asserts that losses agree to 1e-5, and parameters to 1e-5 with SGD."""
    for split in ("train", "validation"):
        a, b = losses(one[0], split), losses(other[0], split)
        assert len(a) == len(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        if "running_" in name or name.endswith("num_batches_tracked"):  # buffers: sums over what the parameters made
            np.testing.assert_allclose(value, other[1][name], rtol=1e-4, atol=1e-4, err_msg=name)
            continue
        np.testing.assert_allclose(value, other[1][name], rtol=0, atol=parameters, err_msg=name)


def over_ranks(
    launcher: Launcher, folder: Path, job: Path, *settings: str, ranks: tuple[int, ...] = (1, 2, 4)
) -> list[Run]:
    """Trains the job on each number of processes."""
    alone = ("parallelism.data=none", *settings)
    return [train(launcher, job, folder / str(n), f"devices.cpus={n}", *alone) for n in ranks]


@pytest.fixture(scope="module")
def digits(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return over_ranks(launcher, tmp_path_factory.mktemp("digits"), EXAMPLES / "digits.plt")


def test_digits_are_learnt(digits: list[Run]) -> None:
    for lines, _ in digits:
        validation = [line for line in lines if line["split"] == "validation"]
        assert len(validation) == 5
        assert validation[-1]["accuracy"] >= 0.95
        assert len(losses(lines)) == 110


def test_digits_agree_on_any_number_of_processes(digits: list[Run]) -> None:
    one, two, four = digits
    agree(one, two)
    agree(one, four)


def test_an_uneven_last_batch_counts_every_sample_once(launcher: Launcher, tmp_path: Path) -> None:
    """1,438 = 22 x 64 + 30: the last batch of an epoch gives 4 ranks 8, 8, 7 and 7 samples."""
    one, two, four = over_ranks(launcher, tmp_path, EXAMPLES / "digits.plt", "data.last_batch=keep", "train.epochs=2")
    assert len(losses(one[0])) == 46
    assert [line["samples"] for line in one[0] if line["split"] == "train"][22] == 1438
    agree(one, two)
    agree(one, four)


def test_ignored_tokens_change_nothing(launcher: Launcher, tmp_path: Path) -> None:
    """Ranks see different numbers of tokens that count; the loss is over all of them."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 16, (64, 12))
    y = np.where(rng.random((64, 12)) < np.linspace(0.05, 0.9, 64)[:, None], -100, (x * 3 + 1) % 16)
    np.savez(tmp_path / "tokens.npz", x=x, y=y)
    job = tmp_path / "tokens.plt"
    job.write_text(
        """
        model {
          network = [embedding(vocab = 16, width = 16), transformer_block(heads = 2), linear(16)]
          loss    = cross_entropy(ignore = -100)
        }
        data {
          source     = arrays("tokens.npz")
          batch      = 16
          shuffle    = false
          validation = 25%
        }
        train {
          epochs    = 5
          optimizer = sgd(lr = 0.1, momentum = 0.9)
          clip      = 1.0
        }
        evaluate {
          metrics = [loss, accuracy, perplexity]
        }
        """
    )
    one, two, four = over_ranks(launcher, tmp_path, job)
    agree(one, two)
    agree(one, four)


def test_micro_batches_change_nothing(launcher: Launcher, tmp_path: Path) -> None:
    job = EXAMPLES / "accumulate.plt"
    settings = ("train.epochs=2", "train.optimizer=sgd(lr = 0.05, momentum = 0.9)")
    whole = train(launcher, job, tmp_path / "whole", *settings, "parallelism.microbatches=1", "devices.cpus=1")
    for cpus, pieces in ((1, 4), (2, 4), (2, 8)):
        out = tmp_path / f"{cpus}-{pieces}"
        agree(whole, train(launcher, job, out, *settings, f"parallelism.microbatches={pieces}", f"devices.cpus={cpus}"))


def test_a_run_leaves_what_the_language_says(tmp_path: Path) -> None:
    out = tmp_path / "run"
    lines, _ = command(EXAMPLES / "digits.plt", out, "train.epochs=1", "rate=0.1")
    for name in ("job.plt", "plan.json", "plan.svg", "metrics.jsonl", "weights.safetensors", "tensorboard"):
        assert (out / name).exists(), name
    assert sorted(p.name for p in (out / "logs").glob("rank-*.log")) == ["rank-0.log", "rank-1.log"]
    assert set(lines[0]) >= {"step", "split", "loss", "lr", "samples", "seconds"}
    assert lines[0]["lr"] == 0.1
    assert (out / "plan.svg").read_text().lstrip().startswith("<")
    # The job as resolved is the same run again.
    again, _ = command(out / "job.plt", tmp_path / "again")
    assert losses(again) == pytest.approx(losses(lines), abs=1e-6)
    plans = [read_plan((folder / "plan.json").read_text()).plan for folder in (out, tmp_path / "again")]
    assert plans[0].layers[0].parameters == plans[1].layers[0].parameters
    # A run is never overwritten.
    assert dslc("run", EXAMPLES / "digits.plt", "--out", out).returncode == 2


@pytest.mark.slow
def test_a_deterministic_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    settings = ("train.epochs=1", "train.deterministic=true")
    (a, x), (b, y) = (command(EXAMPLES / "digits.plt", tmp_path / name, *settings) for name in "ab")
    assert losses(a) == losses(b)
    assert all((x[name] == y[name]).all() for name in x)


def test_what_cannot_be_carried_out_yet_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    run = dslc("run", EXAMPLES / "digits.plt", "--out", tmp_path / "run", "--set", "devices.backend=mpi")
    assert run.returncode == 1
    assert "error[E0801]" in run.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_sweep_runs_every_combination_in_a_folder_of_its_own(tmp_path: Path) -> None:
    job = tmp_path / "sweep.plt"
    job.write_text((EXAMPLES / "sweep.plt").read_text().replace("digits.plt", str(EXAMPLES / "digits.plt")))
    run = dslc("run", job, "--out", tmp_path / "run", "--set", "data.batch=128", "--set", "train.steps=2")
    assert run.returncode == 0, run.stderr
    assert sorted(p.name for p in (tmp_path / "run").iterdir() if p.is_dir()) == ["lr=0.01", "lr=0.03", "lr=0.1"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_follows_fp32(launcher: Launcher, tmp_path: Path, precision: str) -> None:
    settings = ("train.epochs=1",)
    full = train(launcher, EXAMPLES / "digits.plt", tmp_path / "fp32", *settings)
    low = train(launcher, EXAMPLES / "digits.plt", tmp_path / precision, *settings, f"train.precision={precision}")
    assert losses(low[0]) == pytest.approx(losses(full[0]), abs=0.1)
    assert losses(low[0]) != losses(full[0])


@pytest.mark.parametrize(
    "optimizer",
    ["adamw", "rmsprop", *(pytest.param(name, marks=pytest.mark.long) for name in ("adam", "nadam", "adagrad"))],
)
def test_optimizers_agree_on_any_number_of_processes(launcher: Launcher, tmp_path: Path, optimizer: str) -> None:
    job = EXAMPLES / "vit.plt"
    settings = ("train.steps=10", f"train.optimizer={optimizer}(lr = 1e-3)", "train.lr_schedule=constant")
    one, two = over_ranks(launcher, tmp_path, job, *settings, ranks=(1, 2))
    agree(one, two, parameters=0.05 * 2e-3 * 10)


@pytest.mark.slow
def test_a_job_runs_from_any_folder(tmp_path: Path) -> None:
    run = dslc("run", os.path.relpath(EXAMPLES / "own" / "own.plt", tmp_path), "--set", "train.steps=3", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert len(list((tmp_path / "runs" / "own").iterdir())) == 1
