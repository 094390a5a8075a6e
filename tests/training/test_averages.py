"""An average of the weights: that of a plain loop, sharded in every way, and the same after a resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, ready, train
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dslc.runtime.checkpoint.export import export
from dslc.runtime.checkpoint.state import keys_of, read_tensors

STEPS, DECAY = 6, 0.7
JOB = f"""
model {{
  network = gpt(layers = 2, width = 16, heads = 2, context = 8, vocab = 32, tie = true)
  loss    = cross_entropy()
  freeze  = ["blocks.0.*norm*"]
}}
data {{
  source     = synthetic(samples = 80, vocab = 32, context = 8)
  batch      = 8
  validation = 20%
}}
train {{
  steps     = {STEPS}
  optimizer = sgd(lr = 0.5, momentum = 0.9)
  ema       = {DECAY}
}}
evaluate {{
  every = 2 steps
}}
checkpoint {{
  every        = 1 step
  keep         = 99
  asynchronous = false
}}
log {{
  every       = 1 step
  tensorboard = false
}}
"""
ONE = ("devices.cpus=1",)
PLANS: dict[str, tuple[str, ...]] = {
    **{f"zero {zero}": ("devices.cpus=2", f"parallelism.zero={zero}") for zero in range(4)},
    "tensor": ("devices.cpus=2", "parallelism.tensor=2"),
    "pipeline": ("devices.cpus=2", "parallelism.pipeline=2", "parallelism.microbatches=2"),
}


class Averaged:
    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self.launcher, self.folder, self.job = launcher, folder, folder / "made.plt"
        self.job.write_text(JOB)
        self.whole = self.until("whole", STEPS, *ONE)

    def until(self, run: str, steps: int, *settings: str) -> Trained:
        made = ready(self.job, "checkpoint.resume=auto", *settings)
        return train(self.launcher, self.folder / run, made.program, made.places, steps=steps)


@pytest.fixture(scope="module")
def averaged(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Averaged:
    return Averaged(launcher, tmp_path_factory.mktemp("averaged"))


def tensors(folder: Path, step: int, kind: str) -> dict[str, torch.Tensor]:
    path = str(folder / "checkpoints" / f"step-{step:08d}")
    found = {key: torch.empty(about.size) for key, about in keys_of(path).items() if key.startswith(kind)}
    read_tensors(path, found)
    return {key.removeprefix(kind): tensor for key, tensor in found.items()}


def test_the_average_is_that_of_a_plain_loop(averaged: Averaged) -> None:
    """Each checkpoint has the weights of its step, of which torch's own class makes the average."""
    first = tensors(averaged.whole.folder, 1, "model.")
    own = [torch.nn.Parameter(tensor.clone()) for tensor in first.values()]
    expected = AveragedModel(torch.nn.ParameterList(own), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(1, STEPS + 1):
        for parameter, tensor in zip(own, tensors(averaged.whole.folder, step, "model.").values(), strict=True):
            parameter.data = tensor
        expected.update_parameters(torch.nn.ParameterList(own))
    of_torch = dict(zip(first, (each.detach() for each in expected.module.parameters()), strict=True))
    found = tensors(averaged.whole.folder, STEPS, "average.")
    assert found.keys() == {name for name in first if not name.startswith("blocks.0.") or "norm" not in name}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, of_torch[name], rtol=0, atol=1e-7)
    written = averaged.whole.weights
    for name, tensor in of_torch.items():
        np.testing.assert_allclose(written[name], tensor.numpy(), rtol=0, atol=1e-7, err_msg=name)


def test_evaluations_are_of_the_average_and_training_is_not(averaged: Averaged) -> None:
    without = averaged.until("without", STEPS, *ONE, "train.ema=none")
    assert without.losses() == averaged.whole.losses()
    apart = np.subtract(without.losses("validation"), averaged.whole.losses("validation"))
    assert len(apart) == STEPS // 2 and np.all(np.abs(apart) > 1e-4)


@pytest.mark.core
@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=pytest.mark.long if plan in ("zero 1", "zero 2") else ()) for plan in PLANS]
)
def test_it_is_the_same_under_every_plan_and_after_a_resume(averaged: Averaged, plan: str) -> None:
    """Evaluations are of the average, too. The second half is trained under another plan."""
    other = list(PLANS)[list(PLANS).index(plan) - 1]
    averaged.until(plan, STEPS // 2, *PLANS[plan])
    found = averaged.until(plan, STEPS, *PLANS[other])
    found.lines = [line for line in found.lines if line["split"] == "train" or line["step"] % 2 == 0]
    agree(averaged.whole, found)


def test_the_average_is_exported_and_the_weights_too(averaged: Averaged, tmp_path: Path) -> None:
    source = str(averaged.whole.folder / "checkpoints" / f"step-{STEPS:08d}")
    for raw in (False, True):
        export(source, {}, str(tmp_path / "out.safetensors"), raw=raw)
        found = load_file(tmp_path / "out.safetensors")
        expected = tensors(averaged.whole.folder, STEPS, "model.")
        if not raw:
            expected |= tensors(averaged.whole.folder, STEPS, "average.")
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_an_average_that_the_checkpoint_lacks_begins_with_the_weights(averaged: Averaged) -> None:
    averaged.until("later", 2, *ONE, "train.ema=none")
    averaged.until("later", 3, *PLANS["zero 3"])
    folder = averaged.folder / "later"
    before, weights = tensors(folder, 2, "model."), tensors(folder, 3, "model.")
    for name, average in tensors(folder, 3, "average.").items():
        expected = DECAY * before[name] + (1 - DECAY) * weights[name]
        torch.testing.assert_close(average, expected, rtol=0, atol=1e-6)
