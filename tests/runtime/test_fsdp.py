"""Sharded trainings on real processes are the training of one, whatever is sharded and however it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launcher import Launcher
from made_programs import conv_model, gpt_model, images, places, program, tokens
from safetensors.numpy import load_file

from dslc.compiler import program as p
from dslc.runtime.records import read_metrics

KEPT = p.LossStep(kind="cross_entropy", counts="kept", ignore=-100)
SGD = p.OptimizerStep(kind="SGD", lr=0.05, arguments={"momentum": 0.9})
ADAMW = p.OptimizerStep(kind="AdamW", lr=0.01, arguments={"weight_decay": 0.1}, no_decay=("*.bias", "*norm*"))


def sharded(units: tuple[str, ...], zero: int, replicas: int = 1) -> p.GradientStep:
    """As the compiler says it."""
    return p.GradientStep(kind="fsdp", units=units, replicas=replicas, reshard=zero == 3, accumulate=zero == 1)


class Trained:
    def __init__(self, folder: Path) -> None:
        lines = read_metrics(str(folder))
        self.losses = [line["loss"] for line in lines if line["split"] == "train"]
        self.found = [line["loss"] for line in lines if line["split"] == "validation"]
        self.weights = load_file(folder / "weights.safetensors")


def train(launcher: Launcher, folder: Path, ranks: int, data: p.DataStep, **changed: Any) -> Trained:
    folder.mkdir(exist_ok=True)
    outcome, shown = launcher.launch(program(ranks, data, **changed), places(ranks), folder)
    assert outcome.done, f"{outcome}\n{shown}"
    return Trained(folder)


def agree(one: Trained, other: Trained, weights: float = 1e-5) -> None:
    assert one.losses and one.found
    np.testing.assert_allclose(other.losses, one.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(other.found, one.found, rtol=0, atol=1e-5)
    assert one.weights.keys() == other.weights.keys()
    for name, value in one.weights.items():
        assert other.weights[name].dtype == value.dtype
        np.testing.assert_allclose(other.weights[name], value, rtol=0, atol=weights, err_msg=name)


# (ranks, zero, replicas): every way to shard, on every number of ranks.
LAID_OUT = [(2, 3, 1), (4, 3, 1), (2, 2, 1), (4, 2, 2), (4, 3, 2), (4, 1, 2), (1, 0, 1)]


@pytest.mark.parametrize(("ranks", "zero", "replicas"), LAID_OUT)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_tied_gpt_with_ignored_tokens(
    launcher: Launcher, tmp_path: Path, ranks: int, zero: int, replicas: int, microbatches: int
) -> None:
    """Vocabulary 30 over 4 ranks is cut unevenly; a context of 8 over 4 evenly; the last batch of an epoch is short."""
    data = tokens(tmp_path, train=42, batch=18, last=True, ignored=0.4, validation=5)
    changed: dict[str, Any] = {
        "model": gpt_model(vocab=33),
        "loss": KEPT,
        "clip": 0.3,
        "steps": 9,
        "microbatches": microbatches,
        "optimizer": ADAMW if zero % 2 else SGD,
    }
    one = train(launcher, tmp_path / "one", 1, data, **changed)
    many = train(launcher, tmp_path / "many", ranks, data, **changed, gradients=sharded(("2",), zero, replicas))
    agree(one, many, weights=0.05 * 0.01 * 9 if zero % 2 else 1e-5)
    free = train(launcher, tmp_path / "free", 1, data, **changed | {"clip": None})
    assert not np.allclose(one.losses, free.losses, atol=1e-4), "clipping makes a difference here"


@pytest.mark.parametrize(("ranks", "zero", "replicas"), LAID_OUT)
def test_a_conv_net_with_batch_norm(launcher: Launcher, tmp_path: Path, ranks: int, zero: int, replicas: int) -> None:
    """Three channels over 4 ranks: the last ranks hold no row of some parameters."""
    data = images(tmp_path, batch=15, last=True, validation=9)
    changed: dict[str, Any] = {"model": conv_model(3), "steps": 9}
    one = train(launcher, tmp_path / "one", 1, data, **changed)
    many = train(launcher, tmp_path / "many", ranks, data, **changed, gradients=sharded(("4", "9"), zero, replicas))
    agree(one, many)
