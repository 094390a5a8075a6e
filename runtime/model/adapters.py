"""Adapters beside dense layers and stacks of experts, made by the library `peft` in the place of the layers (Hu et al.
2021, arXiv:2106.09685).

Model: a layer `x` becomes a layer that computes `x(input) + scale * B(A(dropout(input)))`, in which `x` is frozen; A
begins with numbers of the same distribution as a dense layer's, B with zeros. All else is frozen, except the modules to
`save`, which train where they are.

Contract: `add` takes a module of any device. The first numbers of A follow from the seed and its name in the file of an
adapter alone (`layers.0.q_proj.lora_A.weight`). `merge` returns the bits that peft's `merge_and_unload` does.

Of experts each has an A and a B of its own, stacked in one matrix (experts/library_experts.py).

Limits: `nn.Linear`, the `Conv1D` of transformers, and the stacks that compiler/ir/parameter_names.py knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from dslc.compiler.ir.parameter_names import (
    BASE,
    FIRST,
    SECOND,
    STACKS,
    file_name,
    is_stack,
    layers_with,
    targeted,
    targets_stack,
)
from dslc.compiler.ir.program import AdapterStep
from dslc.runtime.model.errors import ModelError
from dslc.runtime.model.experts.library_experts import adapt_experts
from dslc.runtime.model.tensor_names import seed_of
from dslc.runtime.model.transformers_model import quiet
from dslc.runtime.process.vision_library import let_torchvision_load

CONFIGURATION, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of an adapter alone, as peft names them
PREFIX = "base_model.model."  # of names in that file


class AdapterError(ModelError):
    """The adapter does not fit. `argument` of `lora` is at fault; `dense` are the layers and `stacks` the stacks of
    experts that can have one.
    """

    def __init__(
        self, message: str, argument: str = "targets", dense: Sequence[str] = (), stacks: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.argument, self.dense, self.stacks = argument, dense, stacks


def add(module: nn.Module, step: AdapterStep | None, seed: int) -> nn.Module:
    """Adds the adapters of `step` to `module`, in place, and returns it. Raises AdapterError."""
    if step is None:
        return module
    line_text = f"{step.line}: " if step.line else ""
    stacks = _stacks(module)
    inside = tuple(f"{name.rpartition('.')[0]}." for name in stacks)  # such as `experts.act_fn`
    targets = [name for name in _modules(module, step.targets) if not name.startswith(inside)]
    targeted_stacks = [name for name in stacks if targets_stack(step.targets, name)]
    saved = _modules(module, step.save)
    _check(module, [*targets, *targeted_stacks], stacks, saved, line_text)
    if targeted_stacks and step.dropout:
        reason = f"peft has no dropout beside stacks of experts, such as `{targeted_stacks[0]}`"
        raise AdapterError(f"{line_text}{reason}", "dropout")
    with _quiet():
        let_torchvision_load()  # which it imports
        import peft

        pattern = "|".join(map(re.escape, targets))
        config = _configuration(
            step, f"({pattern})" if targets else [], target_parameters=targeted_stacks or None, init_lora_weights=False
        )
        adapted: nn.Module = peft.inject_adapter_in_model(config, module)
    adapt_experts(adapted)
    for name in layers_with(name for name, _ in adapted.named_parameters()):
        for part in (FIRST, SECOND):
            matrix: Any = adapted.get_submodule(f"{name}.{part}")
            matrix.reset_parameters = partial(_begin, matrix, f"{name}.{part}.weight", seed)
            if not matrix.weight.is_meta:
                matrix.reset_parameters()
    for name in saved:
        adapted.get_submodule(name).requires_grad_()
    return adapted


def preload() -> None:
    """Imports the library, in the process from which ranks are forked."""
    with _quiet():
        let_torchvision_load()
        import peft  # noqa: F401


def targets_of(module: nn.Module) -> Iterator[tuple[str, bool]]:
    """Yields the layers of a module that have an adapter, and whether their weight lies transposed."""
    for name, part in module.named_modules():
        if name.endswith(f".{BASE}") or name == BASE:
            form = getattr(part, "form", None)  # of a quantized layer
            transposed = type(part).__name__ == "Conv1D" if form is None else form.transposed
            yield name.removesuffix(BASE).removesuffix("."), transposed


@contextlib.contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Lets `model` compute without its adapters while the context lasts.

    peft's `disable_adapter` would freeze the parameters too, and `fully_shard` then gather them frozen from then on.
    """
    adapted = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for module in adapted:
        module._disable_adapters = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in adapted:
            module._disable_adapters = False  # type: ignore[assignment]


def merge_stack(stack: Tensor, down: Tensor, up: Tensor, step: AdapterStep) -> Tensor:
    """Returns the weights of experts (experts, outputs, inputs) with their adapters' matrices added as peft does."""
    experts = stack.shape[0]
    change = torch.einsum("o r e, e r i -> e o i", up.unflatten(1, (-1, experts)), down.unflatten(0, (experts, -1)))
    return stack + change * scale(step)


def merge(weight: Tensor, down: Tensor, second: Tensor, step: AdapterStep, *, transposed: bool) -> Tensor:
    """Returns a layer's weight with its adapter's two matrices, in float32, added as peft adds them."""
    change = second @ down
    return weight + (change.T if transposed else change) * scale(step)


def scale(step: AdapterStep) -> float:
    return step.alpha / (sqrt(step.rank) if step.rslora else step.rank)


def save_configuration(
    step: AdapterStep, targets: list[str], stacks: list[str], base: str, kind: str, folder: str
) -> None:
    """Writes what peft's `from_pretrained` needs beside the weights: the dense layers and the stacks of experts with an
    adapter. `kind` is peft's name of the task, or "".
    """
    with _quiet():
        config = _configuration(
            step,
            targets if stacks or _has_pattern(step.targets) else list(step.targets),
            target_parameters=stacks or None,
            modules_to_save=list(step.save) or None,
            base_model_name_or_path=base or None,
            task_type=kind or None,
        )
        config.inference_mode = True
        config_values = config.to_dict()
    for name, value in config_values.items():
        config_values[name] = sorted(value) if isinstance(value, set) else value
    with open(os.path.join(folder, CONFIGURATION), "w", encoding="utf-8") as file:
        json.dump(config_values, file, indent=2, sort_keys=True)


def _has_pattern(targets: tuple[str, ...]) -> bool:
    return any(character in target for target in targets for character in "*?[")


def _configuration(step: AdapterStep, targets: list[str] | str, **more: Any) -> Any:
    let_torchvision_load()
    import peft

    return peft.LoraConfig(
        r=step.rank,
        lora_alpha=int(step.alpha) if step.alpha.is_integer() else step.alpha,
        lora_dropout=step.dropout,
        target_modules=targets,
        use_rslora=step.rslora,
        **more,
    )


def _modules(module: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    is_targeted = targeted(patterns)
    return [name for name, _ in module.named_modules() if name and is_targeted(name)]


def _stacks(module: nn.Module) -> list[str]:
    """Returns the parameters that stack the weights of experts."""
    modules = [name for name, part in module.named_modules() if is_stack(part)]
    return [f"{name}.{stack}" for name in modules for stack in STACKS]


def _check(module: nn.Module, targets: list[str], stacks: list[str], saved: list[str], line_text: str) -> None:
    """Raises AdapterError for targets that cannot have an adapter. `stacks` name the stacks of experts that can."""
    parts = dict(module.named_modules())
    for name in targets:
        why = "" if name in stacks else _unfit(parts[name])
        if why:
            raise AdapterError(f"{line_text}`{name}` {why}")
        inside = next((saved_name for saved_name in saved if f"{name}.".startswith(f"{saved_name}.")), None)
        if inside is not None:
            raise AdapterError(
                f"{line_text}`{inside}` trains whole, and an adapter beside `{name}` would add nothing", "save"
            )
    if not targets:
        dense = [name for name, part in parts.items() if name and not _unfit(part)]
        raise AdapterError(f"{line_text}no module has one of these names", dense=dense, stacks=stacks)


def _unfit(part: nn.Module) -> str:
    """Returns why a module can have no adapter; "" if it can."""
    kind = type(part)
    if kind.__name__ == "NonDynamicallyQuantizableLinear":
        return "is a part of torch's `MultiheadAttention`, which uses its weight without calling it"
    dense = isinstance(part, nn.Linear) and kind.forward is nn.Linear.forward
    if dense or (kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"):
        return ""
    return f"is a `{kind.__name__}`, and adapters are beside dense layers (`nn.Linear`) and stacks of experts"


@torch.no_grad()
def _begin(matrix: nn.Linear, name: str, seed: int) -> None:
    """Gives a matrix of an adapter its first numbers."""
    if FIRST not in name:
        matrix.weight.zero_()
        return
    generator = torch.Generator().manual_seed(seed_of(seed, file_name(name)))
    bound = 1 / sqrt(matrix.in_features)
    values = torch.empty(matrix.weight.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
    matrix.weight.copy_(values)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings, too, from the library and those it loads."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
