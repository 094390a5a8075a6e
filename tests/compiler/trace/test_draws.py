"""Tracing tells which random operations the runtime cannot give by sample."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dslc.compiler.trace.draws import Draw, draw_at


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
