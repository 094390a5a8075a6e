"""Mixed precision on real processes: a step is taken by all ranks or by none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.gang import gang
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dslc.compiler.ir.program import PrecisionStep
from dslc.runtime.technique.precision import autocast, grad_scaler

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_run_in_the_dtype_of_the_step(dtype: Any) -> None:
    layer = nn.Linear(3, 2)
    with autocast(PrecisionStep(dtype=dtype), CPU):
        output = layer(torch.ones(1, 3))
    assert output.dtype == getattr(torch, dtype) and layer.weight.dtype == torch.float32
    assert layer(torch.ones(1, 3)).dtype == torch.float32, "and only inside"


def test_without_scaling_the_scaler_hands_through() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = grad_scaler(PrecisionStep(dtype="bfloat16"), CPU)
    scaler.scale(3 * parameter.sum()).backward()
    scaler.unscale_(optimizer)
    assert parameter.grad is not None and parameter.grad.item() == 3
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == -0.5


def scaled(rank: int, overflowing: int | None) -> list[float]:
    """One step over two ranks, where the gradient of one of them may overflow in float16; weights, scale, norm."""
    step = PrecisionStep(dtype="float16", scaled=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = grad_scaler(step, CPU)
    inputs = torch.full((1, 2), 6e4 if rank == overflowing else 1.0 + rank)
    with autocast(step, CPU):
        loss = model(inputs).float().sum() / 4  # times the scale, what float16 still holds
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    scaler.step(optimizer)
    scaler.update()
    return [*model.module.weight.detach().flatten().tolist(), scaler.get_scale(), norm.item()]


@pytest.mark.parametrize("overflowing", [None, 0, 1])
def test_all_ranks_take_the_step_or_none(overflowing: int | None) -> None:
    torch.manual_seed(0)
    before = nn.Linear(2, 1, bias=False).weight.detach().flatten()
    ranks = gang(2, scaled, overflowing)
    assert ranks[0] == pytest.approx(ranks[1], nan_ok=True)
    *weight, scale, norm = ranks[0]
    if overflowing is None:
        assert weight == pytest.approx((before - 0.01 * 0.375).tolist())
        assert (scale, norm) == pytest.approx((65536, 0.375 * 2**0.5))
    else:
        assert weight == before.tolist() and scale == 32768
