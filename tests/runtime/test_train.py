"""One training on 1, 2 and 4 real processes is the same training, whatever else the program asks for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import trained
from helpers.launcher import Launcher
from helpers.made_programs import conv_model, gpt_model, images, optimizer_step, places, program, python, tokens
from helpers.trained import Trained, agree

from dslc.compiler.ir import program as p
from dslc.runtime.checkpoint.weights import load_weights
from dslc.runtime.model.meta_model import build_model

KEPT = p.LossStep(kind="cross_entropy", counts="kept", ignore=-100)


def train(launcher: Launcher, folder: Path, ranks: int, data: p.DataStep, **changed: Any) -> Trained:
    return trained.train(launcher, folder, program(ranks, data, **changed), places(ranks))


def over_ranks(
    launcher: Launcher, folder: Path, data: p.DataStep, ranks: tuple[int, ...] = (2, 4), **changed: Any
) -> tuple[Trained, list[Trained]]:
    """Trains in one process, and on each number of ranks."""
    one = train(launcher, folder / "1", 1, data, **changed)
    return one, [train(launcher, folder / str(n), n, data, **changed) for n in ranks]


def test_a_conv_net_over_an_uneven_last_batch(launcher: Launcher, tmp_path: Path) -> None:
    # 100 samples by 16: the seventh batch has 4, which are 2 + 2 and 1 + 1 + 1 + 1; batches of 15 are 8 + 7.
    one, others = over_ranks(launcher, tmp_path, images(tmp_path, batch=15, last=True), steps=15)
    for other in others:
        agree(one, other)
    assert one.losses()[-1] < one.losses()[0]


@pytest.mark.parametrize("limit", [{"clip": 0.3}, {"clip_value": 0.001}])
def test_ignored_tokens_in_pieces_and_clipped(launcher: Launcher, tmp_path: Path, limit: dict[str, float]) -> None:
    data = tokens(tmp_path, train=42, batch=9, last=True, ignored=0.4)
    changed: dict[str, Any] = {"model": gpt_model(), "loss": KEPT, "steps": 10, "microbatches": 2}
    one, others = over_ranks(launcher, tmp_path, data, **changed | limit)
    whole = train(launcher, tmp_path / "whole", 1, data, **changed | limit | {"microbatches": 1})
    free = train(launcher, tmp_path / "free", 1, data, **changed)
    for other in (*others, whole):
        agree(one, other)
    assert not np.allclose(one.losses(), free.losses(), atol=1e-4), "clipping makes a difference here"


def test_the_loss_is_the_mean_over_what_counts(launcher: Launcher, tmp_path: Path) -> None:
    """The first logged loss, computed here by hand from the model and the samples of the first step."""
    data = tokens(tmp_path, train=8, batch=8, ignored=0.5, validation=0, split="none", shuffle=False)
    two = train(launcher, tmp_path / "run", 2, data, model=gpt_model(), loss=KEPT, steps=1)
    stored = np.load(tmp_path / "samples.npz")
    output = build_model(gpt_model(), "cpu")(torch.from_numpy(stored["x"]))
    expected = torch.nn.functional.cross_entropy(output.flatten(0, 1), torch.from_numpy(stored["y"]).flatten())
    assert two.losses() == [pytest.approx(expected.item(), abs=1e-6)]
    assert [line["split"] for line in two.lines] == ["train"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision(launcher: Launcher, tmp_path: Path, dtype: Any) -> None:
    data = images(tmp_path)
    exact = train(launcher, tmp_path / "exact", 1, data, clip=1.0)
    low = p.PrecisionStep(dtype=dtype, scaled=dtype == "float16")
    one, (two,) = over_ranks(launcher, tmp_path, data, (2,), clip=1.0, precision=low)
    for found in (one, two):
        # With float16 the first updates are left out, until the scale of the loss fits.
        np.testing.assert_allclose(found.losses()[:2], exact.losses()[:2], rtol=0, atol=2e-2)
        assert found.losses() != exact.losses()
        assert all(value.dtype == np.float32 for value in found.weights.values() if value.dtype.kind == "f")
        assert 0.5 < _moved(found) / _moved(exact) < 1.5


def _moved(found: Trained) -> float:
    """Returns the distance of the last layer from its initial values."""
    begun = build_model(conv_model(), "cpu").get_parameter("9.weight").detach().numpy()
    return float(np.linalg.norm(found.weights["9.weight"] - begun))


def test_a_schedule_and_an_adaptive_optimizer(launcher: Launcher, tmp_path: Path) -> None:
    # Without batch norm: the bias before one has no gradient but rounding, of which Adam makes whole steps.
    changed: dict[str, Any] = {
        "model": _linear(),
        "sync_batch_norm": False,
        "optimizer": optimizer_step("AdamW", lr=0.01),
        "learning_rate": p.LearningRateStep(kind="cosine", steps=8, warmup=2, floor=0.1),
    }
    one, (two,) = over_ranks(launcher, tmp_path, images(tmp_path), (2,), **changed)
    agree(one, two, weights=0.05 * 0.01 * 8)
    rates = [line["lr"] for line in one.lines if line["split"] == "train"]
    expected = [0.005, 0.01, *(0.01 * (0.1 + 0.45 * (1 + math.cos(math.pi * k / 6))) for k in range(6))]
    assert rates == pytest.approx(expected)


def test_what_is_logged(launcher: Launcher, tmp_path: Path) -> None:
    data = images(tmp_path, batch=16)
    two = train(launcher, tmp_path / "run", 2, data, steps=8, log_every=3, evaluate_every=6, tensorboard=True)
    steps = [(line["step"], line["split"]) for line in two.lines]
    assert steps == [*((1, "train"), (3, "train"), (6, "train"), (6, "validation"), (8, "train"), (8, "validation"))]
    phases = {f"seconds.{phase}" for phase in ("data", "passes", "exposed", "update", "host")}
    for line in two.lines:
        numbers = {"lr"} | phases if line["split"] == "train" else {"accuracy"}
        named = {name for name in line if not name.startswith("slowest.")}
        assert named == {"step", "split", "loss", "samples", "seconds"} | numbers
    before = 0
    spent = []
    for line in (line for line in two.lines if line["split"] == "train"):
        assert all(line[phase] >= 0 for phase in phases) and line["seconds.passes"] > 0
        spent.append((line["step"] - before) * sum(line[phase] for phase in phases))
        before = line["step"]
        assert sum(spent) <= line["seconds"], "the phases of all steps are no longer than the steps"
    assert [line["samples"] for line in two.lines] == [16, 48, 96, 96, 128, 128]
    seconds = [line["seconds"] for line in two.lines]
    assert seconds == sorted(seconds) and seconds[0] >= 0
    assert (two.folder / "logs" / "rank-1.log").exists()
    assert not (two.folder / "logs" / "launcher.log").exists()
    assert "\x1b" not in two.shown and "trained 8 steps" in two.shown and "accuracy" in two.shown
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(two.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 3, 6, 8]
    assert [event.value for event in events.Scalars("validation/loss")] == pytest.approx(two.losses("validation"))
    recorded = [line["seconds.passes"] for line in two.lines if line["split"] == "train"]
    assert [event.value for event in events.Scalars("phases/passes")] == pytest.approx(recorded)


def test_evaluation_counts_every_sample_once(launcher: Launcher, tmp_path: Path) -> None:
    """With a learning rate of 0 the validation metrics are those of the initial model over the whole split."""
    data = images(tmp_path, train=16, validation=13, split="tail", batch=16)
    still = optimizer_step("SGD", lr=0.0)
    model = _linear()
    one, others = over_ranks(
        launcher, tmp_path, data, (2, 4), model=model, optimizer=still, steps=1, sync_batch_norm=False
    )
    stored = np.load(tmp_path / "samples.npz")
    inputs, targets = torch.from_numpy(stored["x"][16:]), torch.from_numpy(stored["y"][16:])
    scores = build_model(model, "cpu")(inputs)
    for found in (one, *others):
        (line,) = [line for line in found.lines if line["split"] == "validation"]
        assert line["loss"] == pytest.approx(torch.nn.functional.cross_entropy(scores, targets).item(), abs=1e-6)
        assert line["accuracy"] == pytest.approx(float((scores.argmax(1) == targets).double().mean()), abs=1e-12)


def _linear() -> p.ModelStep:
    flatten = p.ModuleStep(name="0", kind="Flatten")
    linear = p.ModuleStep(name="1", kind="Linear", arguments={"in_features": 64, "out_features": 10})
    inits = (
        p.InitStep(parameter="1.weight", shape=(10, 64), kind="uniform", a=-0.1, b=0.1),
        p.InitStep(parameter="1.bias", shape=(10,), kind="constant", a=0.0),
    )
    return p.ModelStep(root=p.ModuleStep(name="", kind="Sequential", children=(flatten, linear)), inits=inits, seed=3)


def test_statistics_per_rank_are_evaluated_and_written_as_rank_0_has_them(launcher: Launcher, tmp_path: Path) -> None:
    data = images(tmp_path)
    two = train(launcher, tmp_path / "run", 2, data, sync_batch_norm=False)
    model = build_model(conv_model(), "cpu")
    load_weights(model, str(two.folder))
    model.eval()
    from dslc.runtime.data.sources.open_sources import open_source

    inputs, targets = open_source(data).validation.batch(torch.arange(30))
    expected = torch.nn.functional.cross_entropy(model(inputs), targets)
    assert two.losses("validation") == [pytest.approx(expected.item(), abs=1e-5)]


def test_tied_weights_are_written_once_and_load(launcher: Launcher, tmp_path: Path) -> None:
    found = train(launcher, tmp_path / "run", 1, tokens(tmp_path), model=gpt_model(), steps=2)
    assert "0.weight" in found.weights and "3.weight" not in found.weights
    model = build_model(gpt_model(), "cpu")
    load_weights(model, str(found.folder))
    assert model.get_parameter("3.weight") is model.get_parameter("0.weight")
    np.testing.assert_array_equal(model.get_parameter("3.weight").detach().numpy(), found.weights["0.weight"])
    other = build_model(conv_model(), "cpu")
    with pytest.raises(ValueError, match="is not of this model"):
        load_weights(other, str(found.folder))


MINE = """
import os, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(int(os.environ["RANK"]))
        self.one, self.unused = torch.nn.Linear(64, 10), torch.nn.Linear(3, 3)

    def forward(self, x):
        gradient = self.one.weight.grad
        if torch.is_grad_enabled():
            print("noise", float(torch.rand(())), "gradient", None if gradient is None else float(gradient.sum()))
        return self.one(x.flatten(1))

def loss(output, target):
    return torch.nn.functional.cross_entropy(output, target, reduction="none")
"""


def test_a_users_own_model_and_loss(launcher: Launcher, tmp_path: Path) -> None:
    """Each rank makes other numbers: all begin with those of rank 0. Noise differs from rank to rank."""
    (tmp_path / "mine.py").write_text(MINE)
    changed: dict[str, Any] = {
        "model": p.ModelStep(python=python("mine:Net", tmp_path), seed=3),
        "loss": p.LossStep(kind="python", python=python("mine:loss", tmp_path)),
        "sync_batch_norm": False,
        "microbatches": 2,
    }
    data = images(tmp_path)
    one = train(launcher, tmp_path / "one", 1, data, **changed)
    unused = p.GradientStep(kind="ddp", unused=("unused.weight",), search=True)
    two = train(launcher, tmp_path / "two", 2, data, **changed, gradients=unused)
    agree(one, two)
    assert "unused.weight" in two.weights
    logs = [(two.folder / "logs" / f"rank-{rank}.log").read_text().splitlines() for rank in range(2)]
    # The first line is of the pass over the same samples, in which ranks are compared.
    words = [[line.split() for line in log if line.startswith("noise")][1:] for log in logs]
    assert words[0][0][1] != words[1][0][1], "noise"
    assert {words[0][0][3], words[1][0][3], words[0][2][3]} == {"None"}, "before the first micro-batch of a step"
    assert words[0][1][3] != words[1][1][3], "between micro-batches each rank has its own"


def test_records_without_finite_numbers_are_still_json(launcher: Launcher, tmp_path: Path) -> None:
    huge = optimizer_step("SGD", lr=1e30)
    found = train(launcher, tmp_path / "run", 1, images(tmp_path), optimizer=huge, steps=6, on_nonfinite="continue")
    for line in (found.folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert None in found.losses()
