"""Parameters that do not train.

Model: a pattern (`fnmatch`: `*` is any text, dots included) is held against the full names of the parameters in the
unwrapped model; a tied weight has several. What a pattern matches has no gradient and no optimizer state.

Limits: a frozen batch norm still follows the statistics of what passes through it, as in torch; only its weight and
bias stay.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from dslc.compiler.ir.program import ModelStep


class FreezeError(RuntimeError):
    """A pattern that does not do what it says."""


def freeze(step: ModelStep, model: nn.Module) -> None:
    """Takes the parameters that a pattern of `step.frozen` matches out of training.

    Raises FreezeError where a pattern matches none, or none is left: the compiler does not see the names of every
    model of a user's own.
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
