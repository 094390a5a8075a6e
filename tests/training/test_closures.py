"""An optimizer that evaluates the loss by a closure trains as in a loop by hand, on one rank and on several."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers import own_closures
from helpers.launcher import Launcher
from helpers.trained import train_job, write_job_with_helper

from dslc.compiler.ir.network_facts import OptimizerFacts
from dslc.compiler.placement.layout import lay_out
from dslc.compiler.rules.training.custom_optimizer import check_own_optimizer
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load

JOB = """
model {
  network = python("own_closures:net", dropout = DROPOUT)
  loss    = mse()
}
data {
  source = python("own_closures:Samples")
  batch  = 16
}
devices { cpus = 1 }
train {
  steps     = 5
  optimizer = python("own_closures:OPTIMIZER)
  hooks     = [python("own_closures:Evaluations")]
}
log { every = 1 step }
"""
PLAIN = 'lbfgs", lr = 0.5, max_iter = 5'
SEARCH = 'lbfgs", lr = 1.0, max_iter = 4, history_size = 3, line_search_fn = "strong_wolfe"'
SAM = 'Sam", lr = 0.05'
TWO = ("devices.cpus=2", "parallelism.data=2", "parallelism.zero=0")
TWO_BY_TWO = (*TWO, "parallelism.microbatches=2")


def job(folder: Path, optimizer: str, dropout: float = 0.0) -> Path:
    text = JOB.replace("OPTIMIZER", optimizer).replace("DROPOUT", str(dropout))
    return write_job_with_helper("own_closures.py", folder, text)


class ByHand(NamedTuple):
    """A loop of torch over the whole batch: the loss of each step, the norm of each evaluation, the last weights."""

    losses: list[float]
    norms: list[float]
    weights: list[torch.Tensor]


def by_hand(optimizer: str, clip: float = math.inf) -> ByHand:
    model, (inputs, targets) = own_closures.net(), own_closures.tensors()
    name, _, arguments = optimizer.partition('", ')
    made: torch.optim.Optimizer = eval(f"own_closures.{name}(model.parameters(), {arguments})", globals() | locals())
    losses, norms = list[float](), list[float]()

    def closure() -> torch.Tensor:
        made.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        evaluations.append(loss.item())
        return loss

    for _ in range(5):
        evaluations: list[float] = []
        made.step(closure=torch.enable_grad()(closure))  # type: ignore[arg-type]
        losses.append(evaluations[0])
    return ByHand(losses, norms, [parameter.detach() for parameter in model.parameters()])


@pytest.mark.core
@pytest.mark.parametrize(
    ("optimizer", "plan"),
    [
        (PLAIN, ()),
        (SEARCH, TWO),
        (SEARCH, ("parallelism.microbatches=2",)),
        (SAM.replace("Sam", "SamWithDefault"), TWO_BY_TWO),
        (SAM, (*TWO, 'model.network=python("own_closures:wide_net")')),
        (SAM.replace("Sam", "SamByName"), TWO),
        pytest.param(SAM, TWO_BY_TWO, marks=pytest.mark.long),
        pytest.param(PLAIN, TWO_BY_TWO, marks=pytest.mark.long),
        pytest.param(SAM, (), marks=pytest.mark.long),
    ],
)
def test_trains_as_a_loop_by_hand(launcher: Launcher, tmp_path: Path, optimizer: str, plan: tuple[str, ...]) -> None:
    losses, norms, weights = by_hand(optimizer)
    trained = train_job(launcher, job(tmp_path, optimizer), *plan)
    assert trained.losses() == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0] * 0.9, "it learns"
    assert json.loads((trained.folder / "norms.json").read_text()) == pytest.approx(norms, rel=1e-2)
    for name, value in zip(("0.weight", "0.bias", "3.weight", "3.bias"), weights, strict=True):
        assert abs(torch.from_numpy(trained.weights[name]) - value).max() < 1e-4, name


def test_each_evaluation_clips_the_gradient(launcher: Launcher, tmp_path: Path) -> None:
    losses = by_hand(SAM, clip=0.3).losses
    assert losses != by_hand(SAM).losses
    trained = train_job(launcher, job(tmp_path, SAM), "train.clip=norm(0.3)", *TWO)
    assert trained.losses() == pytest.approx(losses, abs=1e-5)


def test_each_evaluation_of_a_step_drops_the_same(launcher: Launcher, tmp_path: Path) -> None:
    trained = train_job(launcher, job(tmp_path, 'SameLoss", lr = 0.01', dropout=0.5), "parallelism.microbatches=2")
    assert all(math.isfinite(loss) for loss in trained.losses())
    assert len(set(trained.losses())) == 5


@pytest.mark.parametrize("optimizer", [SEARCH, pytest.param(SAM, marks=pytest.mark.long)])
def test_a_training_resumes_with_the_same_numbers(launcher: Launcher, tmp_path: Path, optimizer: str) -> None:
    path, kept = job(tmp_path, optimizer), f"checkpoint.dir={tmp_path / 'kept'}"
    whole = train_job(launcher, path, *TWO)
    train_job(launcher, path, "checkpoint.every=2 steps", kept, *TWO)
    shutil.rmtree(tmp_path / "kept" / "step-00000005")
    resumed = train_job(launcher, path, "checkpoint.resume=auto", kept, *TWO)
    assert [line["step"] for line in resumed.lines] == [5]
    assert resumed.losses() == whole.losses()[4:]
    assert all((resumed.weights[name] == value).all() for name, value in whole.weights.items())


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("zero", (*TWO, "parallelism.zero=1")),
        ("zero", (*TWO, "parallelism.zero=3")),
        ("pipeline", ("devices.cpus=2", "parallelism.data=1", "parallelism.pipeline=2")),
        ("tensor", ("devices.cpus=2", "parallelism.data=1", "parallelism.tensor=2")),
        ("context", ("devices.cpus=2", "parallelism.data=1", "parallelism.context=2")),
        ("gradients", (*TWO, "parallelism.gradients=bf16()")),
        ("gradients", (*TWO, "parallelism.gradients=local_sgd()")),
        ("precision", ("train.precision=fp16",)),
        ("precision", ("train.precision=bf16(level = O2)",)),
        ("on_nonfinite", ("train.on_nonfinite=skip",)),
        ("step", ('train.step=python("own_closures:net")',)),
    ],
)
def test_what_cannot_evaluate_again_is_refused(tmp_path: Path, field: str, settings: tuple[str, ...]) -> None:
    spec = load(str(job(tmp_path, SAM)), list(settings)).job
    assert spec is not None
    (error,) = check_own_optimizer(spec, Report().collect(lay_out(spec)), OptimizerFacts(closure=True))
    block = spec.parallelism if field in ("zero", "pipeline", "tensor", "context", "gradients") else spec.train
    assert error.code == "E0663" and error.span == block.value_span(field), error.message


def test_the_plan_says_that_it_shows_one_evaluation(tmp_path: Path) -> None:
    spec = load(str(job(tmp_path, SAM)), list(TWO)).job
    assert spec is not None
    findings = check_own_optimizer(spec, Report().collect(lay_out(spec)), OptimizerFacts(closure=True))
    assert [found.code for found in findings] == ["W0663"]
