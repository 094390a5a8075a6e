"""Freezes parameters: those that do not train.

Model: a pattern (`fnmatch`: `*` is any text, dots included) is matched against the full names of the parameters in the
unwrapped model; a tied weight has several. A parameter that matches has no gradient and no optimizer state.

Limits: a frozen batch norm still updates its running statistics, as in torch; only its weight and bias stay.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from dslc.compiler.ir.program import ModelStep


class FreezeError(RuntimeError):
    """A pattern matches no parameter, or all of them."""


def freeze(step: ModelStep, model: nn.Module) -> None:
    """Freezes the parameters that a pattern of `step.frozen` matches.

    Raises FreezeError if a pattern matches none, or none is left to train: the compiler does not see the names in every
    user's own model.
    """
    named = [*model.named_parameters(remove_duplicate=False)] if step.frozen else []
    for pattern in step.frozen:
        matched = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not matched:
            raise FreezeError(f"`model.freeze`: no parameter is called `{pattern}`")
        for parameter in matched:
            parameter.requires_grad_(False)
    if step.frozen and not any(parameter.requires_grad for parameter in model.parameters()):
        raise FreezeError("`model.freeze` matches every parameter: there is nothing to train")
