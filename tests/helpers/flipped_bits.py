"""A job's network and data that flip one bit of a number in one step, on one rank or on all, as `DSLC_FLIP` says.

`DSLC_FLIP` is JSON: kind, step, parameter, element, bit, rank (-1: all), and the folder in which each rank that flips
writes by how much it changed a number (`Effect`).
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = Literal["parameter", "gradient", "exp_avg", "exp_avg_sq"]
_PATTERNS = {4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Flip:
    kind: Kind
    step: int  # from 1
    parameter: str
    element: int
    bit: int
    rank: int  # -1: all
    folder: str


@dataclass(frozen=True, kw_only=True)
class Effect:
    """By how much a flip changed a number of the parameter or of its gradient on a rank."""

    rank: int
    change: float


class FlippedNetwork(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.activation = nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh()
        self.last = nn.Linear(12, 3)


def data() -> torch.utils.data.Dataset[tuple[Tensor, ...]]:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 6, generator=random)
    return torch.utils.data.TensorDataset(inputs, torch.randint(3, (96,), generator=random))


def net() -> FlippedNetwork:
    network = FlippedNetwork()
    text = os.environ.get("DSLC_FLIP", "")
    rank = int(os.environ.get("RANK", "-1"))
    if text and rank >= 0:
        flip = Flip(**json.loads(text))
        if flip.rank in (-1, rank):
            _plant(network, flip, rank)
    return network


def flip_bit(tensor: Tensor, element: int, bit: int) -> float:
    """Flips one bit of a number, in place. Returns by how much the number changed."""
    flat = tensor.detach().view(-1)[element : element + 1]
    before = flat.double()
    flat.view(_PATTERNS[flat.element_size()]).bitwise_xor_(torch.tensor(1 << bit).to(_PATTERNS[flat.element_size()]))
    return float((flat.double() - before)[0])


def _plant(network: nn.Module, flip: Flip, rank: int) -> None:
    parameter = network.get_parameter(flip.parameter)

    def note(change: float) -> None:
        effect = Effect(rank=rank, change=change)
        (Path(flip.folder) / f"effect-{rank}.json").write_text(json.dumps(asdict(effect)))

    if flip.kind == "gradient":
        steps = count(1)

        def change_gradient(gradient: Tensor) -> Tensor:
            if next(steps) == flip.step:
                gradient = gradient.clone()
                note(flip_bit(gradient, flip.element, flip.bit))
            return gradient

        parameter.register_hook(change_gradient)
        return
    _wrap_step(parameter, flip, note)


def _wrap_step(parameter: Tensor, flip: Flip, note: Callable[[float], None]) -> None:
    """Flips a number of the parameter after the update of the step, or of its state before it."""
    function: Any = torch.optim.AdamW.step
    steps = count(1)

    def step(optimizer: torch.optim.AdamW, *args: Any) -> Any:
        is_due = next(steps) == flip.step
        if not is_due:
            return function(optimizer, *args)
        if flip.kind == "parameter":
            result = function(optimizer, *args)
            note(flip_bit(parameter, flip.element, flip.bit))
            return result
        undisturbed = _updated(function, optimizer, parameter)
        flip_bit(optimizer.state[parameter][flip.kind], flip.element, flip.bit)
        result = function(optimizer, *args)
        note(float((parameter.detach().double() - undisturbed).view(-1)[flip.element]))
        return result

    torch.optim.AdamW.step = step  # type: ignore[assignment, method-assign]


def _updated(function: Any, optimizer: torch.optim.AdamW, parameter: Tensor) -> Tensor:
    """Returns what the update makes of the parameter, without doing it."""
    (group,) = (group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
    twin = parameter.detach().clone().requires_grad_()
    twin.grad = None if parameter.grad is None else parameter.grad.clone()
    other = torch.optim.AdamW([twin])
    other.param_groups[0].update({name: value for name, value in group.items() if name != "params"})
    other.state[twin] = copy.deepcopy(optimizer.state[parameter])
    function(other)
    return twin.detach().double()


def is_finite(effects: list[Effect]) -> bool:
    return all(math.isfinite(effect.change) for effect in effects)
