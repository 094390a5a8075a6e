"""Losses of pairs train as a loop written by hand, with the reference computed once, on every plan that takes them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.commands import dslc
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, exchanges_as_planned, ready, train_in_parts, train_job
from safetensors.torch import save_file
from torch import Tensor, nn

from dslc.commands.new import TEMPLATES
from dslc.compiler.ir.steps import LossStep
from dslc.runtime.data.sources.open_sources import open_source
from dslc.runtime.loop.metrics import Metrics
from dslc.runtime.loop.plain_loop import mean_loss
from dslc.runtime.model import initial_weights
from dslc.runtime.model.losses import loss_sum, pair_losses
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.reference import read_table, write_table
from dslc.runtime.technique import frozen

STEPS = 6
JOB = """
model {
  network = llama(layers = 2, width = 32, heads = 4, hidden = 48, context = 96, vocab = 384)
  loss    = LOSS
}
data {
  source     = preferences("dpo/pairs.jsonl", tokenizer = "dpo/tokenizer")
  batch      = 8
  validation = 20%
}
devices { cpus = 1 }
train {
  steps     = 6
  optimizer = sgd(lr = 0.5, momentum = 0.9)
}
evaluate {
  every   = 3 steps
  metrics = [loss, reward_margin, reward_accuracy]
}
log { every = 1 step, tensorboard = false }
"""
ARGUMENTS: dict[str, dict[str, float]] = {
    "dpo": {"beta": 0.3},
    "ipo": {"beta": 0.5},
    "orpo": {"beta": 0.4},
    "simpo": {"beta": 2.0, "gamma": 0.5},
}


SUMMED = ("dpo(beta = 0.3)", "ipo(beta = 0.5)", "orpo(beta = 0.4)")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_job(folder: Path, loss: str = "dpo(beta = 0.3)") -> Path:
    folder.mkdir(exist_ok=True)
    shutil.copytree(TEMPLATES / "dpo", folder / "dpo")
    job = folder / "job.plt"
    job.write_text(JOB.replace("LOSS", loss))
    return job


# ------------------------------------------------------------------------------------------------- one loss of pairs


def sums_by_hand(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the log-probability of each row's answer."""
    rows = []
    for scores, row in zip(logits, targets, strict=True):
        chosen = [scores[n].log_softmax(-1)[token] for n, token in enumerate(row.tolist()) if token != -100]
        rows.append(torch.stack(chosen).sum())
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("referenced", [True, False])
def test_a_loss_is_its_formula(kind: str, referenced: bool) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 5, 7, dtype=torch.float64), torch.randint(7, (6, 5))
    targets[:, :2] = -100
    targets[1, 4] = -100
    reference = torch.randn(6, dtype=torch.float64)
    target = (targets, reference) if referenced else targets
    step = LossStep(kind=kind, arguments=ARGUMENTS[kind], ignore=-100)  # type: ignore[arg-type]
    expected = mean_loss(step)(logits, target)  # as the papers state it
    torch.testing.assert_close(loss_sum(step)(logits, target) / 3, expected)
    by_hand = sums_by_hand(logits, targets) - (reference if referenced else 0)
    if kind != "dpo":
        by_hand = by_hand / (targets != -100).sum(1)
    margins = ARGUMENTS[kind]["beta"] * (by_hand[::2] - by_hand[1::2])
    torch.testing.assert_close(pair_losses(step, logits, target).margins, margins)
    if kind == "dpo":
        torch.testing.assert_close(expected, -F.logsigmoid(margins).mean())


def test_metrics_of_pairs_count_pairs_and_compute_their_losses_once() -> None:
    from dslc.compiler.ir.program import MetricStep
    from dslc.runtime.model.losses import AnswerPieces

    summed = []

    def keep(sums: torch.Tensor) -> torch.Tensor:
        summed.append(sums)
        return sums

    torch.manual_seed(0)
    step = LossStep(kind="simpo", arguments=ARGUMENTS["simpo"], ignore=-100)
    pieces = AnswerPieces(ranks=1, sum=keep)
    names = ("loss", "reward_margin", "reward_accuracy")
    metrics = Metrics([MetricStep(kind=name, name=name) for name in names], step, pieces=pieces)  # type: ignore[arg-type]
    margins = []
    for pairs in (1, 3):
        logits, targets = torch.randn(2 * pairs, 5, 7), torch.randint(7, (2 * pairs, 5))
        metrics.update(logits, targets)
        margins += pair_losses(step, logits, targets).margins.tolist()
    assert len(summed) == 2  # one of each batch
    values = metrics.results()
    assert values["reward_margin"] == pytest.approx(np.mean(margins))
    assert values["reward_accuracy"] == np.mean([margin > 0 for margin in margins])
    assert values["loss"] == pytest.approx(np.mean(np.log1p(np.exp(0.5 - np.array(margins)))))


def test_the_odds_of_a_certain_answer_are_finite() -> None:
    step = LossStep(kind="orpo", arguments=ARGUMENTS["orpo"], ignore=-100)
    logits = torch.zeros(2, 1, 3)
    logits[0, 0, 1] = 1e4  # the chosen answer has the probability 1
    logits.requires_grad_()
    loss = loss_sum(step)(logits, torch.tensor([[1], [1]]))
    loss.backward()
    assert torch.isfinite(loss) and logits.grad is not None and torch.isfinite(logits.grad).all()


def test_a_damaged_reference_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, table = tmp_path / "reference.npz", torch.arange(6.0).view(3, 2)
    assert read_table(str(tmp_path)) is None and not capsys.readouterr().out
    write_table(str(file), {"pairs": "one"}, table)
    found = read_table(str(tmp_path))
    assert found is not None and torch.equal(found.table, table) and found.key == {"pairs": "one"}
    assert not capsys.readouterr().out
    whole = file.read_bytes()
    for damaged in (b"", b"PK", whole[: len(whole) // 2], b"text", whole.replace(b"NUMPY", b"numpy")):
        file.write_bytes(damaged)
        assert read_table(str(tmp_path)) is None
        assert "reference.npz cannot be read (" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reference.npz"]


# --------------------------------------------------------------------------------------------------- whole trainings


def losses_by_hand(
    job: Path, change: Callable[[nn.Module], nn.Module] = lambda model: model
) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the losses and the weights of a loop by hand: DPO with `beta = 0.3`. The reference is a model of its own,
    which begins alike, after a `change`.
    """
    program = ready(job).program
    samples = open_source(program.data).train
    model, reference = (build_model(program.model, torch.device("cpu")) for _ in range(2))
    for each in (model, reference):
        initial_weights.load(program.model, each)
        frozen.freeze(program.model, each)
    reference = change(reference)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5, momentum=0.9)
    losses = []
    for k in range(STEPS):
        inputs, targets = samples.batch(torch.arange(8 * k, 8 * k + 8))
        with torch.no_grad():
            base = sums_by_hand(reference(inputs), targets)
        lead = sums_by_hand(model(inputs), targets) - base
        loss = -F.logsigmoid(0.3 * (lead[::2] - lead[1::2])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def hold(trained: Trained, by_hand: tuple[list[float], dict[str, Tensor]]) -> None:
    losses, weights = by_hand
    np.testing.assert_allclose(trained.losses(), losses, rtol=0, atol=1e-5)
    for name, value in weights.items():
        np.testing.assert_allclose(trained.weights[name], value.numpy(), rtol=0, atol=1e-5)


PLANS = [
    "data.workers=1",
    "devices.cpus=2 parallelism.zero=2",
    "devices.cpus=4 parallelism.pipeline=2 parallelism.microbatches=2 parallelism.data_shares=measured",
    "devices.cpus=4 parallelism.tensor=2 parallelism.sequence=true parallelism.zero=3 model.loss.chunks=3",
    "devices.cpus=4 parallelism.context=2 parallelism.tensor=2 parallelism.microbatches=2",
    "devices.cpus=4 parallelism.context=2 parallelism.pipeline=2 parallelism.microbatches=2 model.loss.chunks=2",
]


@pytest.mark.slow
def test_two_ranks_that_shard_all_train_as_a_loop_by_hand(launcher: Launcher, tmp_path: Path) -> None:
    job = make_job(tmp_path)
    settings = ["data.shuffle=false", "devices.cpus=2", "parallelism.zero=3", "parallelism.microbatches=2"]
    trained = train_job(launcher, job, *settings)
    hold(trained, losses_by_hand(job))
    assert trained.records["validation", STEPS]["reward_accuracy"] > 0.9
    assert "reference: log-probabilities of 96 pairs" in trained.shown


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_plans_train_as_a_loop_by_hand(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    job = make_job(tmp_path)
    hold(train_job(launcher, job, "data.shuffle=false", *plan.split()), losses_by_hand(job))


@pytest.mark.parametrize("loss", ["simpo()", *(pytest.param(loss, marks=pytest.mark.slow) for loss in SUMMED)])
def test_pieces_of_answers_train_as_whole_answers(launcher: Launcher, tmp_path: Path, loss: str) -> None:
    """The learning rate keeps rounding from growing."""
    job, plan = make_job(tmp_path, loss), ("devices.cpus=4", "parallelism.context=2", "parallelism.zero=3")
    one, pieces = (train_job(launcher, job, "train.optimizer=sgd(lr = 0.05)", *each) for each in ((), plan))
    agree(one, pieces)
    assert one.records["validation", STEPS]["reward_margin"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo(beta = 0.3)", "simpo()"])
@pytest.mark.parametrize("axis", ["parallelism.tensor=2", "parallelism.pipeline=2"])
def test_exchanges_of_pieces_of_answers_are_planned(launcher: Launcher, tmp_path: Path, loss: str, axis: str) -> None:
    job = make_job(tmp_path, loss)
    settings = ["devices.cpus=4", "parallelism.context=2", "parallelism.microbatches=2", axis, "evaluate.every=none"]
    exchanges_as_planned(launcher, tmp_path, job, *settings)


@pytest.mark.slow
def test_a_training_that_resumes_takes_the_reference_of_its_beginning(launcher: Launcher, tmp_path: Path) -> None:
    job = make_job(tmp_path)
    one = train_job(launcher, job)
    (tmp_path / "parts").mkdir()
    two = train_in_parts(launcher, tmp_path / "parts", job, (3, ()), (STEPS, ("devices.cpus=2", "parallelism.zero=3")))
    agree(one, two)
    assert "log-probabilities of" in one.shown and "log-probabilities of" not in two.shown


# A network whose rank 1 kills itself once, in the n-th forward pass of an evaluation: the first are the reference's.
KILLED = """
import os
import signal
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, folder, passes):
        super().__init__()
        self.mark, self.passes = Path(folder) / "killed", passes
        self.embedding, self.head = nn.Embedding(384, 16), nn.Linear(16, 384)

    def forward(self, tokens):
        if not torch.is_grad_enabled() and os.environ.get("RANK") == "1" and not self.mark.exists():
            self.passes -= 1
            if self.passes == 0:
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        hidden = self.embedding(tokens)
        return self.head(hidden.cumsum(1) / 8)
"""


@pytest.mark.parametrize(
    ("passes", "found"),
    [(2, "from the first step"), pytest.param(9, "from the checkpoint of step 3", marks=pytest.mark.slow)],
)
def test_a_rank_that_is_killed_changes_no_loss(launcher: Launcher, tmp_path: Path, passes: int, found: str) -> None:
    """Once while the reference is computed, and once in the training, after an evaluation."""
    job = make_job(tmp_path)
    network = JOB[JOB.index("llama(") : JOB.index("\n  loss")]
    own = f'python("own_net:Net", folder = "{tmp_path}", passes = {passes})'
    text = job.read_text().replace(network, own).replace('"dpo/tokenizer")', '"dpo/tokenizer", max_length = 96)')
    job.write_text(text + "checkpoint { every = 3 steps, asynchronous = false }\nlaunch { restarts = 1 }\n")
    (tmp_path / "own_net.py").write_text(KILLED)
    killed = train_job(launcher, job, "devices.cpus=2")
    assert (tmp_path / "killed").exists() and f"restart 1 of 1, {found}" in killed.shown
    whole = train_job(launcher, job)  # the mark is there: nothing kills it
    agree(whole, killed)
    assert killed.shown.count("reference: log-probabilities of") == 1


@pytest.mark.slow
def test_a_training_goes_on_with_its_own_reference_alone(launcher: Launcher, tmp_path: Path) -> None:
    """Files of weights that were copied give the same numbers; other weights are refused until the file is deleted."""
    job, run = make_job(tmp_path), tmp_path / "run"
    job.write_text(job.read_text().replace("\n  loss", '\n  weights = "start.safetensors"\n  loss'))
    program = ready(job, "model.weights=none").program
    start, other = (build_model(dataclasses.replace(program.model, seed=n), torch.device("cpu")) for n in (0, 1))
    save_file(start.state_dict(), tmp_path / "start.safetensors")
    run.mkdir()
    train_in_parts(launcher, run, job, (2, ()))
    stored = read_table(str(run))
    (tmp_path / "start.safetensors").touch()
    found = train_in_parts(launcher, run, job, (3, ("devices.cpus=2",)))
    assert "whose weights give the same numbers" in found.shown
    kept = read_table(str(run))
    assert stored is not None and kept is not None and torch.equal(stored.table, kept.table)
    save_file(other.state_dict(), tmp_path / "start.safetensors")
    made = ready(job, "checkpoint.every=100 steps", "checkpoint.resume=auto")
    outcome, _ = launcher.launch(made.program, made.places, run)
    assert outcome is not None and outcome.failure is not None
    assert "the training began with another reference: weights changed since, and the" in outcome.failure.message
    (run / "reference.npz").unlink()
    found = train_in_parts(launcher, run, job, (STEPS, ()))
    assert "there is no reference.npz: the reference is that of the weights of this start" in found.shown


LLAMA = """transformers(
    "llama", num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2, hidden_size = 32,
    intermediate_size = 48, vocab_size = 384, max_position_embeddings = 96,
  )
  weights = "start.safetensors"
  adapter = lora(rank = 2, targets = ["q_proj", "up_proj"])"""


@pytest.mark.slow
def test_the_reference_is_the_network_without_its_adapter(launcher: Launcher, tmp_path: Path) -> None:
    """The adapter begins with numbers of its own, which the reference has not."""
    job = make_job(tmp_path, "dpo(beta = 0.3, reference = adapter_off)")
    text = job.read_text()
    network = text[text.index("llama(") : text.index("\n  loss")]
    job.write_text(text.replace(network, LLAMA).replace('"dpo/tokenizer")', '"dpo/tokenizer", max_length = 96)'))
    start = build_model(ready(job, "model.weights=none").program.model, torch.device("cpu"))
    torch.manual_seed(0)
    for name, parameter in start.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    save_file({name: value.contiguous() for name, value in start.state_dict().items()}, tmp_path / "start.safetensors")
    settings = ["data.shuffle=false", "devices.cpus=2", "parallelism.zero=3"]
    trained = train_job(launcher, job, *settings)

    def without_adapter(model: torch.nn.Module) -> torch.nn.Module:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.zeros_(parameter)
        return model

    hold(trained, losses_by_hand(job, without_adapter))
    run = dslc("verify", job, "--steps", "3", "--set", "data.shuffle=false", cwd=job.parent)
    assert run.returncode == 0 and "the plan trains as one process does" in run.stdout, run.stdout + run.stderr


@pytest.mark.slow
def test_other_weights_are_the_reference_and_do_not_train(launcher: Launcher, tmp_path: Path) -> None:
    job = make_job(tmp_path, 'dpo(beta = 0.3, reference = "other.safetensors")')
    program = ready(job.parent / "job.plt", "model.loss=dpo()").program
    other = build_model(dataclasses.replace(program.model, seed=1), torch.device("cpu"))
    save_file({name: value.contiguous() for name, value in other.state_dict().items()}, tmp_path / "other.safetensors")
    trained = train_job(launcher, job, "data.shuffle=false", "devices.cpus=2", "parallelism.zero=2")
    hold(trained, losses_by_hand(job, lambda model: other))
