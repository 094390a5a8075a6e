"""Synchronised batch normalisation on 2 and 4 real processes is one process on the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.gang import gang
from helpers.own_forward_passes import ScaledNorm
from torch import nn

from dslc.runtime.technique.batch_norm import _moments, synchronise

STEPS = 8
Arrays = dict[str, np.ndarray[Any, Any]]


def network(form: str) -> nn.Module:
    torch.manual_seed(0)
    if form == "dense":
        return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), nn.Linear(8, 3))
    if form == "derived":
        return nn.Sequential(nn.Linear(12, 8), ScaledNorm(8), nn.Tanh(), nn.Linear(8, 3))
    plain = form == "not affine"
    layers = [
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6, affine=not plain, track_running_stats=not plain),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3),
        nn.BatchNorm2d(4, eps=1e-3, momentum=0.3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 16, 3),
    ]
    model = nn.Sequential(*layers)
    if form == "channels last":
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    return model


def data(form: str, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    shape = (STEPS, samples, 12) if form in ("dense", "derived") else (STEPS, samples, 1, 6, 6)
    inputs = torch.randn(shape, generator=made) * 3 + 5
    # Unlike shares: the ranks' own statistics differ from those of the batch.
    inputs = inputs + torch.linspace(-4, 4, samples).view(1, samples, *[1] * (len(shape) - 2))
    return inputs, torch.randint(3, (STEPS, samples), generator=made)


def train(form: str, shares: list[int], rank: int | None) -> Arrays:
    """Returns losses, parameters and buffers after some steps, and the last step's gradient of the inputs."""
    model = network(form)
    if rank is not None:
        assert synchronise(model) == (1 if form in ("dense", "derived") else 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs, targets = data(form, sum(shares))
    mine = slice(0, sum(shares)) if rank is None else slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    losses, gradient = [], torch.empty(0)
    for step in range(STEPS):
        piece = inputs[step, mine].clone().requires_grad_()
        shown = piece.to(memory_format=torch.channels_last) if form == "channels last" else piece
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=form == "autocast"):
            total = F.cross_entropy(model(shown), targets[step, mine], reduction="sum")
        optimizer.zero_grad()
        (total / sum(shares)).backward()
        if rank is not None:
            dist.all_reduce(total.detach_())
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(total.detach() / sum(shares))
        gradient = piece.grad if piece.grad is not None else gradient
    model.eval()
    with torch.no_grad():
        evaluated = model(inputs[0, :2])
    found = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    return found | {"losses": torch.stack(losses).numpy(), "dx": gradient.numpy(), "evaluated": evaluated.numpy()}


def worker(rank: int, form: str, shares: list[int]) -> Arrays:
    return train(form, shares, rank)


@pytest.mark.parametrize(
    ("form", "shares"),
    [
        ("plain", [5, 5]),
        ("plain", [9, 2, 4, 1]),
        ("channels last", [6, 3]),
        ("not affine", [3, 5]),
        ("dense", [4, 1, 1, 2]),
        ("derived", [2, 3]),
        ("autocast", [5, 3]),
    ],
)
def test_ranks_together_are_one_process(form: str, shares: list[int]) -> None:
    whole = train(form, shares, None)
    ranks = gang(len(shares), worker, form, shares)
    tolerance = 5e-2 if form == "autocast" else 2e-6  # bfloat16 has steps of 1/32 at the largest of these numbers
    for name, expected in whole.items():
        if name == "dx":
            together = np.concatenate([rank["dx"] for rank in ranks])
            np.testing.assert_allclose(together, expected, atol=tolerance, err_msg=name)
        else:
            for rank in ranks:
                np.testing.assert_allclose(rank[name], expected, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_moments_of_sixteen_bits_are_not_rounded_to_them(dtype: torch.dtype) -> None:
    inputs = (torch.randn(16, 3, 5, 5, generator=torch.Generator().manual_seed(0)) + 3).to(dtype)
    found = torch.stack(_moments(inputs))
    variance, mean = torch.var_mean(inputs.double(), [0, 2, 3], correction=0)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), torch.stack([mean, variance]), rtol=1e-5, atol=1e-6)


def test_the_names_the_class_and_what_asks_not_to_be_synchronised_stay() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm1d(3), nn.LayerNorm(3))
    names, kept = list(model.state_dict()), model[0].weight
    setattr(model[1], "sync", False)  # noqa: B010
    assert synchronise(model) == 1
    assert list(model.state_dict()) == names and model[0].weight is kept
    assert isinstance(model[0], nn.BatchNorm2d) and type(model[1]) is nn.BatchNorm1d
    assert synchronise(model) == 1, "a second time changes nothing"
    assert type(model[0]).__mro__.count(nn.BatchNorm2d) == 1


def test_evaluation_needs_no_other_rank() -> None:
    torch.manual_seed(0)
    plain, ours = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    plain(torch.randn(9, 4))
    ours.load_state_dict(plain.state_dict())
    synchronise(ours)
    inputs = torch.randn(5, 4)
    assert torch.equal(ours.eval()(inputs), plain.eval()(inputs))
