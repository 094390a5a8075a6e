"""Layers that multiply in 8 bits, as a user's own code calls them."""

from __future__ import annotations

import torch
from torch import nn

from dslc.compiler.ir.steps import Float8Step, PrecisionStep
from dslc.runtime.technique import float8


def test_an_input_may_be_given_by_name() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    float8.apply(PrecisionStep(float8=Float8Step(emulated=True, layers=("0",))), model, torch.device("cpu"))
    rows = torch.rand(16, 32)
    assert torch.equal(model[0](input=rows), model[0](rows))
