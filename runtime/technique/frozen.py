"""Freezes parameters: those that do not train.

Model: a pattern (`fnmatch`: `*` is any text, dots included) is matched against the full names of the parameters in the
unwrapped model; a tied weight has several. A parameter that matches has no gradient and no optimizer state.

Limits: a frozen batch norm still updates its running statistics, as in torch; only its weight and bias stay.
"""

from __future__ import annotations

from torch import nn

from dslc.compiler.ir.program import ModelStep
from dslc.runtime.model.tensor_names import parameter_names


class FreezeError(RuntimeError):
    """The patterns match no parameter, or all of them."""


def freeze(step: ModelStep, model: nn.Module) -> None:
    """Freezes the parameters that a pattern of `step.frozen` matches. Raises FreezeError if the patterns match none, or
    all: the compiler does not see the names in every user's own model.
    """
    if not step.frozen:
        return
    frozen = parameter_names(model).matching(step.frozen)
    matched = [parameter for name, parameter in model.named_parameters() if name in frozen]
    if not matched:
        raise FreezeError(f"`model.freeze`: no parameter is called {' or '.join(f'`{each}`' for each in step.frozen)}")
    for parameter in matched:
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise FreezeError("`model.freeze` matches every parameter: there is nothing to train")
