"""Optimizers of torch over this rank's parts of parameters, for those that cannot work on DTensors (torch 2.13).

Model: of a DTensor the inner optimizers get the rank's part, a plain tensor with the same memory; of another parameter,
the parameter itself. State is kept by parameter. Options of groups, which the schedule sets, go to the inner groups in
each step.

Limits: the compiler lets a rank hold no less than a whole parameter where the update needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dslc.compiler.trace.private_torch import is_distributed, local_part
from dslc.runtime.technique import dynamo

Options = dict[str, Any]


class LocalParts(torch.optim.Optimizer):
    """Runs an optimizer for each group; `inner` makes it from the group's options, with parts for parameters."""

    def __init__(
        self, groups: list[Options], options: Options, inner: Callable[[Options], torch.optim.Optimizer]
    ) -> None:
        super().__init__(groups, options)
        self._pairs = [[(parameter, _part(parameter)) for parameter in group["params"]] for group in self.param_groups]
        self._inner = [
            inner({**group, "params": [part for _, part in pairs]})
            for group, pairs in zip(self.param_groups, self._pairs, strict=True)
        ]
        self._steps = [dynamo.plain_step(inner_optimizer) for inner_optimizer in self._inner]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group, pairs, inner, step in zip(self.param_groups, self._pairs, self._inner, self._steps, strict=True):
            inner.param_groups[0] |= {name: group[name] for name in ("lr", "weight_decay")}
            for parameter, part in pairs:
                if parameter is not part:
                    part.data = local_part(parameter).detach()  # `fully_shard` may have moved it
                    part.grad = None if parameter.grad is None else local_part(parameter.grad).detach()
                if parameter in self.state:
                    inner.state[part] = self.state[parameter]
            step()
            for parameter, part in pairs:
                if part in inner.state:
                    self.state[parameter] = inner.state[part]
                if parameter is not part:
                    part.grad = None


def _part(parameter: Tensor) -> Tensor:
    return nn.Parameter(local_part(parameter).detach()) if is_distributed(parameter) else parameter


def empty_by_rows(parameter: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor without numbers that is cut over the ranks as the parameter is."""
    if not is_distributed(parameter):
        return torch.empty(tuple(shape), dtype=dtype, device=parameter.device)
    from torch.distributed.tensor import DTensor, empty

    assert isinstance(parameter, DTensor)
    rows: Tensor = empty(tuple(shape), dtype=dtype, device_mesh=parameter.device_mesh, placements=parameter.placements)
    return rows.to(parameter.device)
