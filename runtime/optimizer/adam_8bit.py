"""Adam and AdamW with moments in 8 bits: torchao's update and codes (Dettmers et al. 2021, arXiv:2110.02861).

Model: as in torchao, a moment is a byte for each number and a scale for each block of 256 numbers in a row. This
holds for parameters of at least 4,096 numbers, a multiple of 256; other moments have the parameter's precision. Unlike
torchao, which decides by a rank's part, the whole parameter decides, and all parameters share the tables of values.

Contract: blocks of a rank's rows are blocks of the whole; the compiler refuses plans where they are not. An update
runs over `CODE_CHUNK` numbers at a time, so that its temporary tensors, many in torchao's code, stay small.

Limits: torchao compiles its update with `torch.compile`; here it runs without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dslc.compiler.trace.private_torch import local_part
from dslc.dsl.language.optimizers import BLOCK, CODE_CHUNK, keeps_codes
from dslc.runtime.optimizer.local_parts import empty_by_rows

MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))  # the name of each; true: with a sign
SCALE = "_scale"  # ends the name of the scales of a moment


class Adam8bit(torch.optim.Optimizer):
    """Adam whose moments are codes; AdamW with `decoupled`."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool,
        amsgrad: bool = False,
    ) -> None:
        assert not amsgrad, "torchao compares no codes"
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._decoupled = decoupled

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter)

    def _update(self, group: dict[str, Any], parameter: Tensor) -> None:
        from torchao.optim.adam import single_param_adam

        state = self.state[parameter]
        if not state:
            state |= _empty_state(parameter)
        state["step"] += 1
        part = local_part(parameter)
        value, gradient = part.contiguous(), local_part(parameter.grad).contiguous()  # type: ignore[arg-type]
        rate = torch.tensor(group["lr"], dtype=torch.float32, device=part.device)
        for chunk in _chunks(value.numel()):
            moments = [_moment(state, name, chunk, signed) for name, signed in MOMENTS]
            single_param_adam(
                value.view(-1)[chunk],
                gradient.view(-1)[chunk],
                state["step"],
                *moments,
                None,
                rate,
                *group["betas"],
                group["weight_decay"],
                group["eps"],
                self._decoupled,
                False,
            )
        if value is not part:
            part.copy_(value)


def _chunks(numbers: int) -> Iterator[slice]:
    for start in range(0, numbers, CODE_CHUNK):
        yield slice(start, min(start + CODE_CHUNK, numbers))


def _empty_state(parameter: Tensor) -> dict[str, Tensor]:
    state = {"step": torch.tensor(0.0)}
    shape = tuple(parameter.shape)
    for name, _ in MOMENTS:
        if not keeps_codes(shape):
            state[name] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            continue
        state[name] = torch.zeros_like(parameter, dtype=torch.uint8, memory_format=torch.contiguous_format)
        state[name + SCALE] = empty_by_rows(parameter, scale_shape(shape), torch.float32).zero_()
    return state


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the scales: by rows where a row has whole blocks, so that they are cut as the rows are."""
    numbers = torch.Size(shape).numel()
    row = numbers // shape[0]
    return (shape[0], row // BLOCK) if row % BLOCK == 0 else (numbers // BLOCK,)


def _moment(state: dict[str, Tensor], name: str, chunk: slice, signed: bool) -> Tensor:
    """Returns the numbers of a moment, or its codes with their scales, which torchao's update writes in place."""
    numbers = local_part(state[name]).view(-1)[chunk]
    if name + SCALE not in state:
        return numbers
    from torchao.optim.subclass_8bit import OptimState8bit

    scales = local_part(state[name + SCALE]).view(-1)[chunk.start // BLOCK : chunk.stop // BLOCK]
    codes: Tensor = OptimState8bit(numbers, scales, _values(signed, numbers.device), signed, dtype=torch.float32)
    return codes


@cache
def _values(signed: bool, device: torch.device) -> Tensor:
    """Returns the 256 values that codes stand for."""
    from torchao.optim.quant_utils import create_dynamic_map

    return torch.tensor(create_dynamic_map(signed=signed), dtype=torch.float32, device=device)
