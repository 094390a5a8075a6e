"""The optimizer of a job over the parameters that train: a class of `torch.optim` or of runtime/optimizer, or a user's
own (custom_optimizer.py).

Contract: the fused kernel is used on the devices that the program names, else the `foreach` form. On one core of a CPU,
over torch's plain loop: SGD 2.5 times as fast, AdamW 4, Adagrad 2.6, RMSprop 1.3, with the same numbers within one
rounding of the update. A job uses the same kernel on every rank and under every plan for the same kind of device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from dslc.compiler.ir.parameter_names import ParameterNames
from dslc.compiler.ir.program import OptimizerStep
from dslc.compiler.trace.private_torch import is_distributed
from dslc.runtime.model.tensor_names import parameter_names
from dslc.runtime.optimizer.adam_8bit import Adam8bit
from dslc.runtime.optimizer.lion import Lion
from dslc.runtime.optimizer.local_parts import LocalParts
from dslc.runtime.optimizer.muon import ADAMW, Muon
from dslc.runtime.parallel import zero1
from dslc.runtime.parallel.custom_optimizer import OwnOptimizer, ParamGroup
from dslc.runtime.technique import offload

# Classes by the names in a program, most of them of runtime/optimizer. They have one implementation each. The `foreach`
# form of Adafactor needs as much memory again as all parameters, and the rank of the factors is why it is chosen.
OWN_CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adafactor": partial(torch.optim.Adafactor, foreach=False),
    "Adam8bit": partial(Adam8bit, decoupled=False),
    "AdamW8bit": partial(Adam8bit, decoupled=True),
    "Lion": Lion,
    "Muon": Muon,
}


def build_optimizer(
    step: OptimizerStep,
    model: nn.Module,
    shared_out: bool = False,
    moved: bool = False,
    kind: Callable[..., torch.optim.Optimizer] | None = None,
    names: ParameterNames | None = None,
) -> torch.optim.Optimizer:
    """Returns the optimizer over the model's trainable parameters, each once, in the model's order.

    `step.kind` is the name of the class in `OWN_CLASSES` or `torch.optim`, for which `kind` stands if it has none.
    Parameters that a pattern of `step.no_decay` matches, by any of their names, are a group of their own. So are the
    parameters of each of `step.groups`. Every group has `initial_lr`, to which the factor of the learning rate is
    applied. With `shared_out` each rank keeps the state of its share (zero1.py); with `moved`, in the host's memory
    (technique/offload.py). `names` are the names in the whole model, where `model` is a pipeline stage and has some of
    them alone.
    """
    names = names or parameter_names(model)
    groups = _groups(step, model, names)
    if step.python is not None:
        return _user_optimizer(step, groups, model, names, shared_out)
    parameters = [parameter for group in groups for parameter in group["params"]]
    device = parameters[0].device.type if parameters else "cpu"
    arguments: ParamGroup = {**step.arguments, "lr": step.lr}
    arguments.pop("adamw_lr", None)  # is in the groups
    if device in step.fused and all(parameter.is_floating_point() for parameter in parameters):
        arguments["fused"] = True
    elif step.kind not in OWN_CLASSES:
        arguments["foreach"] = True
    made: Any = zero1.share_out if shared_out else offload.optimizer if moved else _build
    kind = kind or OWN_CLASSES.get(step.kind) or getattr(torch.optim, step.kind)
    if not step.codes and any(map(is_distributed, parameters)):  # the layout of codes follows from whole parameters
        kind = _over_parts(kind)
    optimizer: torch.optim.Optimizer = made(kind, groups, arguments)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _user_optimizer(
    step: OptimizerStep, groups: list[ParamGroup], model: nn.Module, names: ParameterNames, shared_out: bool
) -> torch.optim.Optimizer:
    first = {id(parameter): names.first_name(name) for name, parameter in model.named_parameters()}
    kind: Any = partial(OwnOptimizer, step, names=first)
    optimizer: torch.optim.Optimizer = zero1.share_out(kind, groups, {}) if shared_out else kind(groups)
    for group in optimizer.param_groups:
        group["initial_lr"] = step.lr
    return optimizer


def _build(
    kind: Callable[..., torch.optim.Optimizer], groups: list[dict[str, object]], arguments: dict[str, object]
) -> torch.optim.Optimizer:
    return kind(groups, **arguments)


def _over_parts(kind: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Returns what makes an optimizer of this kind over the rank's parts of DTensors, from groups and arguments."""
    return lambda groups, **arguments: LocalParts(groups, arguments, lambda group: kind([group], **arguments))


def _groups(step: OptimizerStep, model: nn.Module, names: ParameterNames) -> list[ParamGroup]:
    """Returns the groups: the job's own after the rest, and those without decay after those with."""
    patterns = [group.parameters for group in step.groups]
    adamw = frozenset(name for name, _ in step.adamw or ())
    groups: dict[tuple[int, bool, bool], ParamGroup] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        number, still = names.group(patterns, name), names.match(step.no_decay, name)
        options = _split_options(step, parameter, names.first_name(name) in adamw)
        is_other = bool(options.get(ADAMW))
        if still:
            options["weight_decay"] = 0.0
        if number:
            named = step.groups[number - 1]
            given = {"lr": named.lr, "weight_decay": named.weight_decay}
            options |= {name: value for name, value in given.items() if value is not None}
            still = still and named.weight_decay is None
        groups.setdefault((number, still, is_other), {"params": [], **options})["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def _split_options(step: OptimizerStep, parameter: nn.Parameter, is_adamw: bool) -> ParamGroup:
    """Returns the options by which Muon leaves a parameter to AdamW or keeps it; none for another optimizer."""
    if not step.split:
        return {}
    if parameter.dim() == 2 and not is_adamw:
        return {ADAMW: False}
    return {ADAMW: True, "lr": step.arguments["adamw_lr"]}
