"""Losses with parameters of their own, or numbers that their calls change, are found wherever the loss keeps them."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from typing import Any

import pytest
import torch
from helpers.paths import ROOT

from dslc.compiler.ir.program import LossStep, PythonFunction
from dslc.runtime.model.loss_state import LossStateError, try_state
from dslc.runtime.model.losses import loss_sum

_SPEC = importlib.util.spec_from_file_location("loss_state", ROOT / "tests" / "bad" / "traced" / "loss_state.py")
assert _SPEC is not None and _SPEC.loader is not None
losses: Any = importlib.util.module_from_spec(_SPEC)
sys.modules.setdefault("loss_state", losses)
_SPEC.loader.exec_module(losses)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 10, requires_grad=True).tanh(), torch.arange(4)


@pytest.mark.parametrize(
    ("name", "names", "moves"),
    [
        ("tempered", ["log_t"], False),
        ("by_a_global", ["_scale"], False),
        ("closed", ["weights.tasks.0", "weights.tasks.1"], False),
        ("method", ["log_t"], False),
        ("centred", ["center"], True),
        ("annealed", ["weight"], True),
        ("averaged", ["mean"], True),
        ("warmed", ["calls.0"], True),
        ("by_an_argument", ["scale"], False),
    ],
)
def test_state_is_found_by_name(name: str, names: list[str], moves: bool) -> None:
    for loss in (getattr(losses, name), partial(getattr(losses, name))):
        with pytest.raises(LossStateError) as error:
            try_state(loss, name, *batch(), is_repeated=True)
        assert list(error.value.names) == names and error.value.moves == moves


@pytest.mark.parametrize("name", ["remembered", "perceived"])
def test_what_no_later_loss_depends_on_is_no_state(name: str) -> None:
    assert try_state(getattr(losses, name), name, *batch(), is_repeated=True).shape == (4,)


@pytest.mark.parametrize(("counts", "together"), [("samples", 0), ("own", 0), ("samples", 1)])
def test_a_training_refuses_what_no_trial_saw(counts: Any, together: int) -> None:
    step = LossStep(kind="python", counts=counts, python=PythonFunction(function="loss_state:tempered"))
    loss = loss_sum(LossStep(**{**vars(step), "together": together}))
    with torch.no_grad():
        loss(*batch())
    with pytest.raises(LossStateError, match="`log_t`"):
        loss(*batch())
