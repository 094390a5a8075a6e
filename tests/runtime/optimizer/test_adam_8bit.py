"""Adam with moments in 8 bits takes torchao's steps, whatever the chunks of an update are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.made_programs import optimizer_step
from torch import nn

from dslc.runtime.loop.plain_loop import plain_optimizer
from dslc.runtime.optimizer import adam_8bit
from dslc.runtime.parallel.optimizers import build_optimizer


def trained(build: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 100), nn.Tanh(), nn.Linear(100, 3))
    optimizer = build(model)
    for piece in torch.randn(10, 8, 64):
        optimizer.zero_grad()
        model(piece).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("AdamW8bit", {"weight_decay": 0.1}), ("Adam8bit", {"betas": (0.8, 0.9), "weight_decay": 0.1})],
)
def test_ten_steps_are_those_of_torchao(kind: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam_8bit, "CODE_CHUNK", 2048)
    step = optimizer_step(kind, lr=0.01, **arguments)
    ours, theirs = trained(lambda m: build_optimizer(step, m)), trained(lambda m: plain_optimizer(step, m))
    plain = trained(lambda m: build_optimizer(replace(step, kind=kind.removesuffix("8bit")), m))
    for (name, value), expected, full in zip(
        ours.named_parameters(), theirs.parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6, msg=name)
        assert (value - full).abs().max() > 1e-5, "moments in 8 bits are others than in fp32"
