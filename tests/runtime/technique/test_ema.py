"""The average of the weights is that of torch's own class, step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dslc.compiler.ir.program import AverageStep
from dslc.runtime.technique.ema import Average


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    made[0].bias.requires_grad = False
    return made


def moved(made: nn.Module) -> None:
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))


def named(parameters: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in parameters.named_parameters()}


@pytest.mark.parametrize("every", [1, 3])
def test_the_average_is_torchs(every: int) -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    average = Average(AverageStep(decay=0.9, every=every), made, optimizer)
    torchs = AveragedModel(made, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    assert "0.bias" not in average.tensors and len(average.tensors) == 5
    for step in range(1, 8):
        moved(made)
        average.update(step)
        if step % every == 0:
            torchs.update_parameters(made)
        expected = named(torchs.module)
        torch.testing.assert_close(average.tensors, {name: expected[name] for name in average.tensors}, rtol=0, atol=0)
    weights = named(made)
    with average.in_place():
        expected = named(torchs.module) | {"0.bias": weights["0.bias"]}
        torch.testing.assert_close(named(made), expected, rtol=0, atol=0)
        torch.testing.assert_close(average.tensors, {name: weights[name] for name in average.tensors})
    torch.testing.assert_close(named(made), weights, rtol=0, atol=0)


def test_the_first_decays_of_a_warm_up_are_smaller() -> None:
    made = nn.Linear(1, 1, bias=False)
    average = Average(AverageStep(decay=0.25, warmup=True), made, torch.optim.SGD(made.parameters(), lr=0.1))
    expected = 0.0
    for step in range(1, 7):
        nn.init.constant_(made.weight, step)
        average.update(step)
        n = step - 1
        decay = min(0.25, (1 + n) / (10 + n)) if n else 0.0
        expected = decay * expected + (1 - decay) * step
        assert average.tensors["weight"].item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("beta", "after", "every", "power", "gamma", "least"),
    [(0.9, 0, 1, 2 / 3, 1.0, 0.0), (0.6, 4, 1, 1.0, 2.0, 0.3), (0.99, 3, 2, 0.75, 1.0, 0.0)],
)
def test_the_warm_up_of_ema_pytorch(
    beta: float, after: int, every: int, power: float, gamma: float, least: float
) -> None:
    """Against the definition of `ema_pytorch.EMA`, which counts its calls of `update` from 0."""
    made = nn.Linear(2, 1, bias=False)
    how = AverageStep(decay=beta, after=after, every=every, power=power, inv_gamma=gamma, min_decay=least)
    average = Average(how, made, torch.optim.SGD(made.parameters(), lr=0.1))
    theirs = torch.zeros_like(made.weight)
    for step in range(1, 12):
        with torch.no_grad():
            made.weight.normal_()
        average.update(step)
        if step % every:
            continue
        epoch = max(step - 1 - after, 0)
        decay = min(max(1 - (1 + epoch / gamma) ** -power, least), beta) if epoch else 0.0
        theirs = made.weight.detach().clone() if step == every else theirs.lerp(made.weight.detach(), 1 - decay)
        assert torch.allclose(average.tensors["weight"], theirs), step
