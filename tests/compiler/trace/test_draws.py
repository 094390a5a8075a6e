"""Tracing tells which random operations the runtime cannot give by sample."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.trace.draws import Draw, draw_at
from dslc.compiler.trace.trace_model import trace_model


class DrawRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            model = nn.Identity()
            self.draws.append(draw_at(sys._getframe(1), model, [model], func, args, kwargs or {}, result))
        return result


@pytest.mark.parametrize(
    ("draw", "fault"),
    [
        (lambda x: torch.randint(2, (4,), dtype=torch.bool), "`randint` draws integers as `torch.bool`"),
        (lambda x: torch.randint_like(x.bool(), 2), "`randint_like` draws integers as `torch.bool`"),
        (lambda x: torch.randint(-1, 2**53, (4,)), "`randint` draws integers of a range above 2**53"),
        (lambda x: torch.randint(0, 2**53, (4,)), ""),
        (lambda x: torch.randint_like(x.long(), 2, 9), ""),
        (lambda x: x.long().random_(3, None), "`random_` has no upper limit"),
        (lambda x: x.long().random_(2**54), "`random_` draws integers of a range above 2**53"),
        (lambda x: torch.normal(x + 0j, x), "`normal` of a complex mean draws in a kernel"),
        (lambda x: torch.normal(x, x), ""),
        (lambda x: torch.poisson(x), "`poisson` draws in a kernel"),
    ],
)
def test_what_the_runtime_leaves_to_torch_has_a_reason(draw: Callable[[Tensor], Tensor], fault: str) -> None:
    with DrawRecorder() as recorder:
        draw(torch.ones(4))
    (recorded,) = recorder.draws
    assert recorded.fault.startswith(fault) if fault else not recorded.fault


class Joining(nn.Module):
    """Drops rows of several orders, after what large networks do before."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8)), nn.Parameter(torch.zeros(8))
        self.heads = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.memory, self.drop = nn.LSTM(8, 8, batch_first=True), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), 1, -1), x], 1) + torch.ones(x.shape[0], 1, 1)
        x = x + self.heads(x, x, x)[0]
        x, _ = self.memory(x)
        x = self.drop(x.reshape(-1, 8)).view(x.shape).transpose(0, 1)
        return self.last(self.drop(x.reshape(-1, 8)).view(x.shape).transpose(0, 1))

    def last(self, x: Tensor) -> Tensor:
        return x


class FromShape(Joining):
    def last(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.reshape(-1, 8).shape).view(x.shape)


def test_following_the_samples_tells_the_order_of_joined_rows() -> None:
    told, partly = (
        trace_model(kind, TensorFact(shape=(3, 8, 8), dtype="float32")).network for kind in (Joining, FromShape)
    )
    assert told is not None and partly is not None
    assert {draw.module: (draw.rows, draw.outers) for draw in told.draw_dims} == {
        "heads": ((2,), ()),
        "drop": ((5, 5), (1, 5)),
    }
    assert told.doubtful_draw is None
    assert partly.doubtful_draw is not None and partly.doubtful_draw.module == ""
