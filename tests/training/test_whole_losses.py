"""Losses that compare samples train as the formula says, written here by itself, on any ranks and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.own_comparisons import Net, data, each, spread
from helpers.trained import Trained, agree, ready, train_job, train_on_nodes, write_job_with_helper
from torch import Tensor

from dslc.runtime.process.failure import describe

JOB = job_text(
    model={"network": 'python("own_comparisons:NETWORK")', "loss": "LOSS"},
    data={"source": 'python("own_comparisons:data")', "batch": 12, "shuffle": "false", "last_batch": "keep"},
    train={"steps": 6, "optimizer": "sgd(lr = 0.2, momentum = 0.9)"},
)
BATCH, TEMPERATURE = 12, 0.3
CONTRASTIVE = f"contrastive(over = all, temperature = {TEMPERATURE})"
Loss = Callable[[Tensor, Tensor], Tensor]


def job(folder: Path, loss: str = CONTRASTIVE, network: str = "Net") -> Path:
    return write_job_with_helper("own_comparisons.py", folder, JOB.replace("LOSS", loss).replace("NETWORK", network))


# ------------------------------------------------------------------------------------------ the losses, by the formula


def by_formula(embeddings: Tensor, classes: Tensor) -> Tensor:
    """Returns the mean loss of a batch, anchor by anchor: of embeddings (samples, width) or (samples, views, width)."""
    views = embeddings.shape[1] if embeddings.dim() == 3 else 1
    flat = embeddings.reshape(-1, embeddings.shape[-1])
    group = list(range(len(classes))) if views > 1 else classes.tolist()
    unit = [z / z.norm() if float(z.detach().norm()) else z * 0 for z in flat]
    total = flat.sum() * 0
    for i, anchor in enumerate(unit):
        others = [j for j in range(len(unit)) if j != i]
        positives = [j for j in others if group[j // views] == group[i // views]]
        if not positives:
            continue
        everything = sum((torch.exp(anchor @ unit[a] / TEMPERATURE) for a in others), torch.zeros(()))
        for p in positives:
            one = torch.exp(anchor @ unit[p] / TEMPERATURE)
            total = total - torch.log(one / everything) / len(positives)
    return total / len(unit)


def by_node(loss: Loss) -> Loss:
    """Returns the mean loss where each of two nodes of two ranks compares what it has itself, and may have nothing."""

    def together(outputs: Tensor, targets: Tensor) -> Tensor:
        each, larger = divmod(len(outputs), 4)
        first = sum(each + (rank < larger) for rank in (0, 1))
        parts = ((outputs[:first], targets[:first]), (outputs[first:], targets[first:]))
        return sum((loss(o, t) * len(o) for o, t in parts if len(o)), torch.zeros(())) / len(outputs)

    return together


@cache
def reference(loss: Loss, views: int = 1, still: float = 1e9) -> tuple[list[float], float, dict[str, np.ndarray]]:
    """Returns the losses, the loss of the validation split and the weights of a plain loop over whole batches."""
    net = Net(views, still)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    train, held = (set_.tensors for set_ in data())
    losses: list[float] = []
    for _ in range(2):
        for start in range(0, len(train[0]), BATCH):
            x, y = (tensor[start : start + BATCH] for tensor in train)
            optimizer.zero_grad()
            found = loss(net(x), y)
            found.backward()
            optimizer.step()
            losses.append(found.item())
    with torch.no_grad():
        parts = [tuple(tensor[start : start + BATCH] for tensor in held) for start in range(0, len(held[0]), BATCH)]
        total = sum(loss(net(x), y).item() * len(x) for x, y in parts)
    weights = {name: tensor.detach().numpy() for name, tensor in net.named_parameters()}
    return losses, total / len(held[0]), weights


def is_as(found: Trained, wanted: tuple[list[float], float, dict[str, np.ndarray]]) -> None:
    losses, validation, weights = wanted
    np.testing.assert_allclose(found.losses(), losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.losses("validation"), [validation], rtol=0, atol=1e-5)
    assert found.weights.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_allclose(found.weights[name], value, rtol=0, atol=1e-5, err_msg=name)


PLANS = [
    "",
    "devices.cpus=2",
    "parallelism.microbatches=4",
    "devices.cpus=4 parallelism.zero=1 parallelism.microbatches=3",
    "devices.cpus=2 parallelism.zero=2 parallelism.microbatches=3",
    "devices.cpus=4 parallelism.zero=3 parallelism.microbatches=3",
]
MORE = [
    "devices.cpus=4",
    "devices.cpus=2 parallelism.microbatches=3",
    "devices.cpus=2 parallelism.zero=1",
    "devices.cpus=2 parallelism.zero=2",
    "devices.cpus=2 parallelism.zero=3",
    "devices.cpus=4 parallelism.zero=3 parallelism.replicas=2 parallelism.microbatches=3",
    "devices.cpus=2 parallelism.zero=3 parallelism.microbatches=2",
    "devices.cpus=2 data.workers=1 parallelism.zero=3",
]


@pytest.mark.parametrize("plan", PLANS)
def test_classes(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    is_as(train_job(launcher, job(tmp_path), *plan.split()), reference(by_formula))


@pytest.mark.long
@pytest.mark.parametrize("plan", MORE)
def test_classes_under_more_plans(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    test_classes(launcher, tmp_path, plan)


@pytest.mark.parametrize("network", ["Net, views = 2", "Net, views = 3", "Pair"])
@pytest.mark.parametrize("plan", ["devices.cpus=2", "devices.cpus=2 parallelism.microbatches=2 parallelism.zero=3"])
def test_views(launcher: Launcher, tmp_path: Path, network: str, plan: str) -> None:
    called = network.replace("Net,", 'Net",').replace("Pair", 'Pair"')
    text = JOB.replace("LOSS", CONTRASTIVE).replace('NETWORK")', f"{called})")
    found = train_job(launcher, write_job_with_helper("own_comparisons.py", tmp_path, text), *plan.split())
    is_as(found, reference(by_formula, views=3 if "3" in network else 2))


@pytest.mark.parametrize("name, loss", [("spread", spread), ("each", lambda o, t: each(o, t).mean())])
@pytest.mark.parametrize(
    "plan",
    ["", "devices.cpus=4", "devices.cpus=2 parallelism.microbatches=3", "devices.cpus=2 parallelism.zero=3"],
)
def test_a_loss_of_ones_own(launcher: Launcher, tmp_path: Path, name: str, loss: Loss, plan: str) -> None:
    made = job(tmp_path, f'python("own_comparisons:{name}", over = all)')
    is_as(train_job(launcher, made, *plan.split()), reference(loss))


def test_a_loss_of_ones_own_of_several_tensors(launcher: Launcher, tmp_path: Path) -> None:
    made = job(tmp_path, 'python("own_comparisons:of_pair", over = all)', "Pair")
    slow = "train.optimizer.lr=0.01"
    one = train_job(launcher, made, slow)
    agree(one, train_job(launcher, made, slow, "devices.cpus=2"))
    agree(one, train_job(launcher, made, slow, "devices.cpus=2", "parallelism.microbatches=3"))


@pytest.mark.parametrize("own", [False, True])
def test_over_nodes(launcher: Launcher, tmp_path: Path, own: bool) -> None:
    """Each of two nodes of two ranks compares what it has."""
    loss = 'python("own_comparisons:spread", over = node)' if own else CONTRASTIVE.replace("all", "node")
    made = job(tmp_path, loss)
    wanted = by_node(spread if own else by_formula)
    nodes = ("devices.nodes=2", "devices.cpus=2")
    is_as(train_on_nodes(launcher, made, tmp_path / "nodes", *nodes), reference(wanted))
    pieces = ("parallelism.microbatches=3", "parallelism.zero=3")
    is_as(train_on_nodes(launcher, made, tmp_path / "pieces", *nodes, *pieces), reference(wanted))
    is_as(train_job(launcher, made, "devices.cpus=4"), reference(spread if own else by_formula))


def test_along_a_tensor_axis(launcher: Launcher, tmp_path: Path) -> None:
    text = JOB.replace('python("own_comparisons:NETWORK")', "vit(layers = 1, width = 8, heads = 2, patch = 4)")
    text = text.replace('python("own_comparisons:data")', "digits()").replace("LOSS", CONTRASTIVE)
    path = tmp_path / "job.plt"
    path.write_text(text)
    one = train_job(launcher, path, "devices.cpus=1")
    axes = ("devices.cpus=4", "parallelism.tensor=2")
    agree(one, train_job(launcher, path, *axes))
    agree(one, train_job(launcher, path, *axes, "parallelism.microbatches=3", "parallelism.zero=3"))


def test_embeddings_of_length_0(launcher: Launcher, tmp_path: Path) -> None:
    text = JOB.replace("LOSS", CONTRASTIVE).replace('NETWORK")', 'Net", still = 0.3)')
    found = train_job(launcher, write_job_with_helper("own_comparisons.py", tmp_path, text), "devices.cpus=2")
    is_as(found, reference(by_formula, still=0.3))
    assert all(math.isfinite(loss) for loss in found.losses())


def test_noise_is_the_same_in_both_passes_and_statistics_are_updated_once(launcher: Launcher, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    text = JOB.replace("LOSS", CONTRASTIVE).replace('NETWORK")', f'Noisy", file = "{seen}")')
    made = write_job_with_helper("own_comparisons.py", tmp_path, text)
    ready(made, "parallelism.microbatches=3")  # traces it, which runs it on no numbers
    seen.unlink(missing_ok=True)
    found = train_job(launcher, made, "parallelism.microbatches=3", "data.last_batch=drop")
    told = seen.read_text().split()[-36:]
    steps = [told[n : n + 6] for n in range(0, len(told), 6)]
    assert len(steps) == 6 and all(step[:3] == step[3:] and len(set(step)) == 3 for step in steps)
    assert len(set(told)) == 18
    assert found.weights["norm.num_batches_tracked"] == 18


def test_what_a_loss_of_ones_own_has_to_give(tmp_path: Path) -> None:
    made = job(tmp_path, 'python("own_comparisons:neither", over = all)')
    with pytest.raises(AssertionError, match="is given a whole batch"):
        ready(made)


@pytest.mark.parametrize("plan", ["devices.cpus=2", "parallelism.microbatches=3"])
def test_a_number_that_is_not_finite_ends_the_training(launcher: Launcher, tmp_path: Path, plan: str) -> None:
    text = JOB.replace("LOSS", CONTRASTIVE).replace("NETWORK", "Net").replace("comparisons:data", "comparisons:broken")
    made = ready(write_job_with_helper("own_comparisons.py", tmp_path, text), plan)
    outcome, shown = launcher.launch(made.program, made.places, tmp_path / "run")
    assert outcome is not None and outcome.failure is not None, shown
    told = describe(outcome)
    assert "step 2" in told and "nan" in told and "sample 20" in told, told
