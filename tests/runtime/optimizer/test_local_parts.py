"""An optimizer over a rank's parts of parameters updates them as one process updates the whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from helpers.gang import gang
from helpers.made_programs import optimizer_step
from torch import Tensor, nn

from dslc.runtime.parallel.optimizers import build_optimizer

RANKS = 2
FACTORS = (1.0, 0.5, 0.1, 2.0)  # of the rate, in each step
CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"weight_decay": 0.02, "amsgrad": True}),
    ("AdamW", {"betas": (0.9, 0.95)}),
    ("Adagrad", {"lr_decay": 0.01}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("NAdam", {"weight_decay": 0.1}),
    ("Lion", {"weight_decay": 0.1}),
]


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 1), nn.Linear(2, 1))


def shares(whole: nn.Module) -> nn.Module:
    """Returns the model with its parameters cut over the ranks in every way, but for the last layer's, which are plain.
    Of the one row of the layer before, a rank has nothing.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, plane = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (1, RANKS))
    places: dict[str, Any] = {"1.weight": [Shard(1)], "1.bias": [Replicate()]}
    for name, parameter in list(whole.named_parameters()):
        owner, _, last = name.rpartition(".")
        if owner != "4":
            rows = distribute_tensor(parameter.detach(), mesh, places.get(name, [Shard(0)]))
            if owner == "2":
                rows = distribute_tensor(parameter.detach(), plane, [Replicate(), Shard(0)])
            setattr(whole.get_submodule(owner), last, nn.Parameter(rows))
    return whole


def whole_of(tensor: Any) -> Tensor:
    whole: Tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
    return whole


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Takes steps with gradients that are the same on every rank, and for the whole model."""
    from torch.distributed.tensor import distribute_tensor

    for n in steps:
        torch.manual_seed(n)
        parameters: Iterable[Any] = model.parameters()
        for parameter in parameters:
            gradient = torch.randn(parameter.shape)
            if hasattr(parameter, "placements"):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = FACTORS[n] * group["initial_lr"]
        optimizer.step()


def differences(rank: int) -> list[str]:
    found = list[str]()
    for kind, arguments in CASES:
        step = optimizer_step(kind, lr=0.02, no_decay=("*.bias",), **arguments)
        plain, model = layers(), shares(layers())
        expected, first, second = (
            build_optimizer(step, plain),
            build_optimizer(step, model),
            build_optimizer(step, model),
        )
        take_steps(plain, expected, range(4))
        take_steps(model, first, range(2))
        for parameter, state in first.state.items():
            second.state[parameter] = dict(state)  # as a checkpoint that is loaded
        take_steps(model, second, range(2, 4))
        for (name, one), (_, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            pairs = {"": (one, other)} | {
                state: (value, second.state[other][state])
                for state, value in expected.state.get(one, {}).items()
                if isinstance(value, Tensor)
            }
            for state, (value, rows) in pairs.items():
                cut = value.shape == one.shape
                laid_out = getattr(rows, "placements", None) == (getattr(other, "placements", None) if cut else None)
                if not laid_out or not torch.allclose(value, whole_of(rows), rtol=0, atol=1e-6):
                    found.append(f"{kind}: {name} {state} differs on rank {rank}")
    return found


def test_parts_are_updated_as_the_whole() -> None:
    """Every rate, decay and state; the second half of the steps goes on with the state of the first."""
    assert gang(RANKS, differences) == [[], []]
