"""Adam whose momentum is exchanged in fewer bits: the optimizer of `qadam(warmup)` and `onebit_adam(freeze)`.

Rule: the first `alone` updates follow `torch.optim.Adam`, by gradients that are summed over all ranks. Then the second
moment v is frozen. In each further step a rank takes its own gradient g, with Adam's weight decay, and

m = beta1 m + (1 - beta1) g,  m = what all ranks agree on,  x = x - lr (m / (1 - beta1^t)) / (sqrt(v') + eps)

where v' is v / (1 - beta2^t) at the freeze. Where v is 0, because no gradient came before, m is set to 0 and x stays:
noise divided by eps alone would ruin it. Without an exchange a rank agrees with itself.

Source: Tang et al. 2021, arXiv:2102.02888, algorithm 1, and Bagua (Gan et al. 2021, arXiv:2107.01499), `QAdam`. They
leave the correction of the bias open. Here the correction of m goes on with the updates, and v' no longer changes. So
the first update after the freeze is as long as the last one before it.

Model: the optimizer keeps Adam's own state: `step`, `exp_avg` and `exp_avg_sq`. To keep v' while `step` grows,
`exp_avg_sq` is multiplied by the quotient of this step's correction and the last step's. A checkpoint so fits `adam`,
and the other way round.

Limits: a parameter without a gradient in some steps, as may be on one rank, is frozen after `alone` updates of its own.
An update that is left out (an overflow under `fp16`, `on_nonfinite = skip`) does not count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dslc.compiler.ir.program import OptimizerStep
from dslc.compiler.trace.private_torch import (
    add_all,
    approach_all,
    divide_all,
    roots,
    scale_all,
    signs,
    step_by_quotients,
    sums,
)
from dslc.runtime.exchange.compressed_momentum import MomentumExchange

KINDS = ("QAdam", "OnebitAdam")  # the names in a program (dsl/language/optimizers.py)

ParameterGroup: TypeAlias = dict[str, Any]  # of an optimizer, as torch has it
Closure = Callable[[], float]

# Without the wrappers that load the compiler.
_adam: Callable[[torch.optim.Adam, Closure | None], float | None] = inspect.unwrap(torch.optim.Adam.step)


class CompressedAdam(torch.optim.Adam):
    """Adam that freezes its second moment after `alone` updates; then `exchange`, if any, agrees on momenta."""

    def __init__(
        self, params: ParamsT, *, alone: int, exchange: MomentumExchange | None = None, **arguments: Any
    ) -> None:
        super().__init__(params, **arguments)
        self._alone, self._exchange = alone, exchange
        if exchange is not None:
            exchange.updates = lambda: self.updates

    @property
    def updates(self) -> int:
        return max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        if self.updates < self._alone:
            return _adam(self, closure)
        loss = closure() if closure is not None else None
        groups = [(group, [each for each in group["params"] if each.grad is not None]) for group in self.param_groups]
        groups = [(group, parameters) for group, parameters in groups if parameters]
        for group, parameters in groups:
            self._take_in(group, parameters)
        if self._exchange is not None:
            self._exchange.agree({each: self.state[each]["exp_avg"] for _, own in groups for each in own})
        for group, parameters in groups:
            self._update(group, parameters)
        return loss

    def _take_in(self, group: ParameterGroup, parameters: list[Tensor]) -> None:
        gradients = [each.grad for each in parameters if each.grad is not None]
        if group["weight_decay"]:
            gradients = list(sums(gradients, parameters, alpha=group["weight_decay"]))
        for each in parameters:
            if not self.state[each]:  # its first gradient comes after others'
                self.state[each] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(each),
                    "exp_avg_sq": torch.zeros_like(each),
                }
            self.state[each]["step"] += 1
        approach_all([self.state[each]["exp_avg"] for each in parameters], gradients, 1 - group["betas"][0])
        for each, gradient in zip(parameters, gradients, strict=True):
            if int(self.state[each]["step"]) <= self._alone:  # it had no gradient in some steps, as may be on one rank
                square, beta = self.state[each]["exp_avg_sq"], group["betas"][1]
                square.mul_(beta).addcmul_(gradient, gradient, value=1 - beta)

    def _update(self, group: ParameterGroup, parameters: list[Tensor]) -> None:
        steps = [int(self.state[each]["step"]) for each in parameters]
        first, second = ([1 - beta**step for step in steps] for beta in group["betas"])
        squares = [self.state[each]["exp_avg_sq"] for each in parameters]
        shrunk = [
            1.0 if step <= self._alone else (1 - group["betas"][1] ** (step - 1)) / now
            for step, now in zip(steps, second, strict=True)
        ]
        if min(shrunk) < 1 - 2.0**-25:  # else it would change no number
            divide_all(squares, shrunk)
        momenta = [self.state[each]["exp_avg"] for each in parameters]
        scale_all(momenta, signs(squares))
        quotients = roots(squares)
        divide_all(quotients, [each**0.5 for each in second])
        add_all(quotients, group["eps"])
        step_by_quotients(parameters, momenta, quotients, [-group["lr"] / each for each in first])


def compressed(step: OptimizerStep, exchange: object) -> Callable[..., torch.optim.Optimizer] | None:
    """Returns what makes the optimizer of a program from groups and arguments; None if it is another."""
    if step.python is not None or step.kind not in KINDS:
        return None
    own = exchange if isinstance(exchange, MomentumExchange) else None

    def make_optimizer(groups: list[ParameterGroup], **arguments: Any) -> torch.optim.Optimizer:
        return CompressedAdam(groups, exchange=own, **arguments)

    return make_optimizer
